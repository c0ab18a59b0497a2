"""The ranks' part of zero.py: train one GPT in one way, print one JSON object."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and mntrain count the cores
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from all_reduce import start_gloo  # the one beside this file
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mntrain
from mntrain.tasks.transformer import Transformer

MODEL = {"layers": 6, "width": 384, "heads": 6, "context": 64, "vocab": 704}
MICRO_BATCH = 4
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}
WARM_UP = 2
PACKAGES = ("torch", "deepspeed", "mntrain", "mpi4py", "numpy")

Batch = tuple[Tensor, Tensor]  # tokens and the ones that follow, (b, t) each


class Way(NamedTuple):
    """One way to train: a step on a batch, which returns its loss, and how it is set.

    `state` gives the bytes of the model's state by role, measured and expected, where known.
    """

    step: Callable[[Batch], Tensor]
    settings: str
    state: Callable[[], dict[str, dict[str, int]]] | None = None


class AbsentError(Exception):
    """A peer cannot be imported here; the text says why."""


def main() -> None:
    """Train and say how long steps took, how much memory they needed, and what was learned."""
    options = argparse.ArgumentParser()
    options.add_argument("--what", choices=WAYS, required=True)
    options.add_argument("--steps", type=int, default=8)
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = MPI.COMM_WORLD
    row: dict[str, Any] = {"what": given.what}
    try:
        mine = measure(given.what, given.steps)
    except AbsentError as reason:
        row["absent"] = str(reason)
    else:
        everyone = comm.gather(mine)
        if everyone is not None:
            row |= summary(everyone)
    row |= {
        "gradient_bytes": 4 * sum(p.numel() for p in Transformer(**MODEL).parameters()),
        "versions": versions(),
        "library": mpi_library(),
    }
    if comm.rank == 0:
        print(json.dumps(row))


def measure(what: str, steps: int) -> dict[str, Any]:
    """What this rank sees of training in one way."""
    group, make = WAYS[what]
    model = Transformer(**MODEL)
    batches = list(data(MPI.COMM_WORLD.rank, WARM_UP + steps))
    with group() as context:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        before = status("VmRSS")
        way = make(model, context)
        for batch in batches[:WARM_UP]:
            way.step(batch)
        sent, times = bytes_sent(), [time.perf_counter()]
        for batch in batches[WARM_UP:]:
            loss = way.step(batch)
            times.append(time.perf_counter())
        return {
            "step_s": [end - start for start, end in pairwise(times)],
            "sent_bytes": (bytes_sent() - sent) / steps,
            "peak_bytes": status("VmHWM") - before,
            "loss": loss.item(),
            "settings": way.settings,
            "state": way.state() if way.state else None,
        }


def summary(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of what all ranks saw: a step takes as long as it takes the slowest."""
    by_step = zip(*(mine["step_s"] for mine in everyone), strict=True)
    return {
        "step_s": [max(ranks) for ranks in by_step],
        "sent_bytes": max(mine["sent_bytes"] for mine in everyone),
        "peak_bytes": [mine["peak_bytes"] for mine in everyone],
        "loss": sum(mine["loss"] for mine in everyone) / len(everyone),
        "settings": everyone[0]["settings"],
        "state": [mine["state"] for mine in everyone] if everyone[0]["state"] else None,
    }


def data(rank: int, count: int) -> Iterator[Batch]:
    """This rank's batches, the same for every way: each token all but decides the next."""
    draw = torch.Generator().manual_seed(rank)
    vocab, length = MODEL["vocab"], MODEL["context"] + 1
    for _ in range(count):
        tokens = torch.randint(vocab, (MICRO_BATCH, length), generator=draw)
        for t in range(1, length):
            tokens[:, t] = (5 * tokens[:, t - 1] + tokens[:, t] % 2) % vocab
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next tokens."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
    """The loop that every way but DeepSpeed shares."""

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def alone(model: nn.Module, _: None) -> Way:
    """Forward, backward and update with no communication: what every other way adds to."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Way(plain_step(model, optimizer), "as many ranks at once, each for itself")


def own(stage: int) -> Callable[[nn.Module, mntrain.World], Way]:
    """This project as it comes."""

    def make(model: nn.Module, world: mntrain.World) -> Way:
        optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
        return Way(
            plain_step(model, optimizer),
            f"as it comes: algorithm {world.algorithm}",
            lambda: {
                "measured": asdict(optimizer.memory()),
                "expected": asdict(optimizer.expected_memory()),
            },
        )

    return make


def ddp(bucket_mb: int, sharded: bool = False) -> Callable[[nn.Module, None], Way]:
    """Torch's data parallelism, with AdamW whole or sharded by ZeroRedundancyOptimizer."""

    def make(model: nn.Module, _: None) -> Way:
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        if sharded:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.AdamW,
                parameters_as_bucket_view=True,
                **ADAMW,
            )
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return Way(plain_step(wrapped, optimizer), f"{bucket_mb} MB buckets, gradients as views")

    return make


