"""Compare the speed of two checkouts on this machine, in turns: all-reduce and the training step.

    sudo python benchmarks/compare_checkouts.py OLD NEW [--rounds 5] [--layout 2,2] [--link 1gbit]

OLD and NEW are directories of checkouts. Each job runs the rank scripts and packages of its
checkout. A round runs every job with both checkouts, one right after the other, in an order that
alternates between rounds. Prints a table, and writes it and all figures to results/ in the folder
of `--output`, if it is given. Takes about 3 minutes per round.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from emulated import Layout, nodes
from results import TIMES, facts, heading, ms, ratios, save, size_label, spread, table, write

STAGES = tuple(f"mntrain stage {stage}" for stage in (0, 1, 2))
VARIANTS = (*STAGES, "mntrain stage 0, bf16 wire")
MIB = (4 / 1024, 64 / 1024, 1, 16, 64)
ABOUT = (
    "In each round, every job runs with both checkouts, one right after the other. Times are "
    "medians over the rounds, in milliseconds. A step is compared by its multiple of compute only, "
    "which alternates with it in the same job; an all-reduce (lanes, fp32) by its time. new / old "
    "is the median of the ratios within a round, with the minimum and the maximum."
)


def main() -> int:
    """Measure, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", default="2,2", metavar="N,N")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--steps", type=int, default=3, help="per turn of a job")
    parser.add_argument("--turns", type=int, default=3, help="turns per job")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--mib", nargs="*", type=float, default=MIB)
    parser.add_argument("--case-s", type=float, default=3, help="per size")
    parser.add_argument("--output", type=Path, metavar="DIR")
    options = parser.parse_args()
    layout, jobs = Layout.of(options.layout, options.link), []
    if options.mib:
        words = ["--verbs", "all_reduce", "--case-s", options.case_s, "--mib", *options.mib]
        jobs.append(["collectives.py", *words])
    sizes = ["--steps", options.steps, "--turns", options.turns]
    variants = [name for name in options.variants if layout.link or "wire" not in name]
    jobs += [["step.py", "--what", variant, *sizes] for variant in variants]
    checkouts = {"old": options.old.resolve(), "new": options.new.resolve()}
    page = {**facts(), "commits": {name: commit_of(path) for name, path in checkouts.items()}}
    cases: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number in range(options.rounds):
        for job in jobs:
            for name in ("new", "old") if number % 2 else ("old", "new"):
                with nodes(layout) as running:
                    found = running.run(job[0], job[1:], checkout=checkouts[name])
                for case, figures in figures_of(found).items():
                    cases.setdefault(case, {"old": [], "new": []})[name].append(figures)
                versions = found["versions"]
                print(f"round {number}: {name}: {' '.join(map(str, job))}", file=sys.stderr)
    about = "Old: {old}; new: {new}.".format(**page["commits"])
    title = f"Old and new code compared, {layout}"
    head = ["", "old, ms", "new, ms", f"old, {TIMES}", f"new, {TIMES}", "new / old"]
    lines = heading(page, title, versions, f"{about} Rounds: {options.rounds}. {ABOUT}")
    lines += table(head, [row_of(case, **found) for case, found in cases.items()])
    if options.output:
        save(options.output, "compared", {**page, "cases": cases})
        write(options.output, "compared", lines)
    else:
        print("\n".join(lines))
    return 0


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, marked if it has local changes."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def figures_of(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the time in seconds of each case of a job, and of steps the multiple of computing."""
    if "rows" in job:
        lanes = (row for row in job["rows"] if row["what"] == "mntrain lanes")
        return {f"all-reduce, {size_label(it['mib'])}": {"s": it["median_s"]} for it in lanes}
    multiple = median(ratios(job["step_s"], job["alone_s"]))
    return {f"step, {job['what']}": {"s": median(job["step_s"]), "multiple": multiple}}


def row_of(case: str, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """Return the row of a case, of which both have a figure for each round."""
    times = [ms(median(it["s"] for it in each)) for each in (old, new)]
    key, multiples = "s", ["", ""]
    if "multiple" in old[0]:
        key = "multiple"
        multiples = [f"{median(it[key] for it in each):.3f}" for each in (old, new)]
    both = ratios((it[key] for it in new), (it[key] for it in old))
    return [case, *times, *multiples, spread(both, 3)]


if __name__ == "__main__":
    sys.exit(main())
