"""The methods that checkpoint.py compares: mntrain's, torch's, DeepSpeed's, and dd."""

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
from variants import gloo, gloo_and_deepspeed

import mntrain
from mntrain import checkpoint
from mntrain.checkpoint import Manifest, Saver
from mntrain.tasks.transformer import Transformer
from zero.layout import split

MNTRAIN = ("mntrain", "mntrain, in the background")
CONTEXT, LAYERS = 16, 6
POLL_S = 5e-4


@dataclass
class SaveTimes:
    """Times that a background save reports. None: training waits for the whole save."""

    pause_s: float | None = None  # until training continues
    later_s: float | None = None  # of later calls, made when they need not wait


class Method(NamedTuple):
    """A method to save and load. Collective. Each save gets the same empty directory."""

    save: Callable[[Path, SaveTimes], None]
    settings: str
    load: Callable[[Path], None] | None = None  # None: as another method does
    tensors: Callable[[], list[Tensor]] = list  # of this rank, overwritten by a load


class DiskWrite(NamedTuple):
    """Plain writes of as many bytes."""

    write: Callable[[Path], None]
    settings: str


class Absent(NamedTuple):
    """A peer that is not available."""

    reason: str


@dataclass
class Setup:
    """All methods, and the state that they save."""

    methods: dict[str, Method | DiskWrite | Absent]
    state: list[Tensor]  # this rank's part
    parameters: int
    state_bytes: int  # of all ranks


@contextmanager
def methods(comm: MPI.Intracomm, folder: Path, stage: int, millions: float) -> Iterator[Setup]:
    """Set up every method with its own model after one step. Collective."""
    with ExitStack() as stack:
        world = stack.enter_context(mntrain.init(device="cpu"))
        try:
            package = stack.enter_context(gloo_and_deepspeed())
        except AbsentError as reason:
            stack.enter_context(gloo())
            deepspeed_method: Method | Absent = Absent(str(reason))
        else:
            deepspeed_method = deepspeed(comm, model_of(millions), package)
        own, state = mntrain_methods(comm, folder, world, stage, model_of(millions))
        parameters = sum(p.numel() for p in model_of(millions).parameters())
        nbytes = comm.allreduce(sum(tensor.nbytes for tensor in state))
        found: dict[str, Method | DiskWrite | Absent] = {
            **own,
            "torch.save on rank 0": torch_save(comm, model_of(millions)),
            **sharded(comm, model_of(millions)),
            "DeepSpeed stage 1": deepspeed_method,
        }
        for count in sorted({comm.size, 1}, reverse=True):
            found[f"dd, {count} at once" if count > 1 else "dd, one"] = disk(comm, nbytes, count)
        yield Setup(found, state, parameters, nbytes)