def fsdp(again: bool) -> Callable[[nn.Module, None], Way]:
    """Torch's fully sharded data parallelism, a group a block.

    again: backward gathers the parameters once more (ZeRO-3), else forward's stay (ZeRO-2).
    """

    def make(model: nn.Module, _: None) -> Way:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=again)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return Way(plain_step(model, optimizer), f"a group a block, reshard_after_forward={again}")

    return make


def deepspeed(stage: int) -> Callable[[nn.Module, Any], Way]:
    """DeepSpeed with torch's AdamW."""

    def make(model: nn.Module, package: Any) -> Way:
        engine, *_ = package.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
            config={
                "train_micro_batch_size_per_gpu": MICRO_BATCH,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,  # nobody else clips, and it does by default
            },
        )

        def step(batch: Batch) -> Tensor:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Way(step, "as it comes, but torch's AdamW and no clipping")

    return make


@contextmanager
def gloo() -> Iterator[None]:
    """A gloo group of all ranks."""
    start_gloo(MPI.COMM_WORLD)
    yield
    MPI.COMM_WORLD.Barrier()  # who leaves closes connections that others may still read from
    dist.destroy_process_group()


@contextmanager
def gloo_and_deepspeed() -> Iterator[Any]:
    """The package, on a gloo group. AbsentError where it cannot be imported."""
    comm = MPI.COMM_WORLD
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
    os.environ["LOCAL_RANK"] = str(comm.Split_type(MPI.COMM_TYPE_SHARED).rank)
    try:
        package = import_module("deepspeed")
    except Exception as error:  # whatever its parts raise where something is missing
        words = " ".join(str(error).split())  # on one line, for a table
        raise AbsentError(f"{type(error).__name__}: {words}") from error
    # Or it would look for a compiler, for a sum through shared memory that training does not use.
    import_module("deepspeed.ops").__compatible_ops__ = {}
    with gloo():
        package.init_distributed("gloo")
        yield package


Group = Callable[[], AbstractContextManager[Any]]
Make = Callable[[nn.Module, Any], Way]
WAYS: dict[str, tuple[Group, Make]] = {
    "computing alone": (nullcontext, alone),
    "mntrain stage 0": (mntrain.init, own(0)),
    "mntrain stage 1": (mntrain.init, own(1)),
    "mntrain stage 2": (mntrain.init, own(2)),
    "DDP": (gloo, ddp(25)),
    "DDP, 4 MB buckets": (gloo, ddp(4)),
    "DDP, ZeroRedundancyOptimizer": (gloo, ddp(25, sharded=True)),
    "FSDP2, ZeRO-2": (gloo, fsdp(again=False)),
    "FSDP2, ZeRO-3": (gloo, fsdp(again=True)),
    "DeepSpeed stage 0": (gloo_and_deepspeed, deepspeed(0)),
    "DeepSpeed stage 1": (gloo_and_deepspeed, deepspeed(1)),
    "DeepSpeed stage 2": (gloo_and_deepspeed, deepspeed(2)),
}


def status(field: str) -> int:
    """A figure of this process's memory from /proc, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def bytes_sent() -> int:
    """What this node has put on its link so far, headers included."""
    _, found, figures = Path("/proc/net/dev").read_text().partition("eth0:")
    return int(figures.split()[8]) if found else 0  # after eight figures of receiving


def mpi_library() -> str:
    """Name and version of the MPI library."""
    vendor, numbers = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, numbers))}"


def versions() -> dict[str, str]:
    """Of Python and of every package that matters, where it is installed."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
