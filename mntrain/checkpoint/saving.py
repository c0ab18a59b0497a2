"""Writing a checkpoint: all ranks at once, each its own ranges, and then one rename.

RUN/checkpoints/.step-00000050.partial/     while it is written
RUN/checkpoints/step-00000050/              when every rank's part is safe on the disk
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mntrain._version import __version__
from mntrain.checkpoint import manifest, randomness
from mntrain.checkpoint.finding import step_of, steps_in
from mntrain.checkpoint.manifest import FILES, MODEL, OPTIMIZER, RANDOM, Kept, Manifest
from mntrain.checkpoint.tensors import Layout, Run, Writer, create
from mntrain.data import part
from mntrain.failures import AgreedError
from mntrain.world import World
from zero.optimizer import ZeroOptimizer
from zero.state import StateSlice

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Range = tuple[str, Tensor, int]  # a tensor's name, elements of it, and where they begin
Outline = tuple[StateSlice, dict[str, torch.dtype]]  # a slice without its tensors; their dtypes


@dataclass(frozen=True)
class Moment:
    """What a checkpoint says of the run at this moment, besides the tensors. Alike on all ranks."""

    step: int
    config: Mapping[str, Any]
    samples: int
    skipped_steps: int
    eval_loss: float | None


class Saver:
    """Saves a run in its directory, between steps. The same on all ranks."""

    def __init__(
        self, world: World, model: nn.Module, optimizer: ZeroOptimizer, run_dir: Path, keep: int
    ) -> None:
        self._world, self._model, self._optimizer = world, model, optimizer
        self._folder = run_dir / "checkpoints"
        self._keep = keep

    def check(self) -> None:
        """Raise ValueError for a model that cannot be saved. Local."""
        for name, value in self._model.state_dict().items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the model's state has {name}, a {type(value).__name__}: a checkpoint holds "
                    "tensors; make it one, or leave out --checkpoint.every"
                )
        Layout.of(_shapes(self._model.state_dict()))

    def save(self, moment: Moment) -> tuple[Path, int]:
        """Write a checkpoint; give where it is, and its bytes. Collective.

        Older ones than the last few are removed then. AgreedError, with what is wrong on which
        rank, when it cannot be written; then those that were there are as they were.
        """
        self._optimizer.wait_for_parameters()
        target = self._folder / step_of(moment.step)
        partial = self._folder / f".{target.name}.partial"
        try:
            written = self._write(partial, moment)
            with self._world.agreement():
                if self._world.master:
                    _publish(partial, target, written)
        except AgreedError as error:
            if self._world.master:
                shutil.rmtree(partial, ignore_errors=True)
            raise AgreedError(f"{target} was not saved: {error}", self._world.rank) from error
        if self._world.master:
            with suppress(OSError):  # what cannot be removed today is removed next time
                self._remove_old()
        return target, written.nbytes

    def _write(self, partial: Path, moment: Moment) -> Manifest:
        """Write all files of the checkpoint but the manifest, and say what that is to be."""
        world, optimizer = self._world, self._optimizer
        mine = list(_own(optimizer, world))
        with world.agreement():
            outlines = [_outline(one) for one in mine]
        everyone = [one for theirs in world.gather(outlines) for one in theirs]
        runs = self._write_tensors(partial, mine, everyone)
        state = optimizer.state_dict()
        return Manifest(
            step=moment.step,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"mntrain": __version__, "torch": torch.__version__},
            world={"ranks": world.size, "nodes": len(world.topology.nodes)},
            config=dict(moment.config),
            samples=moment.samples,
            skipped_steps=moment.skipped_steps,
            eval_loss=moment.eval_loss,
            groups=state["param_groups"],
            loss_scale=state["loss_scale"],
            kept=_kept(everyone),
            runs=runs,
        )

    def _write_tensors(
        self, partial: Path, mine: Sequence[StateSlice], everyone: Sequence[Outline]
    ) -> dict[str, list[Run]]:
        """Write this rank's ranges of every file; give what all ranks have written, in order."""
        world, model = self._world, self._model.state_dict()
        random = randomness.captured(world.device)
        sizes = world.gather({key: len(state) for key, state in random.items()})
        layouts: dict[str, Layout] = {}
        with world.agreement():
            layouts[MODEL] = Layout.of(_shapes(model))
            layouts[OPTIMIZER] = Layout.of(_state_shapes(everyone))
            layouts[RANDOM] = Layout.of(_random_shapes(sizes))
            if world.master:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                _reserve(partial, layouts)
        ranges: dict[str, Iterable[Range]] = {
            MODEL: _own_part(model, world),
            OPTIMIZER: _state_ranges(mine),
            RANDOM: ((f"{world.rank}/{key}", state, 0) for key, state in random.items()),
        }
        runs: dict[str, list[Run]] = {}
        with world.agreement():
            if not partial.is_dir():
                raise FileNotFoundError(
                    f"{partial.parent} is not what rank 0 sees: is it on a file system that all "
                    "nodes share?"
                )
            for name in FILES:
                with Writer(partial / name, layouts[name]) as writer:
                    if world.master:
                        writer.header()
                    for key, flat, low in ranges[name]:
                        writer.write(key, flat.cpu(), low)
                    writer.sync()
                    runs[name] = writer.runs
        everywhere = world.gather(runs)
        return {
            name: sorted((run for theirs in everywhere for run in theirs[name]), key=_start)
            for name in FILES
        }

    def _remove_old(self) -> None:
        for folder in self._folder.glob(".*"):
            shutil.rmtree(folder)
        for folder in steps_in(self._folder)[self._keep :]:
            # Renamed first: what is half removed is no checkpoint.
            gone = folder.with_name(f".{folder.name}.old")
            folder.rename(gone)
            shutil.rmtree(gone)


