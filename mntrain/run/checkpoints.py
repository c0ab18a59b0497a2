"""Checkpoints of a user's own training loop, in the trainer's format."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import nn

from mntrain import checkpoint
from mntrain.checkpoint import FoundCheckpoint, Manifest, Saver
from mntrain.checkpoint.objects import Stateful
from mntrain.equal_values import expect_same
from mntrain.errors import AgreedError, raised_by_all
from mntrain.ranks import Ranks
from mntrain.run.checkpointing import Checkpointing, SaveInterval
from mntrain.run.delayed import DelayedSums
from mntrain.run.directory import RunDirectory, expect_shared
from zero.optimizer import ZeroOptimizer


class Checkpoints:
    """The checkpoints of a user's own loop. Made by `World.checkpoints`.

        for step in range(checkpoints.restore() + 1, steps + 1):
            ...
            checkpoints.save(step)

    At the end of a with block, or in `close`, it waits for the checkpoint that is being written.
    The methods are collective.
    """

    def __init__(
        self,
        world: Ranks,
        directory: RunDirectory,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        *,
        interval: SaveInterval,
        keep: int,
        objects: Mapping[str, Stateful],
        flush_metrics: Callable[[], None],
        optimizers: Sequence[ZeroOptimizer] = (),
    ) -> None:
        """Check that all can be saved. `flush_metrics` is collective."""
        self._world, self._directory = world, directory
        self._model, self._optimizer, self._objects = model, optimizer, objects
        self._interval, self._flush_metrics = interval, flush_metrics
        expect_shared(world, directory.path)
        self._saver = Saver(world, model, optimizer, directory.path, keep, objects=objects)
        with world.agreement():
            self._saver.check()
        self._checkpointing = Checkpointing(
            world, self._saver, interval, note=lambda text: None, warn=self._warn
        )
        self._flags = DelayedSums(world.collectives, optimizers)
        self._step: int | None = None  # the last that was restored or offered
        self._restored = 0
        self._resumed: FoundCheckpoint | None = None

    def restore(self) -> int:
        """Load the newest sound checkpoint in place, and return its step; 0 if there is none.

        Every loop calls it once, before its first step and after the learning-rate scheduler is
        made. Restores the model, the optimizer with the options of its parameter groups, the
        objects, and on the same number of ranks the states of random generators. Removes what
        later steps have left in the run directory. Raises AgreedError if the checkpoint is of
        another model or lacks an object, if no checkpoint is sound, or if the directory holds a
        run that has ended without checkpoints.
        """
        self.settle()
        self._flush_metrics()
        found = checkpoint.newest(self._world, self._directory.path)
        step = found.manifest.step if found else 0
        if found:
            self._load(found)
        self._directory.rewind(step)
        if found:
            checkpoint.restore_randomness(found, self._world)
        self._resumed, self._step, self._restored = found, step, step
        return step

    def save(self, step: int, *, now: bool = False, eval_loss: float | None = None) -> None:
        """Save if that is due after `step` steps: in the background, while training continues.

        Called after each step, with the number of steps that the model has taken, 1 for the first.
        With `now`, it saves in any case, and returns when the checkpoint is complete. `eval_loss`
        is the loss of an evaluation, the same on all ranks: the checkpoint of the lowest is always
        saved and kept. If a save in the background fails, a warning is printed and training goes
        on; with `now`, AgreedError is raised, as for a wrong argument.
        """
        self._check(step)
        again, self._step = step == self._step, step
        if again and eval_loss is not None:
            raise AgreedError(
                f"checkpoints.save({step}) was called before: give eval_loss in the first call",
                self._world.rank,
            )
        if eval_loss is not None:
            expect_same(self._world.gather({"eval_loss": repr(eval_loss)}), self._world.rank)
            eval_loss = eval_loss if math.isfinite(eval_loss) else None
        progress = Manifest(step, config={}, samples=0, skipped_steps=0, eval_loss=eval_loss)
        if now:
            self._save_now(progress)
        elif not again:
            self._save_if_due(progress)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, and warn if it failed."""
        self._flags.take()
        self._checkpointing.wait(self._step or 0)
        self._saver.settle()

    def close(self) -> None:
        """Wait for the checkpoint that is being written. Raises AgreedError if it failed."""
        self._flags.take()
        self._checkpointing.finish(self._step or 0)
        self._saver.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif raised_by_all(error):
            self.settle()

    @property
    def longest_save_s(self) -> float:
        """The most seconds that a checkpoint has taken from the copy to the disk. Local."""
        return self._checkpointing.longest_s

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json about checkpoints. Local."""
        resumed = str(self._resumed.path) if self._resumed else None
        return {"resumed_from": resumed, **self._checkpointing.summary()}

    def _check(self, step: int) -> None:
        """Raise AgreedError for a wrong number of steps, and for a closed optimizer. Local."""
        problem = ""
        if self._step is None:
            problem = "call restore() before: it returns 0 in a new run"
        elif step <= self._restored:
            problem = (
                f"the run began after {self._restored} steps: give the number of steps taken, "
                f"{self._restored + 1} after the first"
            )
        elif step < self._step:
            problem = f"step {self._step} came before: steps only increase"
        elif self._optimizer.closed:
            problem = (
                "its optimizer was closed, by close() or since another one trains its parameters: "
                "give that one to world.checkpoints, with a run directory of its own"
            )
        if problem:
            raise AgreedError(f"checkpoints.save({step}): {problem}", self._world.rank)

    def _save_if_due(self, progress: Manifest) -> None:
        """Begin a save if one is due, and advance the one in progress, by the last call's flags."""
        flags = self._flags.take() or {"save_due": 0.0, "save_ready": 0.0}
        due = flags["save_due"]
        if due or self._interval.due_after(progress.step) or progress.eval_loss is not None:
            self._flush_metrics()
        self._checkpointing.after_step(progress, flags)
        if self._interval.by_clock or self._saver.saving:
            self._flags.start(self._checkpointing.local_flags())

    def _save_now(self, progress: Manifest) -> None:
        """Save, unless the checkpoint of this step is complete or being written."""
        self.settle()
        if not self._checkpointing.has(progress.step):
            self._flush_metrics()
            self._checkpointing.save_now(progress)

    def _load(self, found: FoundCheckpoint) -> None:
        scheduled = any("initial_lr" in group for group in self._optimizer.param_groups)
        if scheduled and not any(hasattr(value, "last_epoch") for value in self._objects.values()):
            self._warn("the learning-rate scheduler of the optimizer begins anew: give scheduler=")
        for path, reason in found.skipped.items():
            self._warn(f"{path.name} was passed over: {reason}")
        if unused := sorted(found.manifest.objects.keys() - self._objects.keys()):
            self._warn(f"{found.path.name} also has the state of {', '.join(unused)}")
        checkpoint.load(found, self._model, self._optimizer, self._world, objects=self._objects)
        self._checkpointing.continue_from(found)

    def _warn(self, text: str) -> None:
        if self._world.master:
            print(f"mntrain: warning: {text}", file=sys.stderr)
