"""Kill a whole job at random instants while it saves, and count the lost steps.

    python benchmarks/kills.py [--kills 100] [--ranks 2]

Every job resumes the run of the previous one and saves after every step. SIGKILL ends mpirun and
all ranks at a random instant after the job's first step. The benchmark then checks that a
checkpoint is intact and counts how many steps the run goes back. At the end it compares the losses
of the run with those of an uninterrupted run, and writes docs/results/kills.md.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from emulated import mpirun_words, on_ranks
from results import DOCS, facts, heading, table

from mntrain.checkpoint.reader import inspect, list_checkpoints, verify

JOB = ["-m", "mntrain", "--model.layers", "2", "--model.width", "128", "--model.context", "32"]
JOB += ["--device", "cpu", "--train.steps", "100000", "--train.batch-size", "4"]
JOB += ["--train.eval-every", "0", "--zero.stage", "1"]
MARK = "MNTRAIN_KILLS"  # in the environment of every process of a job
FIRST_STEP_S = 120.0
LONGEST_S = 1.0  # from the first step to the kill


class Kill(NamedTuple):
    """The state of a run after a kill."""

    steps: int  # taken before the kill
    newest: int  # step of the newest intact checkpoint; 0 for none
    corrupt: int  # newer checkpoints that are not intact
    saving: bool  # whether a checkpoint was being written


def main() -> None:
    """Kill jobs, compare the losses, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    page, chance, kills = facts(), random.Random(options.seed), []
    # In the current directory, since the temporary directory may be in memory.
    with tempfile.TemporaryDirectory(prefix=".kills-", dir=".") as name:
        run, whole = Path(name, "run"), Path(name, "whole")
        for number in range(1, options.kills + 1):
            done = kills[-1].newest if kills else 0
            kills.append(_kill(options.ranks, run, done, chance.uniform(0, LONGEST_S)))
            print(number, kills[-1], flush=True)
        found, last = _losses(run), kills[-1].newest
        words = [*JOB, "--run.dir", whole, "--run.stop-after", last]
        on_ranks(options.ranks, words, {"OMP_NUM_THREADS": "1"})
        same = sum(found[step] == loss for step, loss in _losses(whole).items())
    about = (
        f"{options.ranks} ranks save after every step, in the background. SIGKILL ends mpirun and "
        "all ranks at a random instant within a second after a job's first step. The next job "
        "resumes the run."
    )
    back = Counter(kill.steps - kill.newest for kill in kills)
    lines = [
        *heading(page, "Jobs killed at random instants", {"torch": torch.__version__}, about),
        f"- Kills: {len(kills)}, of which {sum(kill.saving for kill in kills)} while a checkpoint "
        "was being written.",
        f"- Kills after which an intact checkpoint existed: {sum(it.newest > 0 for it in kills)}.",
        f"- Corrupt checkpoints: {sum(kill.corrupt for kill in kills)}.",
        f"- Steps of the run: {last}, of which {same} have bitwise the loss of an uninterrupted "
        "run.",
        "",
        *table(["steps lost", "kills"], [map(str, it) for it in sorted(back.items())], texts=0),
        "",
        "A checkpoint is completed during the following step, so with an interval of one step a "
        "kill loses at most two steps.",
    ]
    (options.output / "results").mkdir(parents=True, exist_ok=True)
    (options.output / "results" / "kills.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _kill(ranks: int, run: Path, done: int, delay_s: float) -> Kill:
    """Resume the run after `done` steps, and kill it `delay_s` seconds after the next one."""
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    start, output = time.time(), run.parent / "output"
    saves = ["--run.dir", str(run), "--checkpoint.every", "1", "--checkpoint.keep", "2"]
    with output.open("w") as file:
        job = subprocess.Popen(
            [*mpirun_words(ranks), sys.executable, *JOB, *saves],
            env=os.environ | {MARK: token, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )
        try:
            # The job first rewrites the file up to the step that it resumes from.
            while not _written_after(run / "metrics.jsonl", start) or max(_losses(run)) == done:
                if job.poll() is not None or time.time() > start + FIRST_STEP_S:
                    raise RuntimeError(f"no step was taken: {output.read_text()}")
                time.sleep(0.02)
            time.sleep(delay_s)
        finally:
            _end_all(token)
            job.wait()
    newest, corrupt = 0, 0
    for path in list_checkpoints(run):
        try:
            content = inspect(path)
            verify(path, content)
        except ValueError:
            corrupt += 1
            continue
        newest = content.step
        break
    return Kill(max(_losses(run)), newest, corrupt, any((run / "checkpoints").glob(".step-*")))


def _written_after(file: Path, when: float) -> bool:
    return file.exists() and file.stat().st_mtime > when and file.stat().st_size > 0


def _end_all(token: str) -> None:
    """Kill every process of a job, found by a mark in its environment."""
    mark = f"{MARK}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _losses(run: Path) -> dict[int, float]:
    """Return the losses by step. A line that the kill truncated is ignored."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            found[record["step"]] = record["loss"]
    return found


if __name__ == "__main__":
    main()
