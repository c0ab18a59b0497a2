"""Measure how long jobs take from their last line to their exit on a busy machine.

    python benchmarks/exits.py [--exits 200] [--spinners 20] [--jobs 6] [--minutes 15]

An exit is that of one rank. Own loops on 2 and 3 ranks end in turn in the ways of
`benchmarks/ranks/exit_kinds.py`, several at a time, beside processes that compute all the time. The
time runs from the last line of any rank to the end of mpirun. Prints the distribution for each
kind, and fails if a job takes longer than a minute, or ends with another exit code than expected.
After so many minutes no more jobs are started.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

import option_types
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "benchmarks" / "ranks")]
from exit_kinds import KINDS  # noqa: E402
from launch import is_open_mpi, mpirun  # noqa: E402

LIMIT_S = 60.0  # of an exit
START_S = 300.0  # of all before it


@dataclass(frozen=True)
class Exit:
    """The end of one job. `problem` is empty if it was as expected."""

    kind: str
    ranks: int
    seconds: float
    problem: str


def main() -> int:
    """Run the jobs, and print the distribution of times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--exits", type=option_types.count, default=200, help="of ranks")
    parser.add_argument("--spinners", type=option_types.count, default=20, help="busy processes")
    parser.add_argument("--jobs", type=option_types.count, default=6, help="at a time")
    parser.add_argument("--minutes", type=option_types.positive, default=15.0)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    found: list[Exit] = []

    def run(job: tuple[str, int]) -> None:
        if time.monotonic() < deadline:
            found.append(run_job(*job))
            print(found[-1], flush=True)

    with spinners(options.spinners), ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, draw(options.exits)))
    library = "Open MPI" if is_open_mpi() else "MPICH"
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {library}, Python "
        f"{platform.python_version()}, torch {torch.__version__}: "
        f"{sum(one.ranks for one in found)} exits in {len(found)} jobs, {options.spinners} busy "
        f"processes, {options.jobs} jobs at a time"
    )
    print(table(found))
    problems = [one for one in found if one.problem]
    for one in problems:
        print(f"{one.kind}, {one.ranks} ranks: {one.problem}")
    return int(bool(problems))


def draw(exits: int) -> list[tuple[str, int]]:
    """Return jobs with so many ranks in all, of every kind in turn, on 2 and 3 ranks."""
    jobs: list[tuple[str, int]] = []
    kinds = cycle([(kind, ranks) for ranks in (2, 3) for kind in KINDS])
    while sum(ranks for _, ranks in jobs) < exits:
        jobs.append(next(kinds))
    return jobs


@contextmanager
def spinners(count: int) -> Iterator[None]:
    """Let processes compute beside the block."""
    command = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_job(kind: str, ranks: int) -> Exit:
    """Run one job, and compare its end with what is expected."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "benchmarks" / "ranks" / "exit_kinds.py", kind, folder]
        begin = time.time()
        result = mpirun(ranks, command, timeout=START_S + LIMIT_S)
    words = [line.split() for line in result.stdout.splitlines()]
    ends = [float(line[1]) for line in words if line[:1] == ["end"] and len(line) == 2]
    seconds = begin + result.seconds - max(ends, default=begin)
    problem = ""
    if result.timed_out or seconds > LIMIT_S:
        problem = "took too long"
    elif (result.returncode == 0) == (kind == "error"):
        problem = f"ended with exit code {result.returncode}"
    elif len(ends) < ranks and kind != "error":  # which ends the others wherever they are
        problem = "has not come to its end on all ranks"
    return Exit(kind, ranks, seconds, f"{problem}\n{result.report()}" if problem else "")


def table(exits: list[Exit]) -> str:
    """Return the distribution of seconds by kind."""
    by_kind: defaultdict[str, list[Exit]] = defaultdict(list)
    for one in exits:
        by_kind[one.kind].append(one)
    lines = ["| kind | jobs | median, s | 90 %, s | most, s |", "|---|--:|--:|--:|--:|"]
    for kind, group in [*by_kind.items(), ("all", exits)]:
        seconds = sorted(one.seconds for one in group)
        ninety = seconds[int(0.9 * (len(seconds) - 1))]
        shown = f"{median(seconds):.1f} | {ninety:.1f} | {seconds[-1]:.1f}"
        lines.append(f"| {kind} | {len(group)} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
