"""The checkpoints of a run: when they are made, and what is reported about them."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mntrain.checkpoint import FoundCheckpoint, RunProgress, SavedCheckpoint, Saver
from mntrain.config import Config
from mntrain.errors import AgreedError
from mntrain.metrics.registry import StepRecord
from mntrain.metrics.report import Reporter
from mntrain.train.run_directory import to_json
from mntrain.world import World

_LONG_WAIT_S = 1.0


class SaveInterval:
    """The interval between saves, as `--checkpoint.every` states it: steps, minutes, or "auto"."""

    def __init__(self, every: str, mtbf_hours: float) -> None:
        self._steps = int(every) if every.isdecimal() else 0
        self._seconds = 60 * float(every.removesuffix("min")) if every.endswith("min") else None
        self._auto = every == "auto"
        if self._auto:
            self._seconds = 0.0  # until the first save has shown its cost
        self._mtbf_s = 3600 * mtbf_hours
        self._last_save = time.monotonic()

    @property
    def wanted(self) -> bool:
        """True if the run is to be saved at intervals at all."""
        return self._steps > 0 or self._seconds is not None

    def due_after(self, step: int) -> bool:
        """Return True if the run is to be saved after this step. The same on all ranks."""
        return self._steps > 0 and step % self._steps == 0

    def due_now(self) -> bool:
        """Return True if it is time to save, on the clock of this process."""
        return self._seconds is not None and time.monotonic() - self._last_save >= self._seconds

    def saved(self, cost_s: float) -> None:
        """Start the next interval. Training waited `cost_s` seconds for this save.

        The interval "auto" minimizes the time that saves and failures cost: J. W. Young,
        Communications of the ACM 17 (1974).
        """
        self._last_save = time.monotonic()
        if self._auto:
            self._seconds = math.sqrt(2 * cost_s * self._mtbf_s)


class Checkpointing:
    """Saves the run after the steps that are due. Every rank makes the same decisions.

    A save that fails during training is reported as a warning, and training continues.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        saver: Saver,
        reporter: Reporter,
        *,
        samples: int,
        resumed: FoundCheckpoint | None,
    ) -> None:
        self._world, self._config, self._saver, self._reporter = world, config, saver, reporter
        self._samples = samples
        self._interval = SaveInterval(config.checkpoint.every, config.checkpoint.mtbf_hours)
        best_loss = saver.best_loss(resumed.manifest.step) if resumed else None
        self._best_loss = math.inf if best_loss is None else best_loss
        self._warned_of_wait = False
        self._last: Path | None = None  # the newest that is complete on the disk
        self._saved = self._failed = 0
        self._waited_s = 0.0  # by training
        # From the copy until the files are complete on the disk, in seconds.
        self.longest_s = resumed.manifest.wrote_s if resumed else 0.0

    @property
    def wanted(self) -> bool:
        """True if this job leaves a checkpoint at its end in any case."""
        run = self._config.run
        return self._interval.wanted or run.stop_after is not None or run.max_minutes is not None

    def local_flags(self) -> dict[str, float]:
        """Return this rank's flags, whose sums over all ranks `after_step` takes. Local.

        save_due: 1 on the master if its clock says that a save is due; save_ready: the progress of
        the save that is being written.
        """
        due = self._world.master and self._interval.due_now()
        return {"save_due": float(due), "save_ready": float(self._saver.ready())}

    def after_step(
        self, record: StepRecord, skipped_steps: int, summed_flags: Mapping[str, float]
    ) -> None:
        """Begin a save if one is due, and advance the one that is being written. Collective."""
        try:
            if self._saver.saving and summed_flags["save_ready"] >= self._world.size:
                self._report(self._saver.advance(), record.step)
            if self._due(record, bool(summed_flags["save_due"])):
                self._begin(record, skipped_steps)
        except AgreedError as error:
            self._fail(error)

    def save_now(self, record: StepRecord, skipped_steps: int) -> None:
        """Save and wait until that is complete. Collective. Raises AgreedError on failure."""
        self.wait(record.step)
        self._report(self._saver.save(self._progress(record, skipped_steps)), record.step)

    def wait(self, step: int) -> None:
        """Wait for the save that is being written, if any. Collective."""
        try:
            if self._saver.saving:
                self._report(self._saver.finish(), step)
        except AgreedError as error:
            self._fail(error)

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

    def _due(self, record: StepRecord, by_clock: bool) -> bool:
        """Return True if a save is due, as it always is after the lowest evaluation loss."""
        loss, lowest = record.eval_loss, self._best_loss
        if loss is not None:
            self._best_loss = min(loss, lowest)
        due = by_clock or self._interval.due_after(record.step)
        return due or (self._best_loss < lowest and self._interval.wanted)

    def _begin(self, record: StepRecord, skipped_steps: int) -> None:
        start = time.perf_counter()
        self.wait(record.step)
        copy_start = time.perf_counter()
        waited = copy_start - start
        if waited > _LONG_WAIT_S and not self._warned_of_wait:
            self._warned_of_wait = True
            self._reporter.warn(
                f"training waited {waited:.1f} s after step {record.step}, since the checkpoint "
                "before was still being written: save less often, or to a faster disk"
            )
        self._saver.begin(self._progress(record, skipped_steps))
        end = time.perf_counter()
        self._interval.saved(end - copy_start)
        self._waited_s += end - start

    def _progress(self, record: StepRecord, skipped_steps: int) -> RunProgress:
        return RunProgress(
            step=record.step,
            config=to_json(self._config),
            samples=self._samples,
            skipped_steps=skipped_steps,
            eval_loss=record.eval_loss,
        )

    def _report(self, saved: SavedCheckpoint | None, step: int) -> None:
        if saved is None:
            return
        self._last = saved.path
        self._saved += 1
        self.longest_s = max(self.longest_s, saved.seconds)
        self._reporter.note(
            f"step {step}  {saved.path.name} is safe: {saved.nbytes / 1e6:.1f} MB after "
            f"{saved.seconds:.2f} s"
        )

    def _fail(self, error: AgreedError) -> None:
        self._failed += 1
        self._reporter.warn(str(error))
