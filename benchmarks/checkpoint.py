"""Benchmark checkpoints of a model with AdamW: mntrain, torch, and dd.

    python benchmarks/checkpoint.py [--ranks 1 2 4] [--millions 50] [--repeats 5] [--folder DIR]

Each number of ranks is one job on this machine, in which all methods take turns in changing order.
Every save ends when its data is on the disk of --folder; it is then removed. Prints
tables, and writes them to docs/results/. Takes about 10 minutes, and needs 10 GB of memory with 4
ranks.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from emulated import on_ranks, report_in
from results import DOCS, HERE, facts, heading, spread, table, write

COLUMNS = ("save, s", "fraction of disk speed", "pause, s", "written, MB")
METHOD = (
    "All methods take turns in one job, in changing order; medians (least to most) of the rounds "
    "after a warm-up. A save ends when its files are on the disk and the last rank has finished. "
    "The disk's speed is that of dd, which writes as many zeros, with one process or with one per "
    "rank, whichever is faster. The pause is how long training waits: for saves in the background, "
    "the time of the call, plus that of later calls, made when they need not wait."
)


def main() -> int:
    """Measure with every number of ranks, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--millions", type=float, default=50, help="approximate parameters")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after a warm-up")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    kind = file_system(options.folder)
    if kind == "tmpfs":
        parser.error(f"--folder {options.folder} is in memory (tmpfs): give a directory on a disk")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    page = {**facts(), "repeats": options.repeats, "file_system": kind}
    page["jobs"] = [job_of(ranks, options) for ranks in options.ranks]
    publish(page, "checkpoint", options.output)
    return 0


def job_of(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods with one number of ranks, in every turn."""
    stage = 0 if ranks == 1 else 1
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=options.folder.resolve()) as folder:
        words = ["--stage", stage, "--millions", options.millions, "--repeats", options.repeats]
        command = [HERE / "ranks" / "checkpoint.py", *words, "--folder", folder]
        job = report_in(on_ranks(ranks, command))
    return {"ranks": ranks, "stage": stage, **job}


def file_system(folder: Path) -> str:
    """Return the type of the file system that a directory is on."""
    path, mounts = folder.resolve(strict=True), {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        mounts[Path(mount.replace("\\040", " "))] = kind
    return next(mounts[parent] for parent in (path, *path.parents) if parent in mounts)


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    jobs = page["jobs"]
    about = (
        f"A transformer of {jobs[0]['parameters'] / 1e6:.1f} M parameters in fp32 with AdamW, "
        f"{jobs[0]['state_bytes'] / 1e6:.1f} MB of state, on {page['file_system']}; one torch "
        f"thread per rank; all ranks on one machine; {page['repeats']} rounds."
    )
    lines = heading(page, "Saving and loading checkpoints", jobs[0]["versions"], about)
    lines.append(METHOD)
    for job in jobs:
        count = f"{job['ranks']} rank{'s' * (job['ranks'] > 1)}"
        disk_s = min(median(of(job, what, "save_s")) for what in job["ways"] if what[:2] == "dd")
        rows = [[what, *cells(job, what, disk_s)] for what in job["ways"]]
        lines += ["", f"## {count}, mntrain stage {job['stage']}", "", *table(["", *COLUMNS], rows)]
        lines += ["", *(f"- {what}: {words}." for what, words in job["ways"].items())]
    write(output, name, lines)


def of(job: dict[str, Any], what: str, key: str) -> list[Any]:
    """Return a figure of a method in the turns after the warm-up."""
    turns = (turn for turn in job["turns"] if turn["round"] and turn["what"] == what)
    return [turn[key] for turn in turns if turn.get(key) is not None]


def cells(job: dict[str, Any], what: str, disk_s: float) -> list[str]:
    """Return the cells of a method."""
    saves = of(job, what, "save_s")
    first = [spread(saves), f"{disk_s / median(saves):.2f}"]
    if what.startswith("dd"):
        return [*first, "", ""]
    pause = f"{median(of(job, what, 'pause_s')):.3f}"
    if later := of(job, what, "later_s"):
        pause += f" + {median(later):.3f}"
    return [*first, pause, f"{median(of(job, what, 'file_bytes')) / 1e6:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
