"""Saving a run: all ranks at once, each its own ranges, while training goes on.

begin      all ranks copy what is to be saved; from here on training may change it
           threads write, each rank its part, and wait for the disk
advance    when every rank's part is safe, all ranks tell what they have written
           the master's thread writes the manifest, and one rename makes a checkpoint of it
advance    all ranks know
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mntrain._version import __version__
from mntrain.checkpoint import manifest, randomness, writing
from mntrain.checkpoint.copying import Range, Room
from mntrain.checkpoint.finding import losses_of, step_of, steps_in
from mntrain.checkpoint.manifest import FILES, MODEL, OPTIMIZER, RANDOM, Kept, Manifest
from mntrain.checkpoint.tensors import Layout, Run
from mntrain.checkpoint.writing import Place
from mntrain.data import part
from mntrain.failures import AgreedError
from mntrain.world import World
from zero.optimizer import ZeroOptimizer
from zero.state import StateSlice

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Runs = dict[str, list[Run]]  # what was written, by file
Layouts = dict[str, Layout]
Outline = tuple[StateSlice, dict[str, torch.dtype]]  # a slice without its tensors; their dtypes


@dataclass(frozen=True)
class Moment:
    """What a checkpoint says of the run at this moment, besides the tensors. Alike on all ranks."""

    step: int
    config: Mapping[str, Any]
    samples: int
    skipped_steps: int
    eval_loss: float | None


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is safe: where, its bytes, and the seconds it took, from the copy on."""

    path: Path
    nbytes: int
    seconds: float


@dataclass
class _Begun:
    """A checkpoint on its way."""

    target: Path
    place: Place
    content: Manifest
    made: Future[None] | None  # on the master
    wrote: Future[Runs]
    start: float
    publishing: bool = False
    published: Future[None] = field(default_factory=Future)  # on the master; else never

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.place.layouts.values())


