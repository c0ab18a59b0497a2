"""Saving a run: all ranks at once, each its own ranges, while training goes on.

begin      all ranks copy what is to be saved; from here on training may change it (on a GPU, the
           copy is on its way then, and the next update is queued behind it)
           threads hear who has what, write, each rank its part, and wait for the disk
advance    when every rank's part is safe, all ranks tell what they have written
           the master's thread writes the manifest, and one rename makes a checkpoint of it
advance    all ranks know

Messages are all from the thread that calls; a rank's writing thread only waits for their answers.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mntrain._version import __version__
from mntrain.checkpoint import writer
from mntrain.checkpoint.discovery import losses_of, step_of, steps_in
from mntrain.checkpoint.format import ChecksummedRange, FileLayout
from mntrain.checkpoint.manifest import FILES, MODEL, Manifest
from mntrain.checkpoint.shards import RankContents, RankShare, kept, shapes
from mntrain.checkpoint.snapshot import ByteRange, Snapshot, SnapshotBuffer
from mntrain.checkpoint.writer import CheckpointFolder
from mntrain.comm.pending import Future as CommFuture
from mntrain.errors import AgreedError, combined_refusals
from mntrain.world import World
from zero.optimizer import ZeroOptimizer

Runs = dict[str, list[ChecksummedRange]]  # what was written, by file
T = TypeVar("T")

_LISTEN_S = 0.001
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class RunProgress:
    """What a checkpoint records of the run besides tensors. Equal on all ranks."""

    step: int
    config: Mapping[str, Any]
    samples: int
    skipped_steps: int
    eval_loss: float | None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is safe: where, its bytes, and the seconds it took, from the copy on."""

    path: Path
    nbytes: int
    seconds: float


@dataclass
class _Begun:
    """A checkpoint on its way."""

    target: Path
    content: Manifest  # as far as it is known
    start: float
    place: CheckpointFolder = field(default_factory=CheckpointFolder)
    prepared: Future[None] = field(default_factory=Future)
    wrote: Future[Runs] = field(default_factory=Future)
    published: Future[None] | None = None  # on the master; on others: that all have written


