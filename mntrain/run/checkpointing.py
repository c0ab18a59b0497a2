"""The times at which checkpoints of a run are made, and reports about them."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mntrain.checkpoint import FoundCheckpoint, Manifest, Save, Saver
from mntrain.checkpoint.reader import checkpoint_name
from mntrain.errors import AgreedError
from mntrain.ranks import Ranks

_LONG_WAIT_S = 1.0
RETRY_S = 60.0  # from a save that failed, and from the warning of it, to the next


class SaveInterval:
    """The interval between saves: a number of steps, minutes such as "10min", or "auto".

    "0" is none. `mtbf_hours`: mean hours between failures of such a job, for "auto".
    """

    def __init__(self, every: str, mtbf_hours: float = 24.0) -> None:
        self._steps = int(every) if every.isdecimal() else 0
        self._seconds = 60 * float(every.removesuffix("min")) if every.endswith("min") else None
        self._auto = every == "auto"
        if self._auto:
            self._seconds = 0.0  # until the first save has shown its cost
        self._mtbf_s = 3600 * mtbf_hours
        self._last_save = time.monotonic()
        self._retry_at: float | None = None  # after a save that failed

    @property
    def wanted(self) -> bool:
        """True if the run is to be saved at intervals at all."""
        return self._steps > 0 or self._seconds is not None

    @property
    def by_clock(self) -> bool:
        """True if the clock decides when the run is to be saved. The same on all ranks."""
        return self._seconds is not None or self._retry_at is not None

    def due_after(self, step: int) -> bool:
        """Return True if the run is to be saved after this step. The same on all ranks."""
        return self._steps > 0 and step % self._steps == 0

    def due_now(self) -> bool:
        """Return True if it is time to save, on the clock of this process."""
        now = time.monotonic()
        if self._retry_at is not None and now >= self._retry_at:
            return True
        return self._seconds is not None and now - self._last_save >= self._seconds

    def saved(self, cost_s: float | None) -> None:
        """Start the next interval. Training waited `cost_s` seconds for this save, if measured.

        The interval "auto" minimizes the time that saves and failures cost: J. W. Young,
        Communications of the ACM 17 (1974).
        """
        self._last_save, self._retry_at = time.monotonic(), None
        if self._auto and cost_s is not None:
            self._seconds = math.sqrt(2 * cost_s * self._mtbf_s)

    def failed(self) -> None:
        """Let the run be saved in a minute, if not before: a save has failed on all ranks."""
        if self.wanted:
            self._retry_at = time.monotonic() + RETRY_S


class Checkpointing:
    """Saves the run after the steps that are due. Every rank makes the same decisions.

    A save that fails during training is reported by `warn`, at most once a minute, and tried again
    after a minute at the latest, with the state of then; training continues. `note` takes
    what else is reported. On the master, `on_checkpoint` gets the path of each complete checkpoint.
    `scored_by` names the metric of which the lowest score is kept.
    """

    def __init__(
        self,
        world: Ranks,
        saver: Saver,
        interval: SaveInterval,
        note: Callable[[str], None],
        warn: Callable[[str], None],
        *,
        scored_by: str = "eval_loss",
        on_checkpoint: Callable[[Path], None] | None = None,
    ) -> None:
        self._world, self._saver, self._interval = world, saver, interval
        self._note, self._warn = note, warn
        self._scored_by, self._on_checkpoint = scored_by, on_checkpoint
        self._best_score = math.inf
        self._warned_of_wait = False
        self._warned_at = -math.inf  # of a failure
        self._last: Path | None = None  # the newest that is complete on the disk
        self._saved = self._failed = 0
        self.progress = 0  # phases of saves that have begun or ended, the same on all ranks
        self._waited_s = 0.0  # by training
        # From the copy until the files are complete on the disk, in seconds.
        self.longest_s = 0.0

    def continue_from(self, found: FoundCheckpoint) -> None:
        """Take over what the earlier jobs of the run have measured. Collective."""
        best_score = self._saver.best_score(found.manifest.step, self._scored_by)
        self._best_score = math.inf if best_score is None else best_score
        self.longest_s = found.manifest.wrote_s

    def local_flags(self) -> dict[str, float]:
        """Return this rank's flags, whose sums over all ranks `after_step` takes. Local.

        save_due: 1 on the master if its clock says that a save is due; save_ready: the progress of
        the save that is being written.
        """
        due = self._world.master and self._interval.due_now()
        return {"save_due": float(due), "save_ready": float(self._saver.ready())}

    def acts(self, step: int, summed_flags: Mapping[str, float]) -> bool:
        """Return whether `after_step` communicates, unless an evaluation is the best. Local."""
        advances = self._saver.saving and summed_flags["save_ready"] >= self._world.size
        due = bool(summed_flags["save_due"]) or self._interval.due_after(step)
        return advances or due

    def after_step(self, progress: Manifest, summed_flags: Mapping[str, float]) -> None:
        """Begin a save if one is due, and advance the one that is being written. Collective."""
        if self._saver.saving and summed_flags["save_ready"] >= self._world.size:
            self.progress += 1
            try:
                self._report(self._saver.advance(), progress.step)
            except AgreedError as error:
                self._fail(error)
        if self._due(progress, bool(summed_flags["save_due"])):
            self._begin(progress)

    def save_now(self, progress: Manifest) -> None:
        """Save and wait until that is complete. Collective. Raises AgreedError on failure."""
        self.wait(progress.step)
        self._improves(progress)
        self._report(self._saver.save(progress), progress.step)
        self._interval.saved(None)

    def wait(self, step: int) -> None:
        """Wait for the save that is being written, if any. Collective."""
        try:
            self.finish(step)
        except AgreedError as error:
            self._fail(error)

    def finish(self, step: int) -> None:
        """Wait for the save that is being written. Collective. Raises AgreedError if it failed."""
        if self._saver.saving:
            self._report(self._saver.finish(), step)

    def has(self, step: int) -> bool:
        """Return True if the newest complete checkpoint of this job is that of a step. Local."""
        return self._last is not None and self._last.name == checkpoint_name(step)

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json about checkpoints. Local."""
        return {
            "checkpoint": str(self._last) if self._last else None,
            "checkpoints": {
                "saved": self._saved,
                "failed": self._failed,
                "waited_s": self._waited_s,
                "longest_s": self.longest_s,
            },
        }

    def _due(self, progress: Manifest, by_clock: bool) -> bool:
        """Return True if a save is due, as it always is after the best evaluation."""
        improved = self._improves(progress)
        due = by_clock or self._interval.due_after(progress.step)
        return due or (improved and self._interval.wanted)

    def _improves(self, progress: Manifest) -> bool:
        """Note an evaluation's score, and return True if it is the lowest of the run. Local."""
        lowest = self._best_score
        score = progress.eval_loss if self._scored_by == "eval_loss" else progress.score
        if score is not None:
            self._best_score = min(score, lowest)
        return self._best_score < lowest

    def _begin(self, progress: Manifest) -> None:
        start = time.perf_counter()
        self.wait(progress.step)
        copy_start = time.perf_counter()
        waited = copy_start - start
        if waited > _LONG_WAIT_S and not self._warned_of_wait:
            self._warned_of_wait = True
            self._warn(
                f"training waited {waited:.1f} s after step {progress.step}, since the checkpoint "
                "before was still being written: save less often, or to a faster disk"
            )
        self._saver.begin(progress)
        self.progress += 1
        end = time.perf_counter()
        self._interval.saved(end - copy_start)
        self._waited_s += end - start

    def _report(self, saved: Save | None, step: int) -> None:
        if saved is None:
            return
        self._last = saved.path
        self._saved += 1
        self.longest_s = max(self.longest_s, saved.seconds)
        self._note(
            f"step {step}  {saved.path.name} is safe: {saved.nbytes / 1e6:.1f} MB after "
            f"{saved.seconds:.2f} s"
        )
        if self._on_checkpoint and self._world.master:
            self._on_checkpoint(saved.path)

    def _fail(self, error: AgreedError) -> None:
        self._failed += 1
        self._interval.failed()
        now = time.monotonic()
        if now >= self._warned_at + RETRY_S:
            self._warned_at = now
            self._warn(str(error))