class Saver:
    """Saves a run in its directory, one checkpoint at a time. The same on all ranks.

    It keeps host memory for a copy of this rank's part, from the first `begin` on: of all ranks
    together as much as a checkpoint has bytes.
    """

    def __init__(
        self, world: World, model: nn.Module, optimizer: ZeroOptimizer, run_dir: Path, keep: int
    ) -> None:
        self._world, self._model, self._optimizer = world, model, optimizer
        self._folder = run_dir / "checkpoints"
        self._keep = keep
        self._room = Room()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begun: _Begun | None = None

    def check(self) -> None:
        """Raise ValueError for a model that cannot be saved. Local."""
        for name, value in self._model.state_dict().items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the model's state has {name}, a {type(value).__name__}: a checkpoint holds "
                    "tensors; make it one, or leave out --checkpoint.every"
                )
        Layout.of(_shapes(self._model.state_dict()))

    def best_loss(self, last: int) -> float | None:
        """The lowest evaluation loss of the run's checkpoints up to step `last`. Collective."""
        paths = [path for path in steps_in(self._folder) if path.name <= step_of(last)]
        best: float | None = self._world.gather(min(losses_of(paths).values(), default=None))[0]
        return best

    @property
    def saving(self) -> bool:
        """Whether one is begun, and not at its end. The same on all ranks."""
        return self._begun is not None

    def begin(self, moment: Moment) -> None:
        """Copy what is to be saved, and let a thread write it. Collective.

        None may be begun: `finish` that first. AgreedError, with what is wrong on which rank, for
        what cannot be saved; what goes wrong later is told by `advance` and `finish`.
        """
        self._begin(moment, lambda ranges: self._room.copied(list(ranges)))

    def save(self, moment: Moment) -> Saved:
        """Save at once, without a copy. Collective. AgreedError as `begin` and `finish`."""
        self._begin(moment, lambda ranges: ranges)
        return self.finish()

    def ready(self) -> int:
        """Of how many ranks this rank knows that they would not wait in `advance`. Local.

        Nobody would when the sum over all ranks is their number or more.
        """
        if self._begun is None:
            return 0
        if self._begun.place.given_up.is_set() or self._begun.published.done():
            return self._world.size
        return int(self._begun.wrote.done())

    def advance(self) -> Saved | None:
        """Take what was begun a stage further: to be published; then to be known as safe.

        Collective; waits where it has to. None before the last stage. AgreedError if it cannot
        become a checkpoint; then it is given up, and those that were there are as they were.
        """
        begun = self._begun
        assert begun is not None, "nothing is begun"
        try:
            if not begun.publishing:
                self._publish(begun)
                return None
            with self._world.agreement():
                if self._world.master:
                    begun.published.result()
        except AgreedError as error:
            self._begun = None
            if self._world.master:
                writing.discard(begun.place)
            raise AgreedError(f"{begun.target} was not saved: {error}", self._world.rank) from error
        self._begun = None
        return Saved(begun.target, begun.nbytes, time.perf_counter() - begun.start)

    def finish(self) -> Saved:
        """Wait until what was begun is safe. Collective. AgreedError as `advance`."""
        while (saved := self.advance()) is None:
            pass
        return saved

    def _begin(self, moment: Moment, taken: Callable[[Iterable[Range]], Iterable[Range]]) -> None:
        """Begin with a checkpoint of the ranges that `taken` gives of this rank's."""
        assert self._begun is None, "one is begun: finish that first"
        start = time.perf_counter()
        world, optimizer = self._world, self._optimizer
        optimizer.wait_for_parameters()
        random = randomness.captured(world.device)
        with world.agreement():
            mine = list(_own(optimizer, world))
            outlines = [_outline(one) for one in mine]
        sizes = {key: len(state) for key, state in random.items()}
        everyone = world.gather((outlines, sizes, secrets.token_hex(4)))
        token = everyone[0][2]
        target = self._folder / step_of(moment.step)
        place = Place(target.with_name(f".{target.name}.{token}"), self._layouts(everyone))
        with world.agreement():
            ranges = taken(_ranges(mine, self._model, random, world))
        made = self._thread.submit(writing.make, place) if world.master else None
        self._begun = _Begun(
            target=target,
            place=place,
            content=self._described(moment, [one for theirs in everyone for one in theirs[0]]),
            made=made,
            wrote=self._thread.submit(writing.write, place, ranges, header=world.master),
            start=start,
        )

    def _layouts(self, everyone: Sequence[tuple[list[Outline], dict[str, int], str]]) -> Layouts:
        """The layouts of all files. AgreedError for tensors that cannot be in one."""
        outlines = [one for theirs in everyone for one in theirs[0]]
        try:
            return {
                MODEL: Layout.of(_shapes(self._model.state_dict())),
                OPTIMIZER: Layout.of(_state_shapes(outlines)),
                RANDOM: Layout.of(_random_shapes([theirs[1] for theirs in everyone])),
            }
        except ValueError as error:
            raise AgreedError(str(error), self._world.rank) from error

    def _described(self, moment: Moment, outlines: Sequence[Outline]) -> Manifest:
        """What the manifest is to say of now; what was written is not known yet."""
        world, state = self._world, self._optimizer.state_dict()
        return Manifest(
            step=moment.step,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"mntrain": __version__, "torch": torch.__version__},
            world={"ranks": world.size, "nodes": len(world.topology.nodes)},
            config=dict(moment.config),
            samples=moment.samples,
            skipped_steps=moment.skipped_steps,
            eval_loss=moment.eval_loss,
            wrote_s=0.0,
            groups=state["param_groups"],
            loss_scale=state["loss_scale"],
            kept=_kept(outlines),
            runs={},
        )

    def _publish(self, begun: _Begun) -> None:
        """Gather who wrote what, and let the master's thread make a checkpoint of it."""
        world = self._world
        try:
            with world.agreement():
                if begun.made:
                    begun.made.result()
        except AgreedError:
            begun.place.given_up.set()
            wait([begun.wrote])
            raise
        begun.place.made.set()
        with world.agreement():
            runs = begun.wrote.result()
        everywhere = world.gather(runs)
        begun.publishing = True
        if world.master:
            wrote_s = time.perf_counter() - begun.start
            written = replace(begun.content, wrote_s=wrote_s, runs=_merged(everywhere))
            begun.published = self._thread.submit(
                writing.publish, begun.place, begun.target, written, self._keep
            )


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


def _ranges(
    mine: Sequence[StateSlice], model: nn.Module, random: Mapping[str, Tensor], world: World
) -> Iterator[Range]:
    """What this rank is to write. Views, but for parameters that do not lie row by row."""
    for one in mine:
        for key, tensor in one.tensors.items():
            yield Range(OPTIMIZER, f"{one.name}/{key}", tensor, one.low)
    tensors: list[tuple[str, Tensor]] = list(model.state_dict().items())
    for index, low, high in _share([tensor.numel() for _, tensor in tensors], world):
        name, tensor = tensors[index]
        yield Range(MODEL, name, tensor.detach().reshape(-1)[low:high], low)
    for key, state in random.items():
        yield Range(RANDOM, f"{world.rank}/{key}", state, 0)


def _merged(everywhere: Sequence[Runs]) -> Runs:
    """What all ranks have written, in the order of the files."""
    return {
        name: sorted((run for theirs in everywhere for run in theirs[name]), key=_start)
        for name in FILES
    }
