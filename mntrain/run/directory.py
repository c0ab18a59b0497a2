"""A run's directory: its lock, and what it holds of earlier jobs.

RUN/.lock            held by the job that uses the directory: mntrain.run.lock
RUN/config.toml      options
RUN/metrics.jsonl    a line for each step
RUN/tensorboard/     the same as event files, with --log.tensorboard
RUN/.wandb-id        the run's id at W&B, with --log.wandb; wandb/ has its files
RUN/.mlflow-id       the run's id at MLflow, with --log.mlflow
RUN/metrics.prom     the last values for Prometheus, with --log.prometheus
RUN/checkpoints/     step-00000500, ...
RUN/timeline.json.gz a trace of some steps, with --log.timeline
RUN/summary.json     written last
RUN/report.html      a page about the run, made from the other files, with --log.report
RUN/hf/              the tokenizer and more, for `ckpt export --hf`
RUN/.attempts.json  what the run consists of, with --checkpoint.local: mntrain.checks.local_folder
RUN/recorder/        the last events of each rank; elsewhere with --run.recorder
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from errno import ENOENT
from pathlib import Path
from typing import Self

from mntrain.checkpoint import list_checkpoints, set_aside
from mntrain.checkpoint.node_folders import NodeFolders
from mntrain.checks.local_folder import ATTEMPTS_FILE, Attempts, new_attempts, read_attempts
from mntrain.checks.storage import write_and_look
from mntrain.errors import combined_refusals
from mntrain.metrics.copies import MLFLOW_ID_FILE, WANDB_ID_FILE
from mntrain.metrics.files import (
    CONFIG_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    end_last_line,
    json_text,
    read_metrics,
    write_summary,
    write_whole,
)
from mntrain.ranks import Ranks
from mntrain.recorder.launch_notes import LaunchNotes
from mntrain.recorder.recording import recordings
from mntrain.run.lock import RunLock

# Statuses of jobs that hung, lost a rank, or ended by an exception of one rank.
EARLY_ENDS = ("stalled", "lost", "crashed")


class RunDirectory:
    """A run's directory, which this job has locked. Made by all ranks; the master's path counts.

    By default it is a new one, named after the date. Nothing of the run is written before it has
    `begun`: `close` then removes a folder that this job has made, so a refused job leaves nothing.
    `last_step` is the last step in metrics.jsonl, the same on all ranks. `rewinds` counts calls of
    `rewind`, which replaces files. `local` are the run's folders in the nodes' memory, once they
    are opened. `recorder`, if given, is the folder for the events of the ranks. If another job
    takes the lock, which it may once this process was stopped for a while, the watchdog ends this
    job. Raises AgreedError if no files can be made, or another job uses the directory.
    """

    def __init__(
        self, world: Ranks, path: Path | None = None, recorder: Path | None = None
    ) -> None:
        self._world, self._recorder, self.rewinds = world, recorder, 0
        self.begun = self.closed = False
        self._first_files: dict[str, bytes | None] = {}
        self._lock: RunLock | None = None
        self.local: NodeFolders | None = None
        self._made: list[Path] = []  # folders that were not there before, the inner ones first
        # Of jobs that are started in the same second, each gets one of its own.
        self.path = path or Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(4)}")
        with world.agreement(), _writing(self.path):
            if world.master:
                self._make(new=path is None)
                self._lock = RunLock(self.path, world.watchdog.lose_directory)
        self.path = world.gather(self.path)[0]
        with world.agreement():
            last = _last_step(self.path) if world.master else 0
        self.last_step = world.gather(last)[0]

    def _make(self, *, new: bool) -> None:
        """Make the folder, unless it exists and need not be `new`."""
        missing = [f for f in self.path.parents if not f.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir()
        except FileExistsError:
            if new or not self.path.is_dir():
                raise
        else:
            self._made = [self.path, *missing]

    def expect_shared(self) -> None:
        """Raise AgreedError unless all ranks see what the master writes here. Collective.

        Makes nothing that stays. Takes some seconds where a rank does not see it.
        """
        world = self._world
        if world.size == 1:
            return
        with world.agreement(), _writing(self.path):
            _, blind = write_and_look(world.gather, world.rank, self.path)
            if world.rank in blind:
                raise ValueError(
                    f"{self.path} is not the folder that rank 0 sees, and a checkpoint is written "
                    "by all ranks: give a run directory on a file system that all nodes share"
                )

    def open_local(self, folder: Path | None) -> None:
        """Open the folders of the run within `folder` on each node, if one is given. Collective.

        Raises AgreedError if any node cannot use it.
        """
        if folder is not None and self.local is None:
            self.local = NodeFolders(self._world, folder, self.path, self.attempts())
            if self._world.master and (notes := LaunchNotes.of(os.environ)) is not None:
                notes.use_local(self.local.root)

    def attempts(self) -> Attempts:
        """Return what the run consists of, from now on in a file. Collective.

        Raises AgreedError if that cannot be written.
        """
        found: Attempts | None = None
        with self._world.agreement(), _writing(self.path):
            if self._world.master:
                found = read_attempts(self.path)
                if found is None:
                    found = new_attempts()
                    write_whole(self.path / ATTEMPTS_FILE, found.text().encode())
        found = self._world.gather(found)[0]
        assert found is not None
        return found

    def rewind(self, step: int, *, saves: bool = True) -> None:
        """Remove what earlier jobs have left of the steps after `step`, and `begin`. Collective.

        A run may be started over, from step 0, if it was killed, or ended by a hang or an
        exception, before its first checkpoint, and the job that starts it over `saves`. Raises
        AgreedError for another, and if files cannot be written.
        """
        with self._world.agreement(), _writing(self.path):
            if self._world.master:
                begun = (self.path / CONFIG_FILE).exists() and not saves
                if not step and (begun or _has_result(self.path) or list_checkpoints(self.path)):
                    raise ValueError(f"{self.path} holds a run already: give another run directory")
                rewind(self.path, step)
        self.last_step, self.rewinds = min(self.last_step, step), self.rewinds + 1
        self.begin()

    def begin(self) -> None:
        """Write the first files of the run, and record events. Collective; once."""
        if self.begun:
            return
        self._write(self._first_files)
        self.begun = True
        self._start_recording()

    def write_files(self, files: Mapping[str, bytes | None]) -> None:
        """Write files of the run, the master's, now or when it begins. Collective.

        By their names in the run; None instead of a content ends the last line of a file of lines.
        Raises AgreedError if that is not possible.
        """
        if self.begun:
            self._write(files)
        else:
            self._first_files |= files

    def _write(self, files: Mapping[str, bytes | None]) -> None:
        with self._world.agreement(), _writing(self.path):
            for name, content in files.items() if self._world.master else ():
                path = self.path / name
                for folder in reversed(Path(name).parents[:-1]):  # within the directory
                    (self.path / folder).mkdir(exist_ok=True)
                if content is None:
                    end_last_line(path)
                else:
                    write_whole(path, content)  # an older file stays on a full disk

    def _start_recording(self) -> None:
        """Record the events of all ranks, in the directory or the given folder. Collective.

        Where that is not possible, the master prints one warning, and there is no recording.
        """
        world = self._world
        if world.recorder.opened:  # for another run
            return
        if world.master and (notes := LaunchNotes.of(os.environ)) is not None:
            notes.use_run(self.path)
        job = world.gather(secrets.token_hex(8))[0]
        folder = recordings(self.path, self._recorder)
        problems = world.gather(world.recorder.open(folder, job) or None)
        if any(problems):
            world.output.warn(f"no recording for autopsy: {combined_refusals(problems)}")

    def expect_own(self) -> None:
        """Raise OSError if another folder is in the place of this one. Local, on the master."""
        if self._lock is not None and (problem := self._lock.replaced()):
            raise FileNotFoundError(ENOENT, problem)

    def write_early_end(self, status: str, reason: str) -> None:
        """Write summary.json of a run whose job ends without its ranks, in one of EARLY_ENDS."""
        if not self.begun:
            return
        self.expect_own()
        summary = {"status": status, "reason": reason, "steps": _last_step(self.path)}
        write_summary(self.path, {**summary, "run_dir": str(self.path)})

    def close(self) -> None:
        """Let other jobs use the directory, or remove it if it is new and not begun. Local."""
        if self._lock is not None:
            self._lock.close()
        if self.local is not None:
            self.local.copies.close()
        if self._made and not self.begun:
            with suppress(OSError):
                (self.path / ATTEMPTS_FILE).unlink(missing_ok=True)
                for made in self._made:
                    made.rmdir()  # unless another run is in it
        self._made, self.closed = [], True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rewind(run_dir: Path, step: int) -> None:
    """Remove what earlier jobs have left of the steps after `step`, which are taken again."""
    if attempts := read_attempts(run_dir):
        write_whole(run_dir / ATTEMPTS_FILE, attempts.begun(step).text().encode())
    for made_last in (SUMMARY_FILE, REPORT_FILE):
        (run_dir / made_last).unlink(missing_ok=True)
    if not step:
        for name in (WANDB_ID_FILE, MLFLOW_ID_FILE):
            (run_dir / name).unlink(missing_ok=True)
    set_aside(run_dir, step)
    if (run_dir / METRICS_FILE).exists():
        kept = [line for line in read_metrics(run_dir) if line["step"] <= step]
        text = "".join(json_text(line) + "\n" for line in kept)
        write_whole(run_dir / METRICS_FILE, text.encode())


@contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    """Raise ValueError where no files can be made in the run directory."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"no files can be made in the run directory {run_dir} ({error}): give a folder in "
            "which they can"
        ) from error


def _has_result(run_dir: Path) -> bool:
    """Return whether a run has a summary.json, other than of an early end."""
    path = run_dir / SUMMARY_FILE
    try:
        return path.exists() and json.loads(path.read_text())["status"] not in EARLY_ENDS
    except (ValueError, KeyError):
        return True


def _last_step(run_dir: Path) -> int:
    """Return the last step in metrics.jsonl, 0 if there is none."""
    return max((int(line["step"]) for line in read_metrics(run_dir)), default=0)