@dataclass(frozen=True)
class _Written:
    """What a rank has written, or why it has not."""

    refusal: str | None
    runs: Runs


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
        self._room = SnapshotBuffer()
        on_gpu = world.device.type == "cuda"
        ready = partial(torch.cuda.set_device, world.device) if on_gpu else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=ready)
        self._reserved: Future[None] | None = None
        self._begun: _Begun | None = None
        self._copy: Snapshot | None = None
        if on_gpu:
            optimizer.register_step_pre_hook(self._before_update)

    def check(self) -> None:
        """Raise ValueError for a model that cannot be saved. Local."""
        for name, value in self._model.state_dict().items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the model's state has {name}, a {type(value).__name__}: a checkpoint holds "
                    "tensors; make it one, or leave out --checkpoint.every"
                )
        FileLayout.of(shapes(self._model.state_dict()))

    def best_loss(self, last: int) -> float | None:
        """The lowest evaluation loss of the run's checkpoints up to step `last`. Collective."""
        paths = [path for path in steps_in(self._folder) if path.name <= step_of(last)]
        best: float | None = self._world.gather(min(losses_of(paths).values(), default=None))[0]
        return best

    @property
    def saving(self) -> bool:
        """Whether one is begun, and not at its end. The same on all ranks."""
        return self._begun is not None

    def prepare(self) -> None:
        """Let a thread get the memory for copies ready, so that the first takes no longer. Local.

        After the first step: only then the optimizer has its state.
        """
        nbytes = self._part().nbytes + _SPARE_BYTES
        device = self._world.device
        pinned_for = device if device.type == "cuda" else None
        self._reserved = self._thread.submit(self._room.reserve, nbytes, pinned_for=pinned_for)

    def begin(self, progress: RunProgress) -> None:
        """Copy what is to be saved, and let a thread write it. Collective.

        None may be begun: `finish` that first. What goes wrong is told by `advance`.
        """
        self._begin(progress, self._copied)

    def save(self, progress: RunProgress) -> SavedCheckpoint:
        """Save at once, without a copy. Collective. AgreedError as `advance`."""
        self._begin(progress, self._settled)
        saved = self.finish()
        self._thread.submit(lambda: None).result()  # older ones are removed by now
        return saved

    def ready(self) -> int:
        """Of how many ranks this rank knows that they would not wait in `advance`. Local.

        Nobody would when the sum over all ranks is their number or more.
        """
        begun = self._begun
        if begun is None:
            return 0
        if begun.published is not None:
            return self._world.size if self._world.master and begun.published.done() else 0
        return self._world.size if begun.place.given_up.is_set() else int(begun.wrote.done())

    def advance(self) -> SavedCheckpoint | None:
        """Take what was begun a stage further: to be published; then to be known as safe.

        Collective; waits where it has to. None before the last stage. AgreedError, with what is
        wrong on which rank, if it cannot become a checkpoint; then it is given up, and those that
        were there are as they were.
        """
        begun = self._begun
        assert begun is not None, "nothing is begun"
        try:
            if begun.published is None:
                begun.published = self._publish(begun)
                return None
            with self._world.agreement():
                begun.published.result()
        except AgreedError as error:
            self._begun = None
            if self._world.master:
                writer.discard(begun.place)
            raise AgreedError(f"{begun.target} was not saved: {error}", self._world.rank) from error
        self._begun = None
        return SavedCheckpoint(begun.target, begun.place.nbytes, time.perf_counter() - begun.start)

    def finish(self) -> SavedCheckpoint:
        """Wait until what was begun is safe. Collective. AgreedError as `advance`."""
        while (saved := self.advance()) is None:
            pass
        return saved

    def _part(self) -> RankShare:
        return RankShare(self._world, self._model, self._optimizer)

    def _copied(self, ranges: Iterable[ByteRange]) -> Iterable[ByteRange]:
        if self._reserved is not None:
            wait([self._reserved])
        buffers = {name for name, _ in self._model.named_buffers()}
        self._copy = self._room.copied(
            list(ranges), soon=lambda one: one.file == MODEL and one.name in buffers
        )
        return self._copy.ranges

    def _before_update(self, *_: Any) -> None:
        """Let the optimizer change what was copied only when that is over."""
        if self._copy is not None:
            self._copy.before_changes()
            self._copy = None

    def _settled(self, ranges: Iterable[ByteRange]) -> Iterable[ByteRange]:
        """The same ranges, when nothing is queued that is yet to write them."""
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()
        return ranges

    def _begin(
        self, progress: RunProgress, taken: Callable[[Iterable[ByteRange]], Iterable[ByteRange]]
    ) -> None:
        """Begin with a checkpoint of what `taken` makes of this rank's ranges."""
        assert self._begun is None, "one is begun: finish that first"
        start = time.perf_counter()
        self._optimizer.wait_for_parameters()
        mine = self._part()
        everyone = self._world.gather_later(mine.told())
        begun = _Begun(self._folder / step_of(progress.step), self._content(progress), start)
        try:
            ranges = taken(mine.ranges())
        except RuntimeError as error:  # torch has no memory for the copy
            ranges = _raising(error)
        begun.prepared = self._thread.submit(self._prepare, begun, mine, everyone)
        header = self._world.master
        begun.wrote = self._thread.submit(writer.write, begun.place, ranges, header=header)
        self._begun = begun

    def _prepare(
        self, begun: _Begun, mine: RankShare, everyone: CommFuture[list[RankContents]]
    ) -> None:
        """Find everything its place; on the master, make it. In the thread."""
        try:
            told = _heard(everyone)
            if any(theirs.refusal for theirs in told):
                raise ValueError(combined_refusals([theirs.refusal for theirs in told]))
            begun.content = replace(begun.content, kept=kept(told))
            begun.place.partial = begun.target.with_name(f".{begun.target.name}.{told[0].token}")
            begun.place.layouts = mine.layouts(told)
            if self._world.master:
                writer.make(begun.place)
        except BaseException:
            begun.place.given_up.set()
            raise

    def _publish(self, begun: _Begun) -> Future[None]:
        """Tell everyone what this rank has written, and let the master's thread publish it."""
        try:
            with self._world.agreement():
                begun.prepared.result()
        except AgreedError:
            begun.place.given_up.set()
            wait([begun.wrote])
            raise
        begun.place.made.set()
        wait([begun.wrote])
        try:
            said = _Written(None, begun.wrote.result())
        except (OSError, ValueError, RuntimeError) as error:
            said = _Written(str(error), {})
        everyone = self._world.gather_later(said)
        return self._thread.submit(self._make_valid, begun, everyone)

    def _make_valid(self, begun: _Begun, everyone: CommFuture[list[_Written]]) -> None:
        """Make a checkpoint of what all have written, on the master. In the thread."""
        told = _heard(everyone)
        if any(theirs.refusal for theirs in told):
            raise OSError(combined_refusals([theirs.refusal for theirs in told]))
        if not self._world.master:
            return
        runs = _merged([theirs.runs for theirs in told])
        wrote_s = time.perf_counter() - begun.start
        writer.publish(
            begun.place, begun.target, replace(begun.content, wrote_s=wrote_s, runs=runs)
        )
        self._thread.submit(writer.remove_old, self._folder, self._keep)

    def _content(self, progress: RunProgress) -> Manifest:
        """What the manifest is to say of now. What is kept and written is not known yet."""
        world, state = self._world, self._optimizer.state_dict()
        return Manifest(
            step=progress.step,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"mntrain": __version__, "torch": torch.__version__},
            world={"ranks": world.size, "nodes": len(world.topology.nodes)},
            config=dict(progress.config),
            samples=progress.samples,
            skipped_steps=progress.skipped_steps,
            eval_loss=progress.eval_loss,
            wrote_s=0.0,
            groups=state["param_groups"],
            loss_scale=state["loss_scale"],
            kept={},
            runs={},
        )


def _heard(everyone: CommFuture[T]) -> T:
    """What everyone told, without a hand in how it comes."""
    while not everyone.done:
        time.sleep(_LISTEN_S)
    return everyone.wait()


def _raising(error: Exception) -> Iterator[ByteRange]:
    raise error
    yield


def _merged(everywhere: Sequence[Runs]) -> Runs:
    """What all ranks have written, in the order of the files."""
    return {
        name: sorted((run for theirs in everywhere for run in theirs[name]), key=_start)
        for name in FILES
    }


def _start(run: ChecksummedRange) -> int:
    return run.start
