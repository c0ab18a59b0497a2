"""The rank script of gpu.py: one of its parts, on a GPU or the CPU; prints one JSON object."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from collectives import measure
from common import mpi_library, report, versions
from mpi4py import MPI
from torch import Tensor, nn

import mntrain
from mntrain import AgreedError
from mntrain.bench.candidates import Pattern, library_candidate, rendezvous
from mntrain.tasks.transformer import Transformer
from mntrain.train.ending import peak_flops
from mntrain.train.forward import check_compiler, compile_regions

MIB = 2**20
GPT = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50304}
TINY = {"layers": 2, "width": 64, "heads": 2, "context": 64, "vocab": 512}
ADAMW = {"lr": 3e-4, "weight_decay": 0.1}
STAGES = (0, 1, 2)
BARE = "bare torch"
WARM_UP = 3  # steps of each way, the first of which compiles
RUN = 5  # steps in a row, between which nobody waits for the device
ROUNDS = (4, 30)  # fewest and most
# What a sequence of 1024 tokens needs of the device's memory, and each of the models trained by
# turns: parameters, gradients and AdamW's state.
SEQUENCE_BYTES, MODEL_BYTES, MOST_SEQUENCES = 1.2e9, 2.1e9, 32
TRANSPORTS = ("host", "cuda-aware", "nccl")
PIECE = 32 * MIB  # of the copies that show the limit

Step = Callable[[Tensor], Tensor]


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=["step", "transports"], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy model, not compiled")
    parser.add_argument("--micro-batch", type=int, default=0, help="0: what the memory holds")
    parser.add_argument("--seconds", type=float, default=60, help="of a part, or of one size")
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16])
    given = parser.parse_args()
    device = torch.device(given.device)
    found = {"step": step, "transports": transports}[given.part](given, device)
    on_gpu = device.type == "cuda"
    found |= {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "",
        "cuda": torch.version.cuda,
        "versions": versions(("triton", "cupy-cuda12x", "cupy-cuda13x")),
        "library": mpi_library(),
    }
    if MPI.COMM_WORLD.rank == 0:
        report(found)


def step(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train a GPT at every stage beside a bare torch loop, by turns."""
    shape, on_gpu = TINY if given.tiny else GPT, device.type == "cuda"
    if not given.tiny:
        try:
            check_compiler(device)
        except ValueError as refusal:
            sys.exit(str(refusal).replace("--train.compile", "gpu.py"))
    micro_batch = given.micro_batch or 4
    if on_gpu and not given.tiny and not given.micro_batch:
        room = 0.6 * torch.cuda.mem_get_info()[0] - MODEL_BYTES * (len(STAGES) + 3)
        micro_batch = 1
        while 2 * micro_batch <= min(MOST_SEQUENCES, room / SEQUENCE_BYTES):
            micro_batch *= 2
    with mntrain.init(device=given.device) as world:
        steps = ways(world, shape, compiled=not given.tiny)
        draw = torch.Generator().manual_seed(0)
        batches = partial(data, draw, shape, micro_batch, world.device)
        found = by_turns(steps, batches, given.seconds)
    model = Transformer(**shape)
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    return {
        "shape": shape,
        "parameters": sum(p.numel() for p in model.parameters()),
        "micro_batch": micro_batch,
        "tokens": micro_batch * shape["context"],
        "compiled": not given.tiny,
        "flops_per_token": model.flops_per_token(shape["context"]),
        "peak_flops": peak_flops([("", name)], "bf16"),
        "ways": found,
    }


