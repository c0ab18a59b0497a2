"""Saves of a configured run: in its course, at its end, and before an exception ends it."""

from collections.abc import Mapping

from mntrain.checkpoint import Manifest
from mntrain.config import Config
from mntrain.errors import AgreedError, TrainingStoppedError
from mntrain.metrics.registry import StepRecord
from mntrain.train.failed_step import non_finite_stops
from mntrain.train.job import TrainingJob
from mntrain.train.run_directory import to_json
from mntrain.train.summary import JobResult
from mntrain.world import World


class RunSaving:
    """Saves a job's run as its configuration wants it. All methods are collective."""

    def __init__(self, world: World, config: Config, job: TrainingJob, result: JobResult) -> None:
        self._world, self._job, self._result = world, job, result
        self._config = to_json(config)

    def after_step(self, record: StepRecord, flags: Mapping[str, float]) -> None:
        """Begin a save if one is due, and advance the one that is being written."""
        with non_finite_stops(self._world, record.step):
            self._job.checkpointing.after_step(self._progress(record), flags)

    def at_end(self) -> None:
        """Save at the end of the job, if wanted or preempted; a failure is the job's result."""
        result, checkpointing = self._result, self._job.checkpointing
        saves = self._job.saves or result.status == "preempted"
        if result.last is None or result.error or not saves:
            checkpointing.wait(result.last.step if result.last else self._job.done)
            return
        try:
            with non_finite_stops(self._world, result.last.step):
                checkpointing.save_now(self._progress(result.last))
        except AgreedError as error:
            if result.status == "interrupted":
                self._job.reporter.warn(str(error))
            else:
                result.status = "failed"
                result.error = TrainingStoppedError(str(error), self._world.rank)

    def last_step(self) -> None:
        """Save the last completed step, if wanted, before an exception ends the job."""
        last, checkpointing = self._result.last, self._job.checkpointing
        checkpointing.wait(last.step if last else self._job.done)  # it may be of this step
        if last is None or not self._job.saves or checkpointing.has(last.step):
            return
        try:
            with non_finite_stops(self._world, last.step):
                checkpointing.save_now(self._progress(last))
        except AgreedError as error:
            self._job.reporter.warn(str(error))

    def _progress(self, record: StepRecord) -> Manifest:
        job = self._job
        return Manifest(
            step=record.step,
            config=self._config,
            samples=job.data.samples,
            skipped_steps=self._result.skipped_steps,
            eval_loss=record.eval_loss,
            data=job.data_facts,
            scored_by=job.best.text,
            position=job.data.position(record.step),
            score=job.best.score(record),
        )
