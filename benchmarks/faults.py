"""Inject faults into jobs, and count those whose report names the right rank and cause.

    python benchmarks/faults.py [--seed 0] [--count 100] [--part 1/1] [--timeout 6] [--jobs 3]

Jobs have 2 to 4 ranks, at a random stage, on one node or on two emulated ones. Most train a small
model, and one rank does something wrong in its third step; others start wrongly, or lose a node or
a network (tests/chaos/kinds.py has the kinds and what must be said of each). A job is right if it
ends by itself, with an exit code that is not 0 unless it can go on, and its report names the rank
and the cause. The time to the end runs from the fault, or for faults that make other ranks wait,
from the end of their time limit, to the end of mpirun (of a lost node: to the report). A shell
outlives each rank that dies: mpirun would otherwise kill the others, often before they have
reported a rank that was killed. Several jobs at a time share the machine. The benchmark also looks
for processes and shared memory that jobs leave. With `--part 2/2` it runs every second fault, for
example with another MPI library. Writes docs/results/faults.md, or faults-openmpi.md.
"""

import argparse
import os
import platform
import random
import re
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import median

import option_types
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("", "helpers", "cluster")]
from chaos.injection import Fault, Outcome, inject  # noqa: E402
from chaos.kinds import KINDS, NAMES  # noqa: E402
from launch import is_open_mpi  # noqa: E402
from nodes import available  # noqa: E402


def main() -> int:
    """Run the jobs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=option_types.count, default=100)
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="of the faults")
    parser.add_argument("--timeout", type=option_types.positive, default=6.0, help="seconds")
    parser.add_argument("--jobs", type=option_types.count, default=3, help="at a time")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results", metavar="DIR")
    options = parser.parse_args()
    first, parts = options.part
    faults = list(draw(options.seed, options.count))[first - 1 :: parts]
    start = time.monotonic()

    def run(fault: Fault) -> Outcome:
        outcome = inject(fault, options.timeout)
        left = f", left {outcome.result.left}" if outcome.result.left else ""
        print(f"{fault}: {'right' if outcome.right else 'WRONG'}{left}", flush=True)
        if not outcome.right:
            print(outcome.result.report(), flush=True)
        return outcome

    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(run, faults))
    page = render(outcomes, (time.monotonic() - start) / 60, options)
    (options.output / f"faults{'-openmpi' * is_open_mpi()}.md").write_text(page)
    print(page)
    return 0


def part(text: str) -> tuple[int, int]:
    """Return the numbers of a part such as 1/2."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    first, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= parts:
        raise argparse.ArgumentTypeError(f"{text}: give a part such as 1/2")
    return first, parts


def draw(seed: int, count: int) -> list[Fault]:
    """Draw faults, each by itself: one of a kind that cannot be had here changes no other one."""
    faults = []
    for number in range(count):
        source = random.Random(f"{seed}/{number}")
        kind = next(name for _ in iter(int, 1) if (name := source.choice(NAMES)) in KINDS)
        ranks = min(source.randint(2, 4), KINDS[kind].most)
        rank, stage, on_nodes = source.randrange(ranks), source.randrange(3), source.random() < 0.25
        on_nodes &= available() is None and KINDS[kind].moves
        faults.append(Fault(kind, rank, ranks, stage, on_nodes))
    return faults


def render(outcomes: list[Outcome], minutes: float, options: argparse.Namespace) -> str:
    """Return the page."""
    by_kind: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.fault.kind].append(outcome)
    right = sum(outcome.right for outcome in outcomes)
    ended = sum(outcome.ended for outcome in outcomes)
    times = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    library = "Open MPI" if is_open_mpi() else "MPICH"
    left = sorted({name for outcome in outcomes for name in outcome.result.left})
    on_nodes = sum(
        outcome.fault.on_nodes or KINDS[outcome.fault.kind].nodes for outcome in outcomes
    )
    lines = [
        "# Jobs with injected faults",
        "",
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, {library}, Python "
        f"{platform.python_version()}, torch {torch.__version__}. Command: `python "
        f"benchmarks/faults.py --seed {options.seed} --count {options.count} --part "
        f"{options.part[0]}/{options.part[1]} --timeout {options.timeout:g} --jobs {options.jobs}` "
        f"({minutes:.0f} min).",
        "Jobs have 2 to 4 ranks, at a random stage; most faults are in the third step of one rank. "
        "The time runs from the fault, or for ranks that make others wait from the end of the time "
        "limit, to the end of mpirun, which does not notice itself that a rank has died: a shell "
        "outlives it. For a lost node or network, which are found 20 s later, it runs to the "
        "report.",
        "",
        f"- Faults: {len(outcomes)}, of which {on_nodes} on two emulated nodes. Jobs that ended by "
        f"themselves: {ended}.",
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
