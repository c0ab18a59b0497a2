"""A run's directory: its lock, and what it holds of earlier jobs.

RUN/.lock            held by the job that uses the directory: mntrain.run.lock
RUN/config.toml      options
RUN/metrics.jsonl    a line for each step
RUN/metrics.csv      the same as a table, with --log.csv
RUN/tensorboard/     the same as event files, with --log.tensorboard
RUN/.wandb-id        the run's id at W&B, with --log.wandb; wandb/ has its files
RUN/checkpoints/     step-00000500, ...
RUN/loss.svg         the curves of the loss, drawn at the end of a job
RUN/summary.json     written last
RUN/hf/              the tokenizer and more, for `ckpt export --hf`
RUN/recorder/        the last events of each rank; elsewhere with --run.recorder
"""

import json
import os
import secrets
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from mntrain.checkpoint import list_checkpoints, set_aside
from mntrain.checks.storage import Probe, existing_folder, is_visible
from mntrain.errors import combined_refusals
from mntrain.metrics.files import (
    METRICS_FILE,
    PLOT_FILE,
    SUMMARY_FILE,
    json_text,
    read_metrics,
    write_summary,
    write_whole,
)
from mntrain.metrics.writers import WANDB_ID_FILE, rewind_csv
from mntrain.ranks import Ranks
from mntrain.recorder.recording import recordings
from mntrain.run.lock import RunLock
from mntrain.watchdog.thread import Watchdog

# Statuses of jobs that hung, lost a rank, or ended by an exception of one rank.
EARLY_ENDS = ("stalled", "lost", "crashed")


def make_new(run_dir: Path) -> Path:
    """Make a directory, and return its path; no other process can get the same one.

    If `run_dir` exists, for example because another job was started in the same second, the name
    gets the first ending of -2, -3, ... that is free. Raises ValueError if it cannot be made.
    """
    path, number = run_dir, 1
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
                path = run_dir.with_name(f"{run_dir.name}-{number}")
    except OSError as error:
        raise unwritable(path, error) from error


def make_and_lock(run_dir: Path, watchdog: Watchdog | None = None) -> RunLock:
    """Make a run's directory if there is none, and return its lock, held until it is closed.

    If another job takes the lock, which it may once this process was stopped for a while, the
    watchdog ends this job. Raises ValueError if the directory is not writable, or another process
    holds the lock.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return RunLock(run_dir, watchdog.lose_directory if watchdog else _warn, _warn)
    except OSError as error:
        raise unwritable(run_dir, error) from error


def _warn(text: str) -> None:
    print(f"mntrain: warning: {text}", file=sys.stderr, flush=True)


def expect_shared(world: Ranks, run_dir: Path) -> None:
    """Raise AgreedError unless all ranks see what the master writes where a run's directory lies.

    Collective. Makes nothing that stays. Takes some seconds where a rank does not see it.
    """
    if world.size == 1:
        return
    with ExitStack() as stack:
        place = Path(), ""
        with world.agreement():
            if world.master:
                folder = existing_folder(run_dir)
                try:
                    probe = stack.enter_context(closing(Probe(folder)))
                except OSError as error:
                    raise unwritable(folder, error) from error
                place = probe.path, probe.token
        path, token = world.gather(place)[0]
        with world.agreement():
            if not is_visible(path, token):
                raise ValueError(
                    f"{path.parent} is not the folder that rank 0 sees, and a checkpoint is "
                    "written by all ranks: give a run directory on a file system that all nodes "
                    "share"
                )


def unwritable(run_dir: Path, error: OSError) -> ValueError:
    """Return the error for a run directory in which files cannot be made."""
    reason = error.strerror
    for path in (run_dir, *run_dir.parents):
        if os.path.islink(path) and not os.path.exists(path):
            reason = f"{path} is a link to {os.readlink(path)}, which does not exist"
        elif os.path.exists(path) and not os.path.isdir(path):
            reason = f"{path} is a file"
    return ValueError(
        f"no files can be made in the run directory {run_dir} ({reason}): give a folder in which "
        "they can"
    )


def start_recording(world: Ranks, run_dir: Path, local: Path | None = None) -> None:
    """Record the events of all ranks in the run's directory, or under `local`. Collective.

    Where that is not possible, the master prints one warning, and there is no recording.
    """
    job = world.gather(secrets.token_hex(8))[0]
    problems = world.gather(world.recorder.open(recordings(run_dir, local), job) or None)
    if world.master and any(problems):
        text = f"mntrain: warning: no recording for autopsy: {combined_refusals(problems)}"
        print(text, file=sys.stderr)


class RunDirectory:
    """A run directory that this job has locked. Made by all ranks; the master's path counts.

    `last_step` is the last step in metrics.jsonl, the same on all ranks. `rewinds` counts calls of
    `rewind`, which replaces files. Raises AgreedError if the directory cannot be written, or is in
    use by another job.
    """

    def __init__(self, world: Ranks, path: Path) -> None:
        self._world = world
        self.path, self.rewinds = world.gather(path)[0], 0
        with world.agreement():
            self._lock = make_and_lock(self.path, world.watchdog) if world.master else None
        self.last_step = world.gather(_last_step(self.path) if world.master else 0)[0]

    def rewind(self, step: int) -> None:
        """Remove what earlier jobs have left of the steps after `step`. Collective.

        Raises AgreedError for step 0 of a run that has left a result.
        """
        with self._world.agreement():
            if self._world.master:
                if not step:
                    expect_startable(self.path, saves=True)
                rewind(self.path, step)
        self.last_step, self.rewinds = min(self.last_step, step), self.rewinds + 1

    def close(self) -> None:
        """Let other jobs use the directory. Local."""
        if self._lock is not None:
            self._lock.close()


def expect_startable(run_dir: Path, *, saves: bool) -> None:
    """Raise ValueError unless the run in a directory may be started over.

    It may if it was killed, or ended by a hang or an exception, before its first checkpoint, and
    the job that starts it over `saves`.
    """
    if not saves or _has_result(run_dir) or list_checkpoints(run_dir):
        raise ValueError(f"{run_dir} holds a run already: give another run directory")


def write_early_end(run_dir: Path, status: str, reason: str) -> None:
    """Write the summary.json of a job that ends without its ranks, in a status of EARLY_ENDS."""
    summary = {"status": status, "reason": reason, "steps": _last_step(run_dir)}
    write_summary(run_dir, {**summary, "run_dir": str(run_dir)})


def rewind(run_dir: Path, step: int) -> None:
    """Remove what earlier jobs have left of the steps after `step`, which are taken again."""
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    (run_dir / PLOT_FILE).unlink(missing_ok=True)
    if not step:
        (run_dir / WANDB_ID_FILE).unlink(missing_ok=True)
    set_aside(run_dir, step)
    if (run_dir / METRICS_FILE).exists():
        kept = [line for line in read_metrics(run_dir) if line["step"] <= step]
        text = "".join(json_text(line) + "\n" for line in kept)
        write_whole(run_dir / METRICS_FILE, text.encode())
        rewind_csv(run_dir, kept)


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
