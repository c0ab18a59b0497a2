"""Saving a run: all ranks write one checkpoint in parallel, while training continues.

begin      all ranks take a snapshot; training may change the tensors from then on (on a GPU, the
           copies are enqueued, and the next update is enqueued behind them)
           threads exchange what each rank holds, write its part and wait for the disk
advance    when every part is on the disk, all ranks exchange the checksums of what they wrote
           the master's thread writes the manifest and renames the folder
advance    all ranks learn that the checkpoint is complete

All messages are sent by the calling thread. The writing thread of a rank only polls for results.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mntrain._version import __version__
from mntrain.checkpoint import writer
from mntrain.checkpoint.format import FILES, MODEL, RANDOM, REPLICAS, FileLayout, Manifest
from mntrain.checkpoint.hook_state import merge_states, split_state
from mntrain.checkpoint.objects import Stateful, encode_objects, encode_options, merge
from mntrain.checkpoint.reader import checkpoint_name, list_checkpoints, scores
from mntrain.checkpoint.shards import (
    CheckpointShard,
    ShardOutline,
    SnapshotBuffer,
    TensorRange,
    shapes_of,
)
from mntrain.checkpoint.writer import Checksums, PendingSave
from mntrain.comm.pending import Future as CommFuture
from mntrain.errors import AgreedError, combined_refusals
from mntrain.ranks import Ranks
from zero.optimizer import ZeroOptimizer

WriteResult = tuple[str | None, Checksums]  # of one rank; an error if it could not write
T = TypeVar("T")

_POLL_S = 0.001
_unfinished = WeakSet[PendingSave]()  # of this process


@dataclass(frozen=True)
class RunProgress:
    """Facts of the run that a checkpoint records besides tensors. Equal on all ranks."""

    step: int
    config: Mapping[str, Any]
    samples: int
    skipped_steps: int
    eval_loss: float | None
    data: Mapping[str, Any] = field(default_factory=dict)  # that are compared in a resumed run
    scored_by: str = "eval_loss"  # what the best checkpoint is chosen by
    position: tuple[int, int] | None = None  # epoch and offset of the next step's first sample
    score: float | None = None  # by it, where it is not eval_loss; the lowest is the best


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint: its path, its bytes, and the seconds since its snapshot."""

    path: Path
    nbytes: int
    seconds: float


