"""Kill a whole job at random instants while it saves, again and again, and count what is lost.

    python benchmarks/kills.py [--kills 100] [--ranks 2]

Every job goes on with the run of the one before, saves after every step, and is killed by SIGKILL,
mpirun and all ranks, at a random instant after its first step. Then: is there a checkpoint of which
every byte is right, and how many steps does the run go back? In the end the losses of the run are
compared with those of a run that nobody disturbed.
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

import torch
import values

from mntrain.checkpoint.reader import inspect, list_checkpoints, verify

JOB = ["--model.layers", "2", "--model.width", "128", "--model.context", "32", "--device", "cpu"]
JOB += ["--train.steps", "100000", "--train.batch-size", "4", "--train.eval-every", "0"]
JOB += ["--zero.stage", "1", "--comm.no-tune"]
MARK = "MNTRAIN_KILLS"  # in the environment of every process of a job
FIRST_STEP_S = 120.0
LONGEST_S = 1.0  # from the first step to the kill
PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "kills.md"


@dataclass(frozen=True)
class Kill:
    """What a kill left."""

    steps: int  # that the run had taken
    newest: int  # step of the newest checkpoint of which every byte is right; 0 for none
    unsound: int  # newer ones that are not
    saving: bool  # whether one was being written


def main() -> None:
    """Kill, finish, compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=values.count, default=100)
    parser.add_argument("--ranks", type=values.count, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    # Beside the sources, since the temporary directory may not be on a disk.
    with tempfile.TemporaryDirectory(prefix=".kills-", dir=".") as name:
        run = Path(name) / "run"
        kills: list[Kill] = []
        for number in range(1, options.kills + 1):
            done = kills[-1].newest if kills else 0
            kills.append(_kill(options.ranks, run, done, chance.uniform(0, LONGEST_S)))
            print(number, kills[-1], flush=True)
        left, last = _losses(run), kills[-1].newest
        subprocess.run(
            [*_command(options.ranks, Path(name) / "whole"), "--run.stop-after", str(last)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        undisturbed = _losses(Path(name) / "whole")
        same = sum(left[step] == loss for step, loss in undisturbed.items())
    page = _page(options.ranks, options.seed, kills, same, last)
    PAGE.write_text(page)
    print(page)


def _command(ranks: int, run: Path) -> list[str]:
    mpirun = Path(sys.executable).parent / "mpirun"
    job = [sys.executable, "-m", "mntrain", *JOB, "--run.dir", str(run)]
    return [str(mpirun), "-n", str(ranks), *job]


def _kill(ranks: int, run: Path, done: int, delay_s: float) -> Kill:
    """Go on with the run after `done` steps, and kill it so long after the next one."""
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
            # At its start the job writes the file anew, up to the step that it goes on after.
            while not _written_after(run / "metrics.jsonl", start) or max(_losses(run)) == done:
                if job.poll() is not None or time.time() > start + FIRST_STEP_S:
                    raise RuntimeError(f"no step: {(run.parent / 'output').read_text()}")
                time.sleep(0.02)
            time.sleep(delay_s)
        finally:
            _end_all(token)
            job.wait()
    return _left(run)


def _written_after(file: Path, when: float) -> bool:
    return file.exists() and file.stat().st_mtime > when and file.stat().st_size > 0


def _end_all(token: str) -> None:
    """Kill every process of a job, wherever it is in the tree of processes."""
    mark = f"{MARK}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _left(run: Path) -> Kill:
    newest, unsound = 0, 0
    for path in list_checkpoints(run):
        try:
            content = inspect(path)
            verify(path, content)
        except ValueError:
            unsound += 1
            continue
        newest = content.step
        break
    saving = any((run / "checkpoints").glob(".step-*"))
    return Kill(max(_losses(run)), newest, unsound, saving)


def _losses(run: Path) -> dict[int, float]:
    """Losses by step; a line that the kill has cut is none."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            found[record["step"]] = record["loss"]
    return found


def _page(ranks: int, seed: int, kills: list[Kill], same: int, last: int) -> str:
    """The page of results."""
    back = Counter(kill.steps - kill.newest for kill in kills)
    lines = [
        "# Killed at random instants",
        "",
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}. Command: `python "
        f"benchmarks/kills.py --kills {len(kills)} --ranks {ranks} --seed {seed}`.",
        f"{ranks} ranks save after every step, in the background. SIGKILL of mpirun and all ranks "
        "at a random instant within a second after a job's first step; the next job goes on.",
        "",
        f"- Kills: {len(kills)}; while a checkpoint was being written: "
        f"{sum(kill.saving for kill in kills)}.",
        "- With a checkpoint of which every byte is right: "
        f"{sum(kill.newest > 0 for kill in kills)}.",
        "- Checkpoints that were there, and were not sound: "
        f"{sum(kill.unsound for kill in kills)}.",
        f"- Steps in the end: {last}; losses that are those of a run that nobody disturbed, bit "
        f"for bit: {same}.",
        "",
        "| steps that the run went back | kills |",
        "|--:|--:|",
        *(f"| {steps} | {count} |" for steps, count in sorted(back.items())),
        "",
        "A checkpoint is on its way while the next step is taken: with an interval of one step, a "
        "kill costs two at most.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
