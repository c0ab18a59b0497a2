"""The checkpoints of a run: when they are due, how they are saved and restored."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from mntrain import checkpoint
from mntrain.alike.compared_task import changed_data
from mntrain.alike.values import compare
from mntrain.checkpoint import DirectorySaver, FoundCheckpoint, Manifest, Save, Saved
from mntrain.checkpoint.format import checkpoint_name
from mntrain.checkpoint.objects import Stateful, names_of_objects
from mntrain.data.loader import ShardedLoader
from mntrain.errors import AgreedError, raised_by_all
from mntrain.options.config import CheckpointConfig
from mntrain.ranks import Ranks
from mntrain.recorder.launch_notes import LaunchNotes
from mntrain.run.delayed_sums import DelayedSums
from mntrain.run.directory import RunDirectory
from mntrain.run.local_saving import LocalCheckpoints
from mntrain.run.means import to_float
from mntrain.run.restart import find_restart
from mntrain.run.save_interval import RETRY_S, SaveInterval, cheapest_interval_s
from zero.step_message import Value

_FLAGS = ("save due", "save ready", "local due", "local ready")  # sums over ranks


class Checkpoints:
    """The checkpoints of a run. `World.checkpoints` makes those of a loop of one's own.

        for step in range(checkpoints.restore() + 1, steps + 1):
            ...
            checkpoints.save(step)

    Every rank makes the same decisions. A save that fails during training is told by a warning, at
    most once a minute, and tried again after a minute at the latest, with the state of then;
    training continues. At the end of a with block, or in `close`, it waits for the checkpoint that
    is being written. The methods are collective, unless they say otherwise.

    `on_checkpoint` is called on rank 0 with the folder of each that is complete.
    """

    def __init__(
        self,
        world: Ranks,
        directory: RunDirectory,
        saved: Saved,
        options: CheckpointConfig,
        sums: DelayedSums,
        *,
        before_save: Callable[[], None],
        uninterrupted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Make the checkpoints of a run. Collective.

        Ranks agree on saves by `sums`, their own. `before_save` is collective, and `uninterrupted`
        returns the context of a save that no signal ends.
        """
        self._world, self._directory, self._before_save = world, directory, before_save
        self.saved = saved
        path, own = directory.path, directory.expect_own
        self._saver = DirectorySaver(world, saved, path, options.keep, expect_own=own)
        self._interval = SaveInterval(options.every, lambda: cheapest_interval_s(self._copy_s))
        self._may_save = True
        self.on_checkpoint: Callable[[Path], object] = lambda path: None
        self._sums, self._uninterrupted = sums, uninterrupted
        self._best_score = self._best_saved = math.inf  # of all evaluations, and of saved ones
        self._warned_at = -math.inf  # of a failure
        self._last: Path | None = None  # the newest that is complete on the disk
        self._saved = self._failed = 0
        self._waited_s = self._copy_s = 0.0  # by training; for the last copy of a save
        self.longest_s = 0.0
        """The most seconds that a checkpoint has taken from the copy to the disk."""
        self._step: int | None = None  # the last that was restored or offered
        self._restored = 0
        self._resumed: FoundCheckpoint | None = None
        self._data: dict[str, Any] = {}  # what is compared of it in a resumed run
        self._local: LocalCheckpoints | None = None
        if (folders := directory.local) is not None:
            self._local = LocalCheckpoints(world, saved, folders, options.local_every)
        self._local_summary: dict[str, Any] = {}  # once they have ended

    def restore(self) -> int:
        """Load the newest sound checkpoint in place, and return its step; 0 if there is none.

        Every loop calls it once, before its first step and after the learning-rate scheduler is
        made. Restores the model, the optimizer with the options of its parameter groups, the
        objects, and on the same number of ranks the states of random generators. Removes what
        later steps have left in the run directory. Warns if samples of a shard among the objects
        have changed. Raises AgreedError, and changes nothing in the directory, if the checkpoint is
        of another model or another class of optimizer, or lacks an object, if no checkpoint is
        sound, if the directory holds a run that has ended without any, or if all that is to be
        saved could not be.
        """
        self.wait()
        if self._local:
            self._local.finish()  # what a restart finds is still
        self._before_save()
        found = find_restart(self._world, self._directory)
        if found is None and self._step:
            raise AgreedError(
                f"checkpoints.restore(): the run has no checkpoint, and this loop has taken "
                f"{self._step} steps already: save one before, or make the model and the optimizer "
                "anew",
                self._world.rank,
            )
        self._data = {"samples": self._digests()}
        if found:
            self._warn_of_differences(found)
        return self.resume(found, self._saver.objects)

    def save(self, step: int, *, now: bool = False, eval_loss: float | None = None) -> None:
        """Save if that is due after `step` steps: in the background, while training continues.

        Called after each step, with the number of steps that the model has taken, 1 for the first.
        With `now`, it saves in any case, and returns when the checkpoint is complete. `eval_loss`
        is the loss of an evaluation, the same on all ranks: the checkpoint of the lowest is always
        saved and kept. Raises AgreedError for a wrong argument, and with `now` for a failure.
        """
        score = None if eval_loss is None else to_float(eval_loss)
        if eval_loss is not None:
            if score is None:
                raise AgreedError(
                    f"checkpoints.save({step}): eval_loss is {eval_loss!r}: give a number",
                    self._world.rank,
                )
            if step == self._step:
                raise AgreedError(
                    f"checkpoints.save({step}) was called before: give eval_loss in the first call",
                    self._world.rank,
                )
            compare(self._world, {"eval_loss": repr(score)})
        self.save_progress(self._describe(step, score), now=now)

    def save_progress(self, progress: Manifest, *, now: bool = False) -> None:
        """Save as `save` does, for a loop that knows more of its run. `progress` has the step."""
        step = progress.step
        with self._world.recorder.phase("checkpoint", step):
            self._check(step)
            if self._may_save:
                self._saver.check_state()
            again, self._step = step == self._step, step
            if now:
                with self._uninterrupted():
                    self._save_now(progress)
            elif not again:
                self._save_if_due(progress)

    def close(self) -> None:
        """Wait for the checkpoint that is being written. Raises AgreedError if it failed.

        Those in the nodes' memory are removed if the last step is saved in the run directory.
        """
        self.wait(warns=False)
        self.end_local(in_order=True)

    def wait(self, *, warns: bool = True) -> None:
        """Wait for the checkpoint that is being written. Warns, or raises, if it failed."""
        self._sums.drop()  # flags of another save
        if self._saver.saving:
            self._report(self._saver.finish, warns=warns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if raised_by_all(error):
            self.wait(warns=error is not None)
            self.end_local(in_order=error is None)

    def end_local(self, *, in_order: bool) -> None:
        """Save no more in the nodes' memory. Local, but collective if the run ends `in_order`.

        Then what is there is removed, unless it has steps that the run directory has not.
        """
        if (local := self._local) is None:
            return
        removes = in_order and self._step is not None and self.has(self._step)
        if in_order and not removes:
            local.finish()
            if self._step is not None and not (removes := local.saver.empty):
                self._world.output.warn(
                    f"step {self._step} is not saved in the run directory, so checkpoints stay in "
                    "the nodes' memory, and the next start goes on from them: save the last step "
                    "with now=True, after which they are removed"
                )
        notes = LaunchNotes.of(os.environ)
        if in_order and not removes and notes is not None and self._world.master:
            notes.keep_local()
        local.saver.close(removes=removes)
        self._local_summary, self._local = local.summary(), None

    def resume(
        self,
        found: FoundCheckpoint | None,
        objects: Mapping[str, Stateful],
        *,
        kept_options: Sequence[str] = (),
        saves: bool = True,
        scored_by: str = "eval_loss",
    ) -> int:
        """Load a checkpoint, if there is one, and begin behind it in the run's directory.

        As `checkpoint.load` and `RunDirectory.rewind`. Unless it `saves` nothing, all that is to be
        saved is checked before. The best evaluation so far is that by the metric `scored_by`.
        Returns the steps that the run has taken, 0 if the checkpoint is of another run. Collective.
        """
        step, path = 0, self._directory.path.resolve()
        self._may_save = saves
        if saves and self._step is None:  # what was added to the model meanwhile counts, too
            self._directory.expect_shared()
            with self._world.agreement():
                self._saver.check()
        if found is not None:
            saver, manifest = self._saver, found.manifest
            self._best_score = saver.best_score(manifest.step, scored_by)
            self._best_saved = self._best_score
            self._resumed = found
            self.longest_s = max(self.longest_s, manifest.wrote_s)
            checkpoint.load(
                found,
                saver.model,
                saver.optimizer,
                self._world,
                objects=objects,
                kept_options=kept_options,
            )
            if found.from_nodes or path in found.path.resolve().parents:
                step = manifest.step
        if found is None or found.from_nodes or not self.has(step):
            self._last = None  # behind what was restored
        self._directory.rewind(step, saves=saves)
        if found is not None:
            checkpoint.restore_randomness(found, self._world)
        if self._local:
            self._local.restored(found, self._directory.attempts())
        self._step = self._restored = step
        return step

    def _save_if_due(self, progress: Manifest) -> None:
        """Begin a save if one is due, and advance the one that is being written."""
        local, flags = self._local, dict.fromkeys(_FLAGS, 0.0)
        for found in self._sums.take():
            flags |= found.sums
        if self._saver.saving and flags["save ready"] >= self._world.size:
            self._sums.drop()  # flags of the phase that ends
            self._report(self._saver.advance)
        improved = self._improves(progress)  # a checkpoint is due after the best evaluation
        due = flags["save due"] > 0 or self._interval.due_after(progress.step)
        if due or (improved and self._interval.wanted):
            self._before_save()
            self._begin(progress)
        if local:
            known = replace(progress, wrote_s=self.longest_s)
            if local.after_step(known, flags, before_save=self._before_save):
                self._sums.drop()
        asks = self._interval.by_clock or self._saver.saving or (local is not None and local.asks)
        if asks and not self._sums.waiting:
            own: dict[str, Value] = {
                "save due": lambda: self._world.master and self._interval.due_now(),
                "save ready": self._saver.ready,
            }
            self._sums.start({**own, **(local.flags() if local else {})})

    def _begin(self, progress: Manifest) -> None:
        """Begin a save in the background, once the one that is being written is complete."""
        start = time.perf_counter()
        self.wait()
        copy_start = time.perf_counter()
        self._saver.begin(progress)
        end = time.perf_counter()
        self._interval.begins()
        self._copy_s = end - copy_start
        self._waited_s += end - start

    def _save_now(self, progress: Manifest) -> None:
        """Save and wait until that is complete. Raises AgreedError on failure."""
        self.wait()
        if self.has(progress.step):  # it may have been the one that was being written
            return
        self._before_save()
        self._improves(progress)
        self._report(lambda: self._saver.save(progress), warns=False)
        self._interval.begins()

    def has(self, step: int) -> bool:
        """Return True if the newest complete checkpoint of this job is that of a step. Local."""
        return self._last is not None and self._last.name == checkpoint_name(step)

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json about checkpoints. Local."""
        counts = {"saved": self._saved, "failed": self._failed}
        seconds = {"waited_s": self._waited_s, "longest_s": self.longest_s}
        local = self._local.summary() if self._local else self._local_summary
        return {
            "resumed_from": str(self._resumed.path) if self._resumed else None,
            "checkpoint": str(self._last) if self._last else None,
            "checkpoints": counts | seconds | ({"local": local} if local else {}),
        }

    def _improves(self, progress: Manifest) -> bool:
        """Note an evaluation's score, and return True if it is the lowest of the run. Local."""
        lowest = self._best_score
        if (score := progress.score_by(progress.scored_by)) is not None:
            self._best_score = min(score, lowest)
        return self._best_score < lowest

    def _report(self, end: Callable[[], Save | None], *, warns: bool = True) -> None:
        """Report the complete checkpoint that `end` returns, if any, or its failure."""
        try:
            saved = end()
        except AgreedError as error:
            self._failed += 1
            self._best_score = self._best_saved  # the next better one is saved
            if not warns:
                raise
            self._interval.failed()
            now = time.monotonic()
            if now >= self._warned_at + RETRY_S:
                self._warned_at = now
                self._world.output.warn(str(error))
            return
        if saved is None:
            return
        self._last, progress = saved.path, saved.manifest
        if (score := progress.score_by(progress.scored_by)) is not None:
            self._best_saved = min(self._best_saved, score)
        self._saved += 1
        self.longest_s = max(self.longest_s, saved.seconds)
        self._world.output.note(
            f"step {self._step}  {saved.path.name} is safe: {saved.nbytes / 1e6:.1f} MB after "
            f"{saved.seconds:.2f} s"
        )
        if self._world.master:
            self.on_checkpoint(saved.path)

    def _describe(self, step: int, eval_loss: float | None) -> Manifest:
        finite = eval_loss is not None and math.isfinite(eval_loss)
        return Manifest(step, eval_loss=eval_loss if finite else None, data=self._data)

    def _check(self, step: int) -> None:
        """Raise AgreedError for a wrong number of steps, and for a closed optimizer. Local."""
        problem = ""
        if self._step is None:
            problem = "call restore() before: it returns 0 in a new run"
        elif step < max(self._step, self._restored + 1):
            problem = (
                f"the run began after {self._restored} steps, and step {self._step} came before: "
                f"give the number of steps taken, which only increases"
            )
        elif self._saver.optimizer.closed:
            problem = (
                "its optimizer was closed, by close() or since another one trains its parameters: "
                "give that one to world.checkpoints, with a run directory of its own"
            )
        if problem:
            raise AgreedError(f"checkpoints.save({step}): {problem}", self._world.rank)

    def _digests(self) -> dict[str, dict[str, str]]:
        """Return digests of samples by name, and rank, of the shards that are saved. Collective."""
        objects = self._saver.objects
        shards = {n: one for n, one in objects.items() if isinstance(one, ShardedLoader)}
        by_rank = self._world.gather({n: shard.spread_digest() for n, shard in shards.items()})
        return {
            f"{name}{f' on rank {rank}' * (rank > 0)}": digest
            for rank, own in enumerate(by_rank)
            for name, digest in own.items()
            if digest
        }

    def _warn_of_differences(self, found: FoundCheckpoint) -> None:
        """Warn of what a checkpoint has and this loop has not, or otherwise. Local."""
        objects, warn = self._saver.objects, self._world.output.warn
        has_scheduler = any("initial_lr" in group for group in self._saver.optimizer.param_groups)
        if has_scheduler and not any(hasattr(value, "last_epoch") for value in objects.values()):
            warn("the learning-rate scheduler of the optimizer begins anew: give scheduler=")
        if unused := sorted({*names_of_objects(found.manifest.objects)} - objects.keys()):
            warn(f"{found.path.name} also has the state of {', '.join(unused)}")
        if changed := changed_data(found.manifest.data, self._data):
            warn(changed)
