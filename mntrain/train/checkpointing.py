"""A run's checkpoints: when they are made, and what is told of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mntrain.checkpoint import FoundCheckpoint, RunProgress, SavedCheckpoint, Saver
from mntrain.config import Config
from mntrain.errors import AgreedError
from mntrain.metrics.report import Reporter
from mntrain.metrics.step import StepRecord
from mntrain.train.run_directory import plain
from mntrain.train.save_interval import SaveInterval
from mntrain.world import World

_LONG_WAIT_S = 1.0


@dataclass
class SaveCosts:
    """What saving took so far."""

    waited_s: float = 0.0  # by training
    longest_s: float = 0.0  # from a copy until it was safe on the disk


class Checkpointing:
    """Decides after which steps a run is saved, and sees to it. The same on all ranks."""

    def __init__(
        self,
        world: World,
        config: Config,
        saver: Saver,
        samples: int,
        found: FoundCheckpoint | None,
    ) -> None:
        self._world, self._config, self._saver = world, config, saver
        self._samples = samples
        self._cadence = SaveInterval(config.checkpoint.every, config.checkpoint.mtbf_hours)
        self._best = saver.best_loss(found.manifest.step) if found else None
        self._told_to_wait = self._prepared = False
        self.last: Path | None = None  # what is safe
        self.count = self.failed = 0
        self.costs = SaveCosts(longest_s=found.manifest.wrote_s if found else 0.0)

    @property
    def wanted(self) -> bool:
        """Whether this job is to leave checkpoints, whatever happens."""
        run = self._config.run
        return self._cadence.wanted or run.stop_after is not None or run.max_minutes is not None

    def says(self) -> tuple[float, float]:
        """What this rank has to say before a step ends; the sums over all are for `after`. Local.

        Whether it is time to save, by the master's clock; and how far saving is.
        """
        due = self._world.master and self._cadence.due_now()
        return float(due), float(self._saver.ready())

    def after(
        self, record: StepRecord, skipped_steps: int, said: Sequence[float], reporter: Reporter
    ) -> None:
        """Save after a step, if it is due, while training goes on. Collective.

        What goes wrong is a warning.
        """
        due, ready = said
        try:
            if self._saver.saving and ready >= self._world.size:
                self._tell(self._saver.advance(), record.step, reporter)
            if self._due(record, bool(due)):
                self._begin(record, skipped_steps, reporter)
            elif self._cadence.wanted and not self._prepared:
                self._saver.prepare()
            self._prepared = True
        except AgreedError as error:
            self.failed += 1
            reporter.warn(str(error))

    def at_end(self, record: StepRecord, skipped_steps: int, reporter: Reporter) -> None:
        """Save after the last step of a job, and wait for it. Collective. AgreedError."""
        self.settle(reporter, record.step)
        self._tell(self._saver.save(self._progress(record, skipped_steps)), record.step, reporter)

    def settle(self, reporter: Reporter, step: int) -> None:
        """Wait for what is still being written. Collective. What goes wrong is a warning."""
        try:
            if self._saver.saving:
                self._tell(self._saver.finish(), step, reporter)
        except AgreedError as error:
            self.failed += 1
            reporter.warn(str(error))

    def facts(self) -> dict[str, Any]:
        """What the summary is to say. Local."""
        return {
            "checkpoint": str(self.last) if self.last else None,
            "checkpoints": {
                "saved": self.count,
                "failed": self.failed,
                "waited_s": self.costs.waited_s,
                "longest_s": self.costs.longest_s,
            },
        }

    def _due(self, record: StepRecord, by_clock: bool) -> bool:
        """Whether to save now. What has the lowest evaluation loss so far is always saved."""
        loss = record.eval_loss
        best = loss is not None and (self._best is None or loss < self._best)
        if best:
            self._best = loss
        due = by_clock or self._cadence.due_after(record.step)
        return due or (best and self._cadence.wanted)

    def _begin(self, record: StepRecord, skipped_steps: int, reporter: Reporter) -> None:
        start = time.perf_counter()
        self.settle(reporter, record.step)
        waited = time.perf_counter() - start
        if waited > _LONG_WAIT_S and not self._told_to_wait:
            self._told_to_wait = True
            reporter.warn(
                f"training waited {waited:.1f} s after step {record.step}, since the checkpoint "
                "before was still being written: save less often, or to a faster disk"
            )
        copy = time.perf_counter()
        self._saver.begin(self._progress(record, skipped_steps))
        end = time.perf_counter()
        self._cadence.saved(end - copy)
        self.costs.waited_s += end - start

    def _progress(self, record: StepRecord, skipped_steps: int) -> RunProgress:
        return RunProgress(
            step=record.step,
            config=plain(self._config),
            samples=self._samples,
            skipped_steps=skipped_steps,
            eval_loss=record.eval_loss,
        )

    def _tell(self, saved: SavedCheckpoint | None, step: int, reporter: Reporter) -> None:
        if saved is None:
            return
        self.last = saved.path
        self.count += 1
        self.costs.longest_s = max(self.costs.longest_s, saved.seconds)
        reporter.note(
            f"step {step}  {saved.path.name} is safe: {saved.nbytes / 1e6:.1f} MB after "
            f"{saved.seconds:.2f} s"
        )
