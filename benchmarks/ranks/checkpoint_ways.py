"""The ways to save that checkpoint.py compares: this project's, torch's, DeepSpeed's, and dd."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import AbsentError
from gpt import ADAMW, plain_step
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from ways import gloo, gloo_and_deepspeed

import mntrain
from mntrain import checkpoint
from mntrain.checkpoint import RunProgress, Saver
from mntrain.tasks.transformer import Transformer
from zero.layout import split

OWN = ("mntrain", "mntrain, beside training")
CONTEXT, LAYERS = 16, 6
POLL_S = 5e-4


@dataclass
class Saved:
    """What a save says of itself. None: training waits for all of it."""

    pause_s: float | None = None  # until training goes on
    later_s: float | None = None  # of later calls, which come when they need not wait


class Way(NamedTuple):
    """One way to save and to load, collective. Saves find an empty folder, the same every time."""

    save: Callable[[Path, Saved], None]
    settings: str
    load: Callable[[Path], None] | None = None  # None: as another way loads
    tensors: Callable[[], list[Tensor]] = list  # this rank's, which a load fills


class Disk(NamedTuple):
    """Plain writes of as many bytes."""

    write: Callable[[Path], None]
    settings: str


class Absent(NamedTuple):
    """A peer that cannot be had."""

    why: str


@dataclass
class Ways:
    """All of them, and what they save: this rank's part of a state of so many bytes in all."""

    ways: dict[str, Way | Disk | Absent]
    state: list[Tensor]
    parameters: int
    state_bytes: int


@contextmanager
def ways(comm: MPI.Intracomm, folder: Path, stage: int, millions: float) -> Iterator[Ways]:
    """Every way, each with a model after one step, and a folder by its name. Collective."""
    with ExitStack() as stack:
        world = stack.enter_context(mntrain.init(device="cpu", tune=False))
        try:
            package = stack.enter_context(gloo_and_deepspeed())
        except AbsentError as reason:
            stack.enter_context(gloo())
            theirs: Way | Absent = Absent(str(reason))
        else:
            theirs = deepspeed(comm, model_of(millions), package)
        own, state = mntrain_ways(comm, folder, world, stage, model_of(millions))
        parameters = sum(p.numel() for p in model_of(millions).parameters())
        nbytes = comm.allreduce(sum(tensor.nbytes for tensor in state))
        found: dict[str, Way | Disk | Absent] = {
            **own,
            "torch.save on rank 0": torch_save(comm, model_of(millions)),
            **sharded(comm, model_of(millions)),
            "DeepSpeed stage 1": theirs,
        }
        for count in sorted({comm.size, 1}, reverse=True):
            found[f"dd, {count} at once" if count > 1 else "dd, one"] = disk(comm, nbytes, count)
        yield Ways(found, state, parameters, nbytes)


