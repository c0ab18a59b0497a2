"""The ranks' part of gpu.py, one rank: a GPT at every stage beside a bare torch loop, by turns."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import report
from gpu_facts import facts
from torch import Tensor, nn

import mntrain
from mntrain.tasks.transformer import Transformer
from mntrain.train.compiling import check_compiler, compile_regions
from mntrain.train.summary import peak_flops

GPT = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50304}
TINY = {"layers": 2, "width": 64, "heads": 2, "context": 64, "vocab": 512}
ADAMW = {"lr": 3e-4, "weight_decay": 0.1}
STAGES = (0, 1, 2)
BARE, BARE_AGAIN = "bare torch", "bare torch, once more"
LAYERS = "mntrain stage 0, compiled by layers"
WARM_UP = 3  # steps of each way, the first of which compiles
RUN = 5  # steps in a row, between which nobody waits for the device
ROUNDS = (4, 30)
# What a sequence of 1024 tokens needs of the device's memory, and each of the models trained by
# turns: parameters, gradients and AdamW's state.
SEQUENCE_BYTES, MODEL_BYTES = 1.2e9, 2.1e9
MOST_SEQUENCES = 32

Step = Callable[[Tensor], Tensor]


def main() -> None:
    """Measure, and report."""
    options = argparse.ArgumentParser()
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--tiny", action="store_true", help="a toy model, not compiled")
    options.add_argument("--micro-batch", type=int, default=0, help="0: what the memory holds")
    options.add_argument("--seconds", type=float, default=60)
    given = options.parse_args()
    shape = TINY if given.tiny else GPT
    device = torch.device(given.device)
    if not given.tiny:
        expect_compiler(device)
    micro_batch = given.micro_batch or fitting(device, given.tiny)
    with mntrain.init(device=given.device) as world:
        steps = ways(world, shape, compiled=not given.tiny)
        draw = torch.Generator().manual_seed(0)
        batches = partial(data, draw, shape, micro_batch, world.device)
        found = by_turns(steps, batches, world.device, given.seconds)
    model = Transformer(**shape)
    used = facts(device)
    report(
        {
            **used,
            "shape": shape,
            "parameters": sum(p.numel() for p in model.parameters()),
            "micro_batch": micro_batch,
            "tokens": micro_batch * shape["context"],
            "compiled": not given.tiny,
            "flops_per_token": model.flops_per_token(shape["context"]),
            "peak_flops": peak_flops([("", used["gpu"])], "bf16"),
            "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
            "ways": found,
        }
    )


def expect_compiler(device: torch.device) -> None:
    """End this program, with the reason, where torch.compile lacks something."""
    try:
        check_compiler(device)
    except ValueError as refusal:
        sys.exit(str(refusal).replace("--train.compile", "gpu_step.py"))


def fitting(device: torch.device, tiny: bool) -> int:
    """Return the largest power of two of sequences that surely has room in a step."""
    if tiny or device.type != "cuda":
        return 4
    free, _ = torch.cuda.mem_get_info()
    room = 0.6 * free - MODEL_BYTES * (len(STAGES) + 3)
    sequences = 1
    while 2 * sequences <= min(MOST_SEQUENCES, room / SEQUENCE_BYTES):
        sequences *= 2
    return sequences


def ways(world: mntrain.World, shape: dict[str, int], *, compiled: bool) -> dict[str, Step]:
    """Every way to train, with a model of its own. A second bare loop shows what chance is."""

    def bare(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def own(stage: int) -> Callable[[nn.Module], Any]:
        return lambda model: world.optimizer(
            model, torch.optim.AdamW, stage=stage, fused=True, **ADAMW
        )

    made: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], nn.Module]]]
    whole = torch.compile if compiled else as_it_is
    made = {BARE: (bare, whole)}
    made |= {f"mntrain stage {stage}": (own(stage), whole) for stage in STAGES}
    if compiled:
        made[LAYERS] = own(0), by_layers
    made[BARE_AGAIN] = bare, whole
    return {name: way(shape, world.device, *how) for name, how in made.items()}


def as_it_is(model: nn.Module) -> nn.Module:
    """The model, not compiled."""
    return model


def by_layers(model: Transformer) -> Transformer:
    """The model, compiled as a job does, so that gradients leave while backward runs."""
    compile_regions([*model.blocks, model.norm, model.head])
    return model


def way(
    shape: dict[str, int],
    device: torch.device,
    make: Callable[[nn.Module], Any],
    compiled: Callable[[nn.Module], nn.Module],
) -> Step:
    """A model of its own with its optimizer: a step on one micro-batch, which gives its loss."""
    torch.manual_seed(0)
    model = Transformer(**shape).to(device)
    optimizer = make(model)
    compute = compiled(model)

    def step(windows: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = compute(windows[:, :-1], windows[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def by_turns(
    steps: dict[str, Step],
    batches: Callable[[int], Iterator[Tensor]],
    device: torch.device,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Train by every way in turn, on the same batches: what each took, and its loss at first.

    Later losses differ: orders of sums that differ lead the same training far apart.

    A turn is RUN steps. The first goes to the end for the next round, and every other round goes
    backwards.
    """
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in steps}
    first = list(batches(WARM_UP))
    losses = {name: run(step, first, device)[1] for name, step in steps.items()}
    start, number = time.perf_counter(), 0
    while number < ROUNDS[0] or (number < ROUNDS[1] and time.perf_counter() - start < seconds):
        windows = list(batches(RUN))
        turn = number // 2 % len(names)
        order = names[turn:] + names[:turn]
        for name in reversed(order) if number % 2 else order:
            times[name].append(run(steps[name], windows, device)[0])
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


def run(step: Step, windows: list[Tensor], device: torch.device) -> tuple[float, float]:
    """Some steps in a row: seconds a step, and the last one's loss."""
    settle(device)
    start = time.perf_counter()
    for window in windows:
        loss = step(window)
    settle(device)
    return (time.perf_counter() - start) / len(windows), loss.item()


def settle(device: torch.device) -> None:
    """Wait for all that the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def data(
    draw: torch.Generator, shape: dict[str, int], micro_batch: int, device: torch.device, count: int
) -> Iterator[Tensor]:
    """Batches on the device, of windows in which each token all but decides the next."""
    vocab, length = shape["vocab"], shape["context"] + 1
    for _ in range(count):
        start = torch.randint(vocab, (micro_batch, 1), generator=draw)
        jumps = torch.randint(2, (micro_batch, length), generator=draw)
        yield ((start + 7 * torch.arange(length) + jumps) % vocab).to(device)


if __name__ == "__main__":
    main()