def model_of(millions: float) -> Transformer:
    """Return a transformer of about `millions` million parameters, always the same."""
    torch.manual_seed(0)
    width = max(64, 64 * round((0.85e6 * millions / (12 * LAYERS)) ** 0.5 / 64))
    vocab = max(64, int(1e6 * millions - 12 * LAYERS * width**2) // width)
    return Transformer(layers=LAYERS, width=width, heads=width // 64, context=CONTEXT, vocab=vocab)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return inputs and targets for a step."""
    tokens = torch.arange(CONTEXT + 1)[None] % model.embedding.num_embeddings
    return tokens[:, :-1], tokens[:, 1:]


def mntrain_methods(
    comm: MPI.Intracomm, folder: Path, world: mntrain.World, stage: int, model: nn.Module
) -> tuple[dict[str, Method], list[Tensor]]:
    """Return mntrain's blocking and background saves, and this rank's part of the state."""
    tokens = batch(model)
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
    plain_step(model, optimizer)(tokens)
    optimizer.zero_grad()
    optimizer.wait_for_parameters()
    if world.master:
        for name in MNTRAIN:
            (folder / name).mkdir(parents=True, exist_ok=True)
    # Separate savers, so that neither reuses the other's memory.
    blocking, background = (
        Saver(world, model, optimizer, folder / name, keep=1) for name in MNTRAIN
    )

    def save(path: Path, times: SaveTimes) -> None:
        blocking.save(PROGRESS)

    def begin(path: Path, times: SaveTimes) -> None:
        start = time.perf_counter()
        background.begin(PROGRESS)
        times.pause_s = time.perf_counter() - start
        done, times.later_s = None, 0.0
        while done is None:
            # As training does after each step.
            while comm.allreduce(background.ready()) < comm.size:
                time.sleep(2e-3)
            start = time.perf_counter()
            done = background.advance()
            times.later_s += time.perf_counter() - start

    def load(path: Path) -> None:
        found = checkpoint.newest(world, path)
        assert found is not None
        checkpoint.load(found, model, optimizer, world)

    def tensors() -> list[Tensor]:
        state = [tensor for part in optimizer.slices() for tensor in part.tensors.values()]
        return [*(p.detach() for p in model.parameters()), *state]

    flat = [p.detach().reshape(-1) for p in model.parameters()]
    state = [
        tensor[slice(*split(tensor.numel(), world.size)[world.rank : world.rank + 2])]
        for tensor in flat
    ]
    state += [tensor for it in optimizer.slices() for tensor in it.tensors.values()]
    return {
        MNTRAIN[0]: Method(save, f"stage {stage}, Saver.save", load, tensors),
        MNTRAIN[1]: Method(begin, f"stage {stage}, Saver.begin and advance"),
    }, state


def torch_save(comm: MPI.Intracomm, model: nn.Module) -> Method:
    """Return torch.save of the whole state by rank 0, and torch.load by all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    plain_step(model, optimizer)(batch(model))
    optimizer.zero_grad()

    def save(path: Path, times: SaveTimes) -> None:
        if comm.rank:
            return
        with (path / "state.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        sync(path)

    def load(path: Path) -> None:
        state = torch.load(path / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Method(
        save,
        "model and optimizer, then fsync of file and folder; each rank loads all",
        load,
        partial(of_optimizer, model, optimizer),
    )


def sharded(comm: MPI.Intracomm, model: nn.Module) -> dict[str, Method]:
    """Return torch.distributed.checkpoint of an FSDP2 model, blocking and asynchronous."""
    mesh = dist.init_device_mesh("cpu", (comm.size,))
    tokens = batch(model)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    plain_step(model, optimizer)(tokens)
    optimizer.zero_grad()
    # One stager for all saves, so that its buffers exist from the second save on.
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def writer(path: Path) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(path, sync_files=True)

    def save(path: Path, times: SaveTimes) -> None:
        dcp.save(state(), storage_writer=writer(path))
        sync(path)

    def begin(path: Path, times: SaveTimes) -> None:
        start = time.perf_counter()
        written = dcp.async_save(state(), storage_writer=writer(path), async_stager=stager)
        times.pause_s = time.perf_counter() - start
        written.result()
        sync(path)

    def load(path: Path) -> None:
        found = state()
        dcp.load(found, storage_reader=dcp.FileSystemReader(path))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )

    return {
        "DCP save": Method(
            save,
            "of FSDP2's shards, sync_files=True, fsync of the folder",
            load,
            partial(of_optimizer, model, optimizer),
        ),
        "DCP async_save": Method(begin, "the same, in a thread, with a persistent stager"),
    }


def deepspeed(comm: MPI.Intracomm, model: nn.Module, package: Any) -> Method:
    """Return DeepSpeed with torch's AdamW. DeepSpeed does not call fsync."""
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
    inputs, targets = tokens
    engine.backward(nn.functional.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten()))
    engine.step()

    def save(path: Path, times: SaveTimes) -> None:
        engine.save_checkpoint(str(path), tag=TAG)
        dist.barrier()
        written = [path / "latest", *sorted((path / TAG).iterdir())]
        for file in written[comm.rank :: comm.size]:
            sync(file)
        if comm.rank == 0:
            sync(path / TAG)
            sync(path)

    def load(path: Path) -> None:
        engine.load_checkpoint(str(path), tag=TAG)

    return Method(
        save,
        "save_checkpoint, then fsync of its files by all ranks",
        load,
        partial(of_optimizer, model, engine.optimizer.optimizer),
    )


def disk(comm: MPI.Intracomm, nbytes: int, count: int) -> DiskWrite:
    """Return `count` concurrent dd processes that share the bytes, at most one per rank."""

    def write(path: Path) -> None:
        if comm.rank >= count:
            return
        low, high = split(nbytes, count)[comm.rank : comm.rank + 2]
        command = ["dd", "if=/dev/zero", f"of={path / str(comm.rank)}", "bs=4M", "conv=fsync"]
        command += [f"count={high - low}", "iflag=count_bytes", "status=none"]
        subprocess.run(command, check=True)

    return DiskWrite(write, "dd if=/dev/zero bs=4M conv=fsync")


def of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return this rank's part of the parameters and of the optimizer state, without scalars."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    tensors = [it.detach() for it in (*model.parameters(), *state) if isinstance(it, Tensor)]
    local = [it.to_local() if isinstance(it, DTensor) else it for it in tensors]
    return [tensor for tensor in local if tensor.dim()]


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks, sleeping in between. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(POLL_S)


PROGRESS = Manifest(1, {"task": "none"}, samples=1, skipped_steps=0, eval_loss=None)
TAG = "state"