class Saver:
    """Saves a run into its directory, one checkpoint at a time. Created by all ranks.

    From the first `begin` on, it keeps host memory for a snapshot of this rank's part. Over all
    ranks this is the size of a checkpoint. `objects` are saved too, by name. Where replicas differ,
    the model is their mean, and each replica's own parameters are part of the optimizer's state.
    """

    def __init__(
        self,
        world: Ranks,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        run_dir: Path,
        keep: int,
        *,
        objects: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._objects = objects or {}
        self._world, self._model, self._optimizer = world, model, optimizer
        self._run_dir, self._keep = run_dir, keep
        self._buffer = SnapshotBuffer(world.device)
        on_gpu = world.device.type == "cuda"
        initializer = partial(torch.cuda.set_device, world.device) if on_gpu else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=initializer)
        self._pending: PendingSave | None = None
        if on_gpu:  # the optimizer's update waits for the snapshot
            optimizer.register_step_pre_hook(lambda *_: self._buffer.before_changes())

    def check(self) -> None:
        """Raise ValueError for a model or an object that cannot be saved. Local."""
        for name, value in self._model.state_dict().items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the model's state has {name}, a {type(value).__name__}: a checkpoint holds "
                    "tensors; make it one, or save no checkpoints"
                )
        encode_objects(self._objects)
        split_state(self._optimizer.hook_state.state_dict())
        FileLayout(shapes_of(self._model.state_dict()))

    def best_score(self, last: int, metric: str) -> float | None:
        """Return the lowest score by a metric of checkpoints up to step `last`. Collective."""
        paths = [p for p in list_checkpoints(self._run_dir) if p.name <= checkpoint_name(last)]
        own = min(scores(paths, metric).values(), default=None)
        best: float | None = self._world.gather(own)[0]
        return best

    @property
    def saving(self) -> bool:
        """True while a save is in progress. Equal on all ranks."""
        return self._pending is not None

    def begin(self, progress: RunProgress) -> None:
        """Take a snapshot, and write it in a thread. Collective.

        No other save may be in progress: call `finish` first. Errors are raised by `advance`.
        """
        with self._optimizer.averaged():
            self._begin(progress, in_background=True)
            if self._optimizer.schedule.replicas > 1:  # the end of a block changes the parameters
                self._buffer.before_changes()

    def save(self, progress: RunProgress) -> SavedCheckpoint:
        """Save synchronously, without a snapshot. Collective. Raises AgreedError as `advance`."""
        with self._optimizer.averaged():
            self._begin(progress, in_background=False)
            saved = self.finish()
        self.settle()
        return saved

    def settle(self) -> None:
        """Wait until the writing thread has no work left, as removing old checkpoints. Local."""
        self._thread.submit(lambda: None).result()

    def ready(self) -> int:
        """Return the number of ranks known on this rank to be ready for `advance`. Local.

        If the sum over all ranks is at least their number, `advance` does not wait.
        """
        save = self._pending
        if save is None:
            return 0
        if save.published is not None:
            return self._world.size if self._world.master and save.published.done() else 0
        return self._world.size if save.abandoned.is_set() else int(save.written.done())

    def advance(self) -> SavedCheckpoint | None:
        """Complete the present phase of a save: writing, then publishing. Collective.

        Blocks until that is done. Returns None after the first phase. Raises AgreedError, which
        names the rank and the cause, if the save failed; earlier checkpoints are unchanged.
        """
        save = self._pending
        assert save is not None, "no save is in progress"
        try:
            if save.published is None:
                save.published = self._publish(save)
                return None
            with self._world.agreement():
                save.wait_for_all()
                save.published.result()
        except AgreedError as error:
            self._end(save)
            if self._world.master and save.folder is not None:
                shutil.rmtree(save.folder, ignore_errors=True)
            raise AgreedError(f"{save.target} was not saved: {error}", self._world.rank) from error
        self._end(save)
        return SavedCheckpoint(save.target, save.nbytes, time.perf_counter() - save.start)

    def finish(self) -> SavedCheckpoint:
        """Wait until the save in progress is complete. Collective. Raises as `advance`."""
        while (saved := self.advance()) is None:
            pass
        return saved

    def _ranges(self, shard: CheckpointShard, in_background: bool) -> Iterable[TensorRange]:
        """Return this rank's ranges; a snapshot if training continues while they are written."""
        if not in_background:
            if self._world.device.type == "cuda":  # which may still be computing them
                torch.cuda.current_stream(self._world.device).synchronize()
            return shard.ranges()
        buffers = {name for name, _ in self._model.named_buffers()}
        return self._buffer.copy(
            list(shard.ranges()),
            in_order=lambda item: (
                item.file == RANDOM or (item.file == MODEL and item.name in buffers)
            ),
        )

    def _begin(self, progress: RunProgress, *, in_background: bool) -> None:
        assert self._pending is None, "a save is in progress: call finish first"
        start = time.perf_counter()
        self._optimizer.wait_for_parameters()
        shard = CheckpointShard(self._world, self._model, self._optimizer, self._objects)
        outlines = self._world.gather_later(shard.outline())
        target = self._run_dir / "checkpoints" / checkpoint_name(progress.step)
        save = PendingSave(target, self._manifest(progress), start, of_master=self._world.master)
        save.exchanged = outlines
        _unfinished.add(save)
        try:
            ranges = self._ranges(shard, in_background)
        except RuntimeError as error:  # out of memory for the snapshot
            ranges = _raise_when_read(error)
        save.prepared = self._thread.submit(self._prepare, save, shard, outlines)
        headers = self._world.master
        save.written = self._thread.submit(writer.write, save, ranges, headers=headers)
        self._pending = save

    def _end(self, save: PendingSave) -> None:
        self._pending = None
        _unfinished.discard(save)

    def _prepare(
        self, save: PendingSave, shard: CheckpointShard, gathered: CommFuture[list[ShardOutline]]
    ) -> None:
        """Lay out the files, and create them on the master. In the writing thread."""
        try:
            outlines = _poll(gathered, save.abandoned)
            _raise_any([outline.error for outline in outlines], ValueError)
            save.layouts, states = shard.layouts(outlines)
            objects = merge([outline.objects for outline in outlines])
            hook = merge_states([outline.hook for outline in outlines])
            of_replicas = {outline.replica: outline.sync_weights for outline in outlines}
            save.manifest = replace(
                save.manifest,
                parameter_states=states,
                objects=objects,
                hook=hook,
                sync_weights=[of_replicas[replica] for replica in sorted(of_replicas)],
            )
            save.folder = save.target.with_name(f".{save.target.name}.{outlines[0].token}")
            if self._world.master:
                writer.make_folder(save, save.folder)
        except BaseException:
            save.abandoned.set()
            raise

    def _publish(self, save: PendingSave) -> Future[None]:
        """Exchange what all ranks have written; the master's thread then publishes it."""
        try:
            with self._world.agreement():
                save.wait_for_all()
                save.prepared.result()
        except AgreedError:
            save.abandoned.set()
            wait([save.written])
            raise
        save.created.set()
        wait([save.written])
        result: WriteResult
        try:
            result = None, save.written.result()
        except (OSError, ValueError, RuntimeError) as error:
            result = str(error), {}
        save.exchanged = self._world.gather_later(result)
        return self._thread.submit(self._complete, save, save.exchanged)

    def _complete(self, save: PendingSave, gathered: CommFuture[list[WriteResult]]) -> None:
        """Publish the checkpoint, on the master, if all ranks have written. In the thread."""
        results = _poll(gathered, save.abandoned)
        _raise_any([error for error, _ in results], OSError)
        if not self._world.master:
            return
        checksums = {
            name: sorted((part for _, c in results for part in c[name]), key=lambda p: p.start)
            for name in FILES
        }
        wrote_s = time.perf_counter() - save.start
        content = replace(save.manifest, wrote_s=wrote_s, checksums=checksums)
        assert save.folder is not None
        writer.publish(save.folder, save.target, content)
        self._thread.submit(writer.remove_old, self._run_dir, self._keep, content.scored_by)

    def _manifest(self, progress: RunProgress) -> Manifest:
        """Return the manifest of the present state, to be completed by what all ranks write."""
        world, state = self._world, self._optimizer.state_dict()
        replicas = self._optimizer.schedule.replicas
        return Manifest(
            **vars(progress),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"mntrain": __version__, "torch": torch.__version__},
            world={
                "ranks": world.size,
                "nodes": len(world.topology.nodes),
                **({REPLICAS: replicas} if replicas > 1 else {}),
            },
            wrote_s=0.0,
            param_groups=list(map(encode_options, state["param_groups"])),
            loss_scale=state["loss_scale"],
            parameter_states={},
            checksums={},
            optimizer_steps=state["steps"],
        )


