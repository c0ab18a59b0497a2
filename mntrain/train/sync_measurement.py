"""Seconds of a step's computing and of bytes between nodes, measured at the start of a job.

A job is left as it was: copies of the task and the model compute, on samples from a copy of the
dataset, and random generators get their states back. All ranks measure at once, since they share
cores and links in training, too.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from mntrain import device
from mntrain.tasks import check_loss
from mntrain.train.compiling import recompute_regions
from mntrain.train.sync_choice import Volumes
from mntrain.train.trial import Trial, copies, total_of, without_trace
from mntrain.world import World
from zero.codes import BlockCode
from zero.comm_hooks.int8 import Int8Hook

_PASSES, _PASSES_S = 4, 2.0  # forwards and backwards after the first: the most, and their seconds
_SMALL_REPETITIONS = 8  # of an all-reduce of one element
# Bytes of the all-reduces: the first one is repeated, since it opens connections. Links of clouds
# (and emulated ones) let some 100 KB pass faster than the rest.
_SIZES = (64 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20)
_WIRE_S, _REPETITIONS = 2.0, 3  # seconds for all of them; of the largest
_SAMPLE = 1 << 18  # elements that are encoded
_LEAST_S = 1e-9  # of anything, so that ratios are finite


class MeasurementError(Exception):
    """No rank can measure, for a reason that all know."""


@dataclass(frozen=True)
class Computing:
    """Seconds of the slowest rank's step, and of the backward of one of its micro-batches."""

    step_s: float
    backward_s: float
    micro_batches: int  # of the rank with most


def measure_computing(world: World, trial: Trial) -> Computing:
    """Return the time of a step's forwards and backwards, the same on all ranks. Collective.

    The first micro-batch counts for all of the rank's. The model is not compiled. Takes about four
    passes, or two if one takes longer than a second. Raises MeasurementError if any rank cannot.
    """
    with without_trace(trial.model, world.device):
        count, first, run = 0, (0.0, 0.0), None
        try:
            count, run = _prepare(trial, world.device)
            reason = ""
        except Exception as error:
            reason = _in_words(error)
        _expect_all(world, reason)
        try:
            first = run() if run else first
        except Exception as error:
            reason = _in_words(error)
        _expect_all(world, reason)
        slowest = max(sum(pair) for pair in world.gather(first))
        passes = max(1, min(_PASSES, int(_PASSES_S / max(slowest, _LEAST_S))))
        try:
            times = [run() if run else first for _ in range(passes)]
        except Exception as error:
            reason = _in_words(error)
        _expect_all(world, reason)
        run = None  # the copies, before memory is freed
    forward_s, backward_s = (median(column) for column in zip(*times, strict=True))
    by_rank = world.gather((count * (forward_s + backward_s), backward_s, count))
    step_s, backward_s, _ = max(by_rank)
    return Computing(max(step_s, _LEAST_S), backward_s, max(1, *(row[2] for row in by_rank)))


def measure_wire(world: World) -> tuple[float, float]:
    """Return the seconds of a small all-reduce, and per byte that a node sends. Collective.

    Each is the least of several, since other processes on the cores are not the link; the bytes'
    is without the small all-reduce's. The sizes
    grow as long as two seconds suffice for the next; a link that is too slow for the first takes
    longer. The same on all ranks. Leaves no tensor.
    """
    nodes = len(world.topology.nodes)
    small = [_all_reduce_s(world, 4) for _ in range(1 + _SMALL_REPETITIONS)]
    spent_s, nbytes, times = 0.0, 0, [0.0]
    for size in _SIZES:
        if nbytes and spent_s + times[-1] * size / nbytes > _WIRE_S:
            break
        times, nbytes = [_all_reduce_s(world, size)], size
        spent_s += times[0]
    while len(times) < _REPETITIONS and spent_s + times[-1] < _WIRE_S:
        times.append(_all_reduce_s(world, nbytes))
        spent_s += times[-1]
    sent = 2 * (nodes - 1) / nodes * nbytes
    latency_s = min(small[1:])
    return latency_s, max(min(times) - latency_s, _LEAST_S) / sent