def _start(run: Run) -> int:
    return run.start


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _own(optimizer: ZeroOptimizer, world: World) -> Iterator[StateSlice]:
    """What this rank is to save of the optimizer's state: what it owns, or its part of it."""
    slices = list(optimizer.slices())
    if optimizer.sharded:
        yield from slices
        return
    for index, low, high in _share([one.high for one in slices], world):
        one = slices[index]
        tensors = {key: tensor[low:high] for key, tensor in one.tensors.items()}
        yield one._replace(low=low, high=high, tensors=tensors)


def _share(lengths: Sequence[int], world: World) -> Iterator[tuple[int, int, int]]:
    """This rank's equal share of what all ranks have, in one run: which of it, from, to."""
    first, last = part(sum(lengths), world.rank, world.size)
    at = 0
    for index, length in enumerate(lengths):
        low, high = max(first - at, 0), min(last - at, length)
        if low < high:
            yield index, low, high
        at += length


def _outline(one: StateSlice) -> Outline:
    others = manifest.written(one.others)
    dtypes = {key: tensor.dtype for key, tensor in one.tensors.items()}
    return one._replace(tensors={}, others=others), dtypes


def _random_shapes(sizes: Sequence[Mapping[str, int]]) -> Shapes:
    return {
        f"{rank}/{key}": (torch.uint8, (length,))
        for rank, theirs in enumerate(sizes)
        for key, length in theirs.items()
    }


def _state_shapes(everyone: Sequence[Outline]) -> Shapes:
    found: Shapes = {}
    for one, dtypes in everyone:
        numel = torch.Size(one.shape).numel()
        # Row by row it has the parameter's shape; in another order of memory it stays flat.
        shape = one.shape if list(one.order) == sorted(one.order) else (numel,)
        for key, dtype in dtypes.items():
            found[f"{one.name}/{key}"] = (dtype, shape)
    return found


def _kept(everyone: Sequence[Outline]) -> dict[str, Kept]:
    kept: dict[str, Kept] = {}
    for one, dtypes in everyone:
        kept.setdefault(one.name, Kept(one.shape, one.order, tuple(dtypes), one.others))
    return kept


def _state_ranges(mine: Sequence[StateSlice]) -> Iterator[Range]:
    for one in mine:
        for key, tensor in one.tensors.items():
            yield f"{one.name}/{key}", tensor, one.low


def _own_part(model: Mapping[str, Tensor], world: World) -> Iterator[Range]:
    """This rank's part of what all ranks have."""
    tensors = list(model.items())
    for index, low, high in _share([tensor.numel() for _, tensor in tensors], world):
        name, tensor = tensors[index]
        yield name, tensor.detach().reshape(-1)[low:high], low


def _reserve(partial: Path, layouts: Mapping[str, Layout]) -> None:
    """Make the files; say how much is needed where there is no room. OSError."""
    try:
        for name, layout in layouts.items():
            create(partial / name, layout.nbytes)
    except OSError as error:
        needed = sum(layout.nbytes for layout in layouts.values())
        free = shutil.disk_usage(partial).free
        raise OSError(
            f"{error.strerror}: it needs {needed / 1e6:.1f} MB, of which {free / 1e6:.1f} MB are "
            f"free in {partial.parent} now"
        ) from error


def _publish(partial: Path, target: Path, written: Manifest) -> None:
    """Make a checkpoint of a folder whose other files are safe: the manifest, then one rename."""
    file = os.open(partial / manifest.FILE, os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(file, "w", encoding="utf-8") as text:
        text.write(written.to_json())
        text.flush()
        os.fsync(text.fileno())
    _sync_folder(partial)
    if target.exists():  # a damaged one: a sound one would have been resumed from
        target.rename(target.with_name(f".{target.name}.old"))
    partial.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
