"""Compare the speed of two checkouts on this machine, in turns: all-reduce and the training step.

    sudo python benchmarks/compare_checkouts.py OLD NEW [--rounds 5] [--layout 2,2] [--link 1gbit]

OLD and NEW are directories of checkouts. Each job runs the rank scripts and packages of its
checkout. A round runs every job with both checkouts, one right after the other, in an order that
alternates between rounds. Prints a table, and writes it and all figures to docs/results/. Takes
about 3 minutes per round.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import option_types
from collectives import ms, size_label
from emulated import HERE, Layout, facts, folders, heading, need_nodes, nodes, table, write

VARIANTS = ("mntrain stage 0", "mntrain stage 1", "mntrain stage 2", "mntrain stage 0, bf16 wire")
CANDIDATE = "mntrain lanes"
MIB = (4 / 1024, 64 / 1024, 1, 16, 64)


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=option_types.count, default=5)
    parser.add_argument("--layout", type=option_types.layout, default="2,2", metavar="N,N")
    parser.add_argument("--link", type=option_types.rate, default="1gbit")
    parser.add_argument("--steps", type=option_types.count, default=3, help="per turn of a job")
    parser.add_argument("--turns", type=option_types.count, default=3, help="turns per job")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--mib", nargs="*", type=option_types.positive, default=MIB)
    parser.add_argument("--case-s", type=option_types.positive, default=3, help="per size")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    need_nodes()
    layout = Layout.of(options.layout, options.link)
    checkouts = {"old": options.old.resolve(), "new": options.new.resolve()}
    page = {
        **facts(),
        "layout": str(layout),
        "rounds": options.rounds,
        "commits": {name: commit_of(path) for name, path in checkouts.items()},
        "jobs": [],
    }
    for number in range(options.rounds):
        for job in jobs_of(layout, options):
            for name in ("new", "old") if number % 2 else ("old", "new"):
                with nodes(layout) as running:
                    result = running.run(job[0], job[1:], checkout=checkouts[name])
                page["jobs"].append({"round": number, "checkout": name, **result})
                print(f"round {number}: {name}: {' '.join(map(str, job))}", file=sys.stderr)
    publish(page, "refactor", options.output)
    return 0


def jobs_of(layout: Layout, options: argparse.Namespace) -> list[list[object]]:
    """Return the script and the arguments of each job of a round."""
    jobs: list[list[object]] = []
    if options.mib:
        words = ["--verbs", "all_reduce", "--case-s", options.case_s, "--mib", *options.mib]
        jobs.append(["collectives.py", *words])
    for variant in options.variants:
        if layout.link or "wire" not in variant:
            sizes = ["--steps", options.steps, "--turns", options.turns]
            jobs.append(["step.py", "--what", variant, *sizes])
    return jobs


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, marked if it has local changes."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def figures_of(job: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return the time in seconds of each case of a job, and its multiple of compute only."""
    if "rows" in job:
        return {
            f"all-reduce, {size_label(row['mib'])}": (row["median_s"], None)
            for row in job["rows"]
            if row["what"] == CANDIDATE
        }
    ratios = [step / alone for step, alone in zip(job["step_s"], job["alone_s"], strict=True)]
    return {f"step, {job['what']}": (statistics.median(job["step_s"]), statistics.median(ratios))}


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page as Markdown and JSON."""
    write(folders(output)[0], name, page, report(page))


def report(page: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    commits = page["commits"]
    title = f"Old and new code compared, {page['layout']}"
    about = f"Old: {commits['old']}; new: {commits['new']}."
    lines = [
        *heading(page, title, page["jobs"][0]["versions"], about),
        f"Rounds: {page['rounds']}. In each round, every job runs with both checkouts, one right "
        "after the other. Times are medians over the rounds, in milliseconds. A step is compared "
        "by its multiple of compute only, which alternates with it in the same job; an all-reduce "
        "(lanes, fp32) by its time. new / old is the median of the ratios within a round, with the "
        "minimum and the maximum.",
        "",
    ]
    head = ["", "old, ms", "new, ms", "old, × compute only", "new, × compute only"]  # noqa: RUF001
    rows = []
    cases: dict[str, dict[str, list[tuple[float, float | None]]]] = {}
    for job in page["jobs"]:
        for case, figure in figures_of(job).items():
            cases.setdefault(case, {"old": [], "new": []})[job["checkout"]].append(figure)
    for case, found in cases.items():
        cells = [
            ms(statistics.median(seconds for seconds, _ in found[name])) for name in ("old", "new")
        ]
        for name in ("old", "new"):
            ratios = [ratio for _, ratio in found[name] if ratio is not None]
            cells.append(f"{statistics.median(ratios):.3f}" if ratios else "")
        ratios = [
            (new[1] or new[0]) / (old[1] or old[0])
            for old, new in zip(found["old"], found["new"], strict=True)
        ]
        cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.2f} - {max(ratios):.2f})")
        rows.append([case, *cells])
    return "\n".join([*lines, *table([*head, "new / old (min - max)"], rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