def ways(world: mntrain.World, shape: dict[str, int], *, compiled: bool) -> dict[str, Step]:
    """Every way to train, with a model of its own. A second bare loop shows what chance is."""

    def bare(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def own(stage: int) -> Callable[[nn.Module], Any]:
        settings = {"stage": stage, "fused": True, **ADAMW}
        return lambda model: world.optimizer(model, torch.optim.AdamW, **settings)

    def by_layers(model: Transformer) -> Transformer:
        """Compile as a job does, so that gradients leave while backward runs."""
        compile_regions([*model.blocks, model.norm, model.head])
        return model

    def way(make: Callable[[nn.Module], Any], compiled: Callable[[Any], nn.Module]) -> Step:
        torch.manual_seed(0)
        model = Transformer(**shape).to(world.device)
        optimizer, compute = make(model), compiled(model)

        def step(windows: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(world.device.type, torch.bfloat16):
                loss: Tensor = compute(windows[:, :-1], windows[:, 1:])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    whole = torch.compile if compiled else (lambda model: model)
    made: dict[str, tuple[Any, Any]] = {BARE: (bare, whole)}
    made |= {f"mntrain stage {stage}": (own(stage), whole) for stage in STAGES}
    if compiled:
        made["mntrain stage 0, compiled by layers"] = own(0), by_layers
    made[f"{BARE}, once more"] = bare, whole
    return {name: way(*how) for name, how in made.items()}


def by_turns(
    steps: dict[str, Step], batches: Callable[[int], Iterator[Tensor]], seconds: float
) -> dict[str, dict[str, Any]]:
    """Train by every way in turn, on the same batches: what each took, and its loss at first.

    Later losses differ: orders of sums that differ lead the same training far apart. A turn is RUN
    steps. The first goes to the end for the next round, and every other round goes backwards.
    """
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in steps}
    first = list(batches(WARM_UP))
    losses = {name: run(step, first)[1] for name, step in steps.items()}
    start, number = time.perf_counter(), 0
    while number < ROUNDS[0] or (number < ROUNDS[1] and time.perf_counter() - start < seconds):
        windows = list(batches(RUN))
        turn = number // 2 % len(names)
        order = names[turn:] + names[:turn]
        for name in reversed(order) if number % 2 else order:
            times[name].append(run(steps[name], windows)[0])
        number += 1
    return {
        name: {
            "step_s": took,
            "median_s": statistics.median(took),
            "ratio": statistics.median(a / b for a, b in zip(took, times[BARE], strict=True)),
            "loss": losses[name],
        }
        for name, took in times.items()
    }


def run(step: Step, windows: list[Tensor]) -> tuple[float, float]:
    """Some steps in a row: seconds a step, and the last one's loss."""
    settle(windows[0])
    start = time.perf_counter()
    for window in windows:
        loss = step(window)
    settle(loss)
    return (time.perf_counter() - start) / len(windows), loss.item()


def settle(tensor: Tensor) -> None:
    """Wait for all that the tensor's device has been given."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def data(
    draw: torch.Generator, shape: dict[str, int], micro_batch: int, device: torch.device, count: int
) -> Iterator[Tensor]:
    """Batches on the device, of windows in which each token all but decides the next."""
    vocab, length = shape["vocab"], shape["context"] + 1
    for _ in range(count):
        start = torch.randint(vocab, (micro_batch, 1), generator=draw)
        jumps = torch.randint(2, (micro_batch, length), generator=draw)
        yield ((start + 7 * torch.arange(length) + jumps) % vocab).to(device)


def transports(given: argparse.Namespace, _: torch.device) -> dict[str, Any]:
    """Measure all-reduce of device memory by every transport that works here, beside copies."""
    comm = MPI.COMM_WORLD.Dup()
    rows: list[dict[str, Any]] = []
    copies: list[dict[str, float]] = []
    worlds: dict[str, mntrain.World] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        if given.device == "cpu":
            worlds["shared memory"] = stack.enter_context(mntrain.init(device="cpu"))
        for name in TRANSPORTS if given.device == "cuda" else ():
            try:
                worlds[name] = stack.enter_context(mntrain.init(device="cuda", transport=name))
            except AgreedError as error:
                absent[name] = str(error)
        first = next(iter(worlds.values()))
        for mib in given.mib:
            numel = int(mib * MIB) // 4
            memory = first.collectives.allocate(numel, torch.float32, first.device)
            pattern = Pattern(comm.rank, comm.size, memory)
            candidates = [
                library_candidate(name, "all_reduce", world.collectives, memory, pattern)
                for name, world in worlds.items()
            ]
            copies.append({"mib": mib, "seconds": copy_seconds(comm, memory)})
            rows += measure(comm, candidates, "all_reduce", mib, given.seconds)
            del memory, candidates
        places = [place.device for place in first.places]
    comm.Free()
    found = {"ranks": MPI.COMM_WORLD.size, "places": places, "absent": absent}
    return {**found, "copies": copies, "rows": rows}


def copy_seconds(comm: MPI.Intracomm, memory: Tensor) -> float:
    """Return the time that all ranks at once need to copy the tensor to the host. Collective.

    As much is copied back at the same time, from and to pinned memory. Of the slowest rank; the
    best of a few.
    """
    numel = min(memory.numel(), PIECE // 4)
    buffers = [torch.empty(numel, dtype=memory.dtype, pin_memory=memory.is_cuda) for _ in range(2)]
    took = []
    for _ in range(3):
        rendezvous(comm)
        start = time.perf_counter()
        for buffer, out in zip(buffers, (True, False), strict=True):
            own = torch.cuda.Stream(memory.device) if memory.is_cuda else None
            with torch.cuda.stream(own):
                for piece in memory.split(numel):
                    part = buffer[: piece.numel()]
                    target, source = (part, piece) if out else (piece, part)
                    target.copy_(source, non_blocking=True)
        settle(memory)
        took.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return min(took)


if __name__ == "__main__":
    main()