def model_of(millions: float) -> Transformer:
    """A transformer of about so many million parameters, the same every time."""
    torch.manual_seed(0)
    width = max(64, 64 * round((0.85e6 * millions / (12 * LAYERS)) ** 0.5 / 64))
    vocab = max(64, int(1e6 * millions - 12 * LAYERS * width**2) // width)
    return Transformer(layers=LAYERS, width=width, heads=width // 64, context=CONTEXT, vocab=vocab)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Something to take a step on."""
    tokens = torch.arange(CONTEXT + 1)[None] % model.embedding.num_embeddings
    return tokens[:, :-1], tokens[:, 1:]


def mntrain_ways(
    comm: MPI.Intracomm, folder: Path, world: mntrain.World, stage: int, model: nn.Module
) -> tuple[dict[str, Way], list[Tensor]]:
    """This project as it comes: a save that is waited for, and one beside training; the state."""
    tokens = batch(model)
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
    plain_step(model, optimizer)(tokens)
    optimizer.zero_grad()
    optimizer.wait_for_parameters()
    # Each of its own, so that neither finds memory that the other has taken.
    alone, beside = (Saver(world, model, optimizer, folder / name, keep=1) for name in OWN)

    def save(place: Path, saved: Saved) -> None:
        alone.save(PROGRESS)

    def begin(place: Path, saved: Saved) -> None:
        start = time.perf_counter()
        beside.begin(PROGRESS)
        saved.pause_s = time.perf_counter() - start
        done, saved.later_s = None, 0.0
        while done is None:
            while comm.allreduce(beside.ready()) < comm.size:  # as after each step of training
                time.sleep(2e-3)
            start = time.perf_counter()
            done = beside.advance()
            saved.later_s += time.perf_counter() - start

    def load(place: Path) -> None:
        found = checkpoint.newest(world, place)
        assert found is not None
        checkpoint.load(found, model, optimizer, world)

    def tensors() -> list[Tensor]:
        kept = [one for piece in optimizer.slices() for one in piece.tensors.values()]
        return [*(p.detach() for p in model.parameters()), *kept]

    flat = [p.detach().reshape(-1) for p in model.parameters()]
    state = [
        one[slice(*split(one.numel(), world.size)[world.rank : world.rank + 2])] for one in flat
    ]
    state += [one for piece in optimizer.slices() for one in piece.tensors.values()]
    return {
        OWN[0]: Way(save, f"stage {stage}, Saver.save", load, tensors),
        OWN[1]: Way(begin, f"stage {stage}, Saver.begin and advance"),
    }, state


def torch_save(comm: MPI.Intracomm, model: nn.Module) -> Way:
    """The whole state, which every rank has, written by one of them and read by all."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    plain_step(model, optimizer)(batch(model))
    optimizer.zero_grad()

    def save(place: Path, saved: Saved) -> None:
        if comm.rank:
            return
        with (place / "state.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        sync(place)

    def load(place: Path) -> None:
        state = torch.load(place / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Way(
        save,
        "model and optimizer, then fsync of file and folder; each rank loads all",
        load,
        partial(of_optimizer, model, optimizer),
    )


def sharded(comm: MPI.Intracomm, model: nn.Module) -> dict[str, Way]:
    """torch.distributed.checkpoint of a model that is sharded by FSDP2, waited for and not."""
    mesh = dist.init_device_mesh("cpu", (comm.size,))
    tokens = batch(model)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    plain_step(model, optimizer)(tokens)
    optimizer.zero_grad()
    # Kept, so that its buffers exist from the second save on.
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def writer(place: Path) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(place, sync_files=True)

    def save(place: Path, saved: Saved) -> None:
        dcp.save(state(), storage_writer=writer(place))
        sync(place)

    def begin(place: Path, saved: Saved) -> None:
        start = time.perf_counter()
        written = dcp.async_save(state(), storage_writer=writer(place), async_stager=stager)
        saved.pause_s = time.perf_counter() - start
        written.result()
        sync(place)

    def load(place: Path) -> None:
        found = state()
        dcp.load(found, storage_reader=dcp.FileSystemReader(place))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )

    return {
        "DCP save": Way(
            save,
            "of FSDP2's shards, sync_files=True, fsync of the folder",
            load,
            partial(of_optimizer, model, optimizer),
        ),
        "DCP async_save": Way(begin, "the same, in a thread, with a stager that is kept"),
    }


def deepspeed(comm: MPI.Intracomm, model: nn.Module, package: Any) -> Way:
    """DeepSpeed with torch's AdamW; it has no fsync of its own."""
    tokens = batch(model)
    engine, *_ = package.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    inputs, following = tokens
    engine.backward(nn.functional.cross_entropy(engine(inputs).flatten(0, 1), following.flatten()))
    engine.step()

    def save(place: Path, saved: Saved) -> None:
        engine.save_checkpoint(str(place), tag=TAG)
        dist.barrier()
        written = [place / "latest", *sorted((place / TAG).iterdir())]
        for path in written[comm.rank :: comm.size]:
            sync(path)
        if comm.rank == 0:
            sync(place / TAG)
            sync(place)

    def load(place: Path) -> None:
        engine.load_checkpoint(str(place), tag=TAG)

    return Way(
        save,
        "save_checkpoint, then fsync of its files by all ranks",
        load,
        partial(of_optimizer, model, engine.optimizer.optimizer),
    )


def disk(comm: MPI.Intracomm, nbytes: int, count: int) -> Disk:
    """So many dd at once, each with its share of the bytes; no more than one a rank."""

    def write(place: Path) -> None:
        if comm.rank >= count:
            return
        low, high = split(nbytes, count)[comm.rank : comm.rank + 2]
        command = ["dd", "if=/dev/zero", f"of={place / str(comm.rank)}", "bs=4M", "conv=fsync"]
        command += [f"count={high - low}", "iflag=count_bytes", "status=none"]
        subprocess.run(command, check=True)

    return Disk(write, "dd if=/dev/zero bs=4M conv=fsync")


def of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What this rank has of the parameters and of the optimizer's state, but numbers."""
    kept = [one for state in optimizer.state.values() for one in state.values()]
    found = [one.detach() for one in (*model.parameters(), *kept) if isinstance(one, Tensor)]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in found]
    return [one for one in local if one.dim()]


def sync(path: Path) -> None:
    """Return when a file, or what a folder lists, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def together(comm: MPI.Intracomm) -> None:
    """Wait for all, and leave the cores to those that still work. Collective."""
    barrier = comm.Ibarrier()
    while not barrier.Test():
        time.sleep(POLL_S)


PROGRESS = RunProgress(1, {"task": "none"}, samples=1, skipped_steps=0, eval_loss=None)
TAG = "state"