def _poll(future: CommFuture[T], abandoned: threading.Event) -> T:
    """Return a collective's result without driving it: the calling thread does that."""
    while not future.done:
        if abandoned.is_set():
            raise OSError("the save was abandoned")
        time.sleep(_POLL_S)
    return future.wait()


def _raise_any(errors: Sequence[str | None], kind: type[Exception]) -> None:
    """Raise one exception for the errors of all ranks, if there are any."""
    if any(errors):
        raise kind(combined_refusals(errors))


def _raise_when_read(error: Exception) -> Iterator[TensorRange]:
    raise error
    yield


def _give_up_at_exit() -> None:
    """Give up what no `advance` completes any more: a writing thread would wait for other ranks."""
    for save in [*_unfinished]:
        if save.published is None:
            save.abandoned.set()
            if save.of_master:
                print(
                    f"mntrain: warning: {save.target} was not saved, since the script has ended "
                    "before it was complete: close the world at the end, as `with mntrain.init() "
                    "as world:` does, or save the last step with now=True",
                    file=sys.stderr,
                )


os.register_at_fork(after_in_child=_unfinished.clear)
# Before the interpreter waits for threads, which it does before it calls the functions of `atexit`.
threading._register_atexit(_give_up_at_exit)  # type: ignore[attr-defined]
