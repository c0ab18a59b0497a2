"""Inject faults into jobs, and count those whose report names the right rank and cause.

    python benchmarks/faults.py [--seed 0] [--count 100] [--timeout 6] [--jobs 3]

Each job trains a small model on 2 to 4 ranks; one rank does something wrong in its third step
(tests/chaos/kinds.py has the kinds and what must be said of each). A job is right if it ends by
itself, with an exit code that is not 0 unless it can go on, and its report names the rank and the
cause. The time to the end runs from the fault, or for faults that make other ranks wait, from the
end of their time limit, to the end of mpirun. A shell outlives each rank that dies: mpirun would
otherwise kill the others, often before they have reported a rank that was killed. Several jobs at a
time share the machine. The benchmark also looks for processes and shared memory that jobs leave.
Writes docs/results/faults.md, or faults-openmpi.md.
"""

import argparse
import os
import platform
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import option_types
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
from chaos.kinds import KINDS  # noqa: E402
from launch import is_open_mpi, mpirun  # noqa: E402

JOB_S = 120.0


@dataclass
class Outcome:
    """One job with a fault."""

    kind: str
    rank: int
    ended: bool  # by itself
    right: bool  # rank, cause and exit code
    left: list[str]  # processes and shared memory
    seconds: float | None  # from the fault, or the time limit, to the end


def main() -> int:
    """Run the jobs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=option_types.count, default=100)
    parser.add_argument("--timeout", type=option_types.positive, default=6.0, help="seconds")
    parser.add_argument("--jobs", type=option_types.count, default=3, help="at a time")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results", metavar="DIR")
    options = parser.parse_args()
    source, faults = random.Random(options.seed), []
    for _ in range(options.count):
        ranks = source.randint(2, 4)
        faults.append(
            (source.choice(list(KINDS)), source.randrange(ranks), ranks, source.randrange(3))
        )
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(partial(inject, options.timeout), range(options.count), faults))
    page = render(outcomes, (time.monotonic() - start) / 60, options)
    (options.output / f"faults{'-openmpi' * is_open_mpi()}.md").write_text(page)
    print(page)
    return 0


def inject(timeout: float, number: int, fault: tuple[str, int, int, int]) -> Outcome:
    """Run one job with a fault: kind, rank, number of ranks, and stage. Print its result."""
    kind, rank, ranks, stage = fault
    expected = KINDS[kind]
    limit = timeout if expected.waits else 10 * timeout
    script = ROOT / "tests" / "chaos" / "fault.py"
    command = [sys.executable, script, kind, str(rank), "--stage", str(stage)]
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder, "stamp")
        environment = {"FAULT_STAMP": str(stamp)}
        command += ["--timeout", str(limit)]
        start = time.time()
        options: dict[str, Any] = {"env": environment, "outlived": expected.dies, "patience_s": 10}
        result = mpirun(ranks, command, timeout=JOB_S, **options)
        happened = float(stamp.read_text()) if stamp.exists() else None
    found = re.search(expected.report.format(rank=rank), result.stderr) is not None
    completed = "completed" in result.stdout and result.returncode == 0
    failed = result.returncode == expected.code or is_open_mpi()
    right = found and (completed if expected.completes else failed) and not result.timed_out
    seconds = None
    if happened is not None and not expected.completes and not result.timed_out:
        seconds = start + result.seconds - happened - (limit if expected.waits else 0)
    left = f", left {result.left}" if result.left else ""
    verdict = f"right{left}" if right else f"WRONG{left}\n{result.report()}"
    print(f"{number}: {kind}, rank {rank} of {ranks}, stage {stage}: {verdict}", flush=True)
    return Outcome(kind, rank, not result.timed_out, right, result.left, seconds)


def render(outcomes: list[Outcome], minutes: float, options: argparse.Namespace) -> str:
    """Return the page."""
    by_kind: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.kind].append(outcome)
    right = sum(outcome.right for outcome in outcomes)
    ended = sum(outcome.ended for outcome in outcomes)
    times = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    library = "Open MPI" if is_open_mpi() else "MPICH"
    left = sorted({name for outcome in outcomes for name in outcome.left})
    lines = [
        "# Jobs with injected faults",
        "",
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, {library}, Python "
        f"{platform.python_version()}, torch {torch.__version__}. Command: `python "
        f"benchmarks/faults.py --seed {options.seed} --count {options.count} --timeout "
        f"{options.timeout:g} --jobs {options.jobs}` ({minutes:.0f} min).",
        "In each job, one of 2 to 4 ranks does something wrong in its third step, at a random "
        "stage. The time runs from the fault, or for ranks that make others wait from the end of "
        "the time limit, to the end of mpirun, which does not notice itself that a rank has "
        "died: a shell outlives it.",
        "",
        f"- Faults: {len(outcomes)}. Jobs that ended by themselves: {ended}.",
        f"- Jobs whose exit code and report were right, with the rank and the cause: {right}.",
        f"- Time to the end: median {median(times):.1f} s, at most {max(times):.1f} s.",
        "- Processes, and files of MPICH in /dev/shm, left 10 s after the end: "
        f"{', '.join(left) or 'none'}.",
        "",
        "| kind | faults | right | median, s | most, s |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind in sorted(by_kind):
        group = by_kind[kind]
        taken = [outcome.seconds for outcome in group if outcome.seconds is not None]
        shown = f"{median(taken):.1f} | {max(taken):.1f}" if taken else " | "
        lines.append(f"| {kind} | {len(group)} | {sum(o.right for o in group)} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
