"""The rank script of checkpoint.py: save by every method, print one JSON object."""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and mntrain count the cores
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import report, versions
from gpt import ADAMW, Batch, plain_step
from mpi4py import MPI
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from variants import gloo

import mntrain
from mntrain.checkpoint import DirectorySaver, Manifest, Saved
from mntrain.tasks.transformer import Transformer
from zero.layout import split

COMM = MPI.COMM_WORLD
CONTEXT, LAYERS = 16, 6
PROGRESS = Manifest(1, {"task": "none"}, samples=1, skipped_steps=0, eval_loss=None)

# Seconds until training continues, and of later calls that are made when they need not wait; None:
# training waits for the whole save.
Pause = tuple[float, float] | None


class Method(NamedTuple):
    """A method to save. Collective. Each save gets the same directory."""

    save: Callable[[Path], Pause]
    settings: str


def main() -> None:
    """Measure every method in every round, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--millions", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    make = partial(model_of, options.millions)
    parameters = sum(p.numel() for p in make().parameters())
    nbytes = 3 * 4 * parameters  # with both moments of AdamW
    with ExitStack() as stack:
        world = stack.enter_context(mntrain.init(device="cpu"))
        stack.enter_context(gloo())
        methods = mntrain_methods(options.folder, world, options.stage, make())
        methods |= {"torch.save on rank 0": torch_save(make()), "DCP save": sharded(make())}
        for count in sorted({COMM.size, 1}, reverse=True):
            methods[f"dd, {count} at once" if count > 1 else "dd, one"] = disk(nbytes, count)
        names, turns = list(methods), []
        for number in range(1 + options.repeats):
            first = number // 2 % len(names)
            order = names[first:] + names[:first]
            for name in order[::-1] if number % 2 else order:
                turn = take_turn(methods[name], options.folder / name)
                turns.append({"what": name, "round": number, **turn})
    if COMM.rank == 0:
        ways = {name: method.settings for name, method in methods.items()}
        found = {"parameters": parameters, "state_bytes": nbytes, "turns": turns}
        report({**found, "ways": ways, "versions": versions()})


def take_turn(method: Method, path: Path) -> dict[str, Any]:
    """Save once, and remove the files, also from the disk. Collective."""
    if COMM.rank == 0:
        path.mkdir(exist_ok=True)
    barrier()
    COMM.Barrier()  # all ranks arrive at almost the same time, and so start together
    start = time.perf_counter()
    pause = method.save(path)
    barrier()
    seconds = COMM.allreduce(time.perf_counter() - start, MPI.MAX)
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    barrier()
    if COMM.rank == 0:
        shutil.rmtree(path)
        os.sync()
    barrier()
    waits = [seconds, None] if pause is None else [COMM.allreduce(s, MPI.MAX) for s in pause]
    return {"save_s": seconds, "pause_s": waits[0], "later_s": waits[1], "file_bytes": nbytes}


def barrier() -> None:
    """Wait for all ranks, sleeping in between. Collective."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(5e-4)


def model_of(millions: float) -> Transformer:
    """Return a transformer of about `millions` million parameters, always the same."""
    torch.manual_seed(0)
    width = max(64, 64 * round((0.85e6 * millions / (12 * LAYERS)) ** 0.5 / 64))
    vocab = max(64, int(1e6 * millions - 12 * LAYERS * width**2) // width)
    return Transformer(layers=LAYERS, width=width, heads=width // 64, context=CONTEXT, vocab=vocab)


def batch(model: nn.Module) -> Batch:
    """Return inputs and targets for a step."""
    tokens = torch.arange(CONTEXT + 1)[None] % model.embedding.num_embeddings
    return tokens[:, :-1], tokens[:, 1:]


def stepped(model: nn.Module, tokens: Batch) -> torch.optim.Optimizer:
    """Return AdamW after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    plain_step(model, optimizer)(tokens)
    return optimizer


def mntrain_methods(
    folder: Path, world: mntrain.World, stage: int, model: nn.Module
) -> dict[str, Method]:
    """Return mntrain's blocking and background saves, which share no memory."""
    names = "mntrain", "mntrain, in the background"
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
    plain_step(model, optimizer)(batch(model))
    optimizer.wait_for_parameters()
    if world.master:
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
    blocking, background = (
        DirectorySaver(world, Saved(model, optimizer), folder / name, keep=1) for name in names
    )

    def save(_: Path) -> Pause:
        blocking.save(PROGRESS)
        return None

    def begin(_: Path) -> Pause:
        start = time.perf_counter()
        background.begin(PROGRESS)
        pause_s, later_s, done = time.perf_counter() - start, 0.0, None
        while done is None:
            # As training does after each step.
            while COMM.allreduce(background.ready()) < COMM.size:
                time.sleep(2e-3)
            start = time.perf_counter()
            done = background.advance()
            later_s += time.perf_counter() - start
        return pause_s, later_s

    settings = f"stage {stage}, Saver.save", f"stage {stage}, Saver.begin and advance"
    return dict(zip(names, map(Method, (save, begin), settings), strict=True))


def torch_save(model: nn.Module) -> Method:
    """Return torch.save of the whole state by rank 0."""
    optimizer = stepped(model, batch(model))

    def save(path: Path) -> Pause:
        if COMM.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path / "state.pt")
            sync(path / "state.pt", path)
        return None

    return Method(save, "model and optimizer, then fsync of file and folder")


def sharded(model: nn.Module) -> Method:
    """Return torch.distributed.checkpoint of an FSDP2 model."""
    mesh, tokens = dist.init_device_mesh("cpu", (COMM.size,)), batch(model)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh)
    optimizer = stepped(model, tokens)

    def save(path: Path) -> Pause:
        parts = zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
        dcp.save(dict(parts), storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        sync(path)
        return None

    return Method(save, "of FSDP2's shards, sync_files=True, fsync of the folder")


def disk(nbytes: int, count: int) -> Method:
    """Return `count` concurrent dd processes that share the bytes, at most one per rank."""

    def write(path: Path) -> Pause:
        if COMM.rank < count:
            low, high = split(nbytes, count)[COMM.rank : COMM.rank + 2]
            command = ["dd", "if=/dev/zero", f"of={path / str(COMM.rank)}", "bs=4M", "conv=fsync"]
            command += [f"count={high - low}", "iflag=count_bytes", "status=none"]
            subprocess.run(command, check=True)
        return None

    return Method(write, "dd if=/dev/zero bs=4M conv=fsync")


def sync(*paths: Path) -> None:
    """Wait until files, or the entries of directories, are on the disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


if __name__ == "__main__":
    main()
