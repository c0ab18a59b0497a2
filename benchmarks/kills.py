"""Kill a whole job at random instants while it saves, and count the lost steps.

    python benchmarks/kills.py [--kills 100] [--ranks 2]

Every job resumes the run of the previous one and saves after every step. SIGKILL ends mpirun and
all ranks at a random instant after the job's first step. The benchmark then checks that a
checkpoint is intact and counts how many steps the run goes back. At the end it compares the losses
of the run with those of an uninterrupted run.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import option_types
import torch

from mntrain.checkpoint.reader import inspect, list_checkpoints, verify

JOB = ["--model.layers", "2", "--model.width", "128", "--model.context", "32", "--device", "cpu"]
JOB += ["--train.steps", "100000", "--train.batch-size", "4", "--train.eval-every", "0"]
JOB += ["--zero.stage", "1"]
MARK = "MNTRAIN_KILLS"  # in the environment of every process of a job
FIRST_STEP_S = 120.0
LONGEST_S = 1.0  # from the first step to the kill
DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclass(frozen=True)
class Kill:
    """The state of a run after a kill."""

    steps: int  # taken before the kill
    newest: int  # step of the newest intact checkpoint; 0 for none
    corrupt: int  # newer checkpoints that are not intact
    saving: bool  # whether a checkpoint was being written


def main() -> None:
    """Kill jobs, compare the losses, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=option_types.count, default=100)
    parser.add_argument("--ranks", type=option_types.count, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    # In the current directory, since the temporary directory may be in memory.
    with tempfile.TemporaryDirectory(prefix=".kills-", dir=".") as name:
        run = Path(name) / "run"
        kills: list[Kill] = []
        for number in range(1, options.kills + 1):
            done = kills[-1].newest if kills else 0
            kills.append(_kill(options.ranks, run, done, chance.uniform(0, LONGEST_S)))
            print(number, kills[-1], flush=True)
        losses, last = _losses(run), kills[-1].newest
        subprocess.run(
            [*_command(options.ranks, Path(name) / "whole"), "--run.stop-after", str(last)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        undisturbed = _losses(Path(name) / "whole")
        same = sum(losses[step] == loss for step, loss in undisturbed.items())
    page = _page(options.ranks, options.seed, kills, same, last)
    results = options.output / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / "kills.md").write_text(page)
    print(page)


def _command(ranks: int, run: Path) -> list[str]:
    mpirun = Path(sys.executable).parent / "mpirun"
    job = [sys.executable, "-m", "mntrain", *JOB, "--run.dir", str(run)]
    return [str(mpirun), "-n", str(ranks), *job]


def _kill(ranks: int, run: Path, done: int, delay_s: float) -> Kill:
    """Resume the run after `done` steps, and kill it `delay_s` seconds after the next one."""
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    start = time.time()
    with (run.parent / "output").open("w") as output:
        job = subprocess.Popen(
            [*_command(ranks, run), "--checkpoint.every", "1", "--checkpoint.keep", "2"],
            env=os.environ | {MARK: token, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
        try:
            # The job first rewrites the file up to the step that it resumes from.
            while not _written_after(run / "metrics.jsonl", start) or max(_losses(run)) == done:
                if job.poll() is not None or time.time() > start + FIRST_STEP_S:
                    raise RuntimeError(f"no step was taken: {(run.parent / 'output').read_text()}")
                time.sleep(0.02)
            time.sleep(delay_s)
        finally:
            _end_all(token)
            job.wait()
    return _left(run)


def _written_after(file: Path, when: float) -> bool:
    return file.exists() and file.stat().st_mtime > when and file.stat().st_size > 0


def _end_all(token: str) -> None:
    """Kill every process of a job, found by a mark in its environment."""
    mark = f"{MARK}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _left(run: Path) -> Kill:
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
    saving = any((run / "checkpoints").glob(".step-*"))
    return Kill(max(_losses(run)), newest, corrupt, saving)


def _losses(run: Path) -> dict[int, float]:
    """Return the losses by step. A line that the kill truncated is ignored."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            found[record["step"]] = record["loss"]
    return found


def _page(ranks: int, seed: int, kills: list[Kill], same: int, last: int) -> str:
    """Return the page as Markdown."""
    back = Counter(kill.steps - kill.newest for kill in kills)
    lines = [
        "# Jobs killed at random instants",
        "",
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}. Command: `python "
        f"benchmarks/kills.py --kills {len(kills)} --ranks {ranks} --seed {seed}`.",
        f"{ranks} ranks save after every step, in the background. SIGKILL ends mpirun and all "
        "ranks at a random instant within a second after a job's first step. The next job resumes "
        "the run.",
        "",
        f"- Kills: {len(kills)}, of which {sum(kill.saving for kill in kills)} while a checkpoint "
        "was being written.",
        "- Kills after which an intact checkpoint existed: "
        f"{sum(kill.newest > 0 for kill in kills)}.",
        f"- Corrupt checkpoints: {sum(kill.corrupt for kill in kills)}.",
        f"- Steps of the run: {last}, of which {same} have bitwise the loss of an uninterrupted "
        "run.",
        "",
        "| steps lost | kills |",
        "|--:|--:|",
        *(f"| {steps} | {count} |" for steps, count in sorted(back.items())),
        "",
        "A checkpoint is completed during the following step, so with an interval of one step a "
        "kill loses at most two steps.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