def measure_codecs(world: World, elements: int) -> dict[str, float]:
    """Return the seconds in which bf16 and int8 encode and decode a model's gradients. Collective.

    A rank encodes its lane of `elements`, and decodes those of all nodes. The same on all ranks.
    """
    lane, nodes = elements / world.topology.smallest_node, len(world.topology.nodes)
    sums = torch.linspace(-1, 1, _SAMPLE, device=world.device)
    total, hook = torch.zeros_like(sums), Int8Hook()
    code = torch.zeros(hook.code_bytes(_SAMPLE, sums.dtype), dtype=torch.uint8, device=world.device)

    def bf16() -> None:
        half = sums.to(torch.bfloat16)
        for _ in range(nodes):
            total.add_(half.float())

    def int8() -> None:
        sums.add_(total)
        hook.encode(sums, code)
        for _ in range(nodes):
            hook.decode(code, total)

    world.barrier()
    own = {name: _best_s(run, world.device) for name, run in (("bf16", bf16), ("int8", int8))}
    slowest = {name: max(times[name] for times in world.gather(own)) for name in own}
    return {name: seconds * lane / _SAMPLE for name, seconds in slowest.items()}


def volumes_of(model: nn.Module, *, stage: int, narrow_gather: bool) -> Volumes:
    """Return the bytes of a model's trained parameters and their gradients. Local.

    `narrow_gather`: stages 1 and 2 gather parameters in 16 bits.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Volumes(
        gradients=sum(p.nbytes for p in trained),
        bf16=sum(_narrow_bytes(p) for p in trained),
        int8=sum(_code_bytes(p, bits=8) for p in trained),
        gathered=sum(_narrow_bytes(p) if narrow_gather else p.nbytes for p in trained)
        if stage
        else 0,
        exchanged=sum(max(p.nbytes, p.numel() * 4) for p in trained),
        streamed=sum(_code_bytes(p, bits=4) for p in trained),
    )


def _narrow_bytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.is_complex() else min(tensor.nbytes, 2 * tensor.numel())


def _code_bytes(tensor: Tensor, *, bits: int) -> int:
    return tensor.nbytes if tensor.is_complex() else BlockCode(bits).nbytes(tensor.numel())


def _prepare(
    trial: Trial, on: torch.device
) -> tuple[int, Callable[[], tuple[float, float]] | None]:
    """Return this rank's number of micro-batches, and a function that computes one. Local.

    The function returns the seconds of forward and backward. None for a rank without samples.
    """
    count, samples = trial.data.first_micro_batch(trial.done)
    if not count:
        return 0, None
    task, model = copies(trial.task, trial.model)
    if trial.recompute:
        recompute_regions(task.regions(model))
    batch = device.move((task.collate or default_collate)(samples), on, trial.floats)

    def run() -> tuple[float, float]:
        start = _now(on)
        autocast = trial.autocast
        with torch.autocast(on.type, dtype=autocast) if autocast else nullcontext():
            loss = task.loss(model, batch)
        middle = _now(on)
        check_loss(loss, trial.name)
        if (total := total_of(loss)) is not None:
            total.backward()
        end = _now(on)
        for parameter in model.parameters():
            parameter.grad = None
        return middle - start, end - middle

    return count, run


def _expect_all(world: World, reason: str) -> None:
    """Raise MeasurementError on all ranks if any has a reason not to go on. Collective."""
    if reasons := [f"{text} on rank {r}" for r, text in enumerate(world.gather(reason)) if text]:
        raise MeasurementError(reasons[0])


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _all_reduce_s(world: World, nbytes: int) -> float:
    """Return the slowest rank's seconds for an all-reduce of fp32 over all ranks. Collective."""
    tensor = torch.zeros(nbytes // 4, device=world.device)
    collectives = world.collectives.named("measurement of the links between nodes")
    world.barrier()
    start = _now(world.device)
    collectives.all_reduce(tensor).wait()
    return max(world.gather(_now(world.device) - start))


@torch.no_grad()
def _best_s(run: Callable[[], None], on: torch.device) -> float:
    """Return the least seconds of three calls, after one. Local."""
    times = []
    for _ in range(4):
        start = _now(on)
        run()
        times.append(_now(on) - start)
    return min(times[1:])


def _now(on: torch.device) -> float:
    """Return the time, when the device has computed all that it was given."""
    if on.type == "cuda":
        torch.cuda.synchronize(on)
    return time.perf_counter()
