"""Saves of a configured run: in its course, at its end, and before an exception ends it."""

from collections.abc import Mapping

from mntrain.checkpoint import Manifest
from mntrain.config import Config
from mntrain.errors import AgreedError, TrainingStoppedError
from mntrain.metrics.registry import StepRecord
from mntrain.train.failed_step import non_finite_stops
from mntrain.train.job import TrainingJob
from mntrain.train.resumption import to_json
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

    def _save_last(self, *, wanted: bool) -> AgreedError | None:
        """Save the last completed step, if wanted and it is not saved; return why that failed."""
        last, saver = self._result.last, self._job.checkpointing
        saver.wait(last.step if last else self._job.done)  # it may be of this step
        if last is None or not wanted or saver.has(last.step):
            return None
        try:
            with non_finite_stops(self._world, last.step):
                saver.save_now(self._progress(last))
        except AgreedError as error:
            return error
        return None

    def at_end(self) -> None:
        """Save at the end of the job, if wanted or preempted; a failure is the job's result."""
        result = self._result
        saves = self._job.saves or result.status == "preempted"
        error = self._save_last(wanted=saves and not result.error)
        if error and result.status != "interrupted":
            result.status = "failed"
            result.error = TrainingStoppedError(str(error), self._world.rank)
        elif error:
            self._job.reporter.warn(str(error))

    def last_step(self) -> None:
        """Save the last completed step, if wanted, before an exception ends the job."""
        if error := self._save_last(wanted=self._job.saves):
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
