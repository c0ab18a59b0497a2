"""Save and load a model with AdamW: this project beside torch's ways, DeepSpeed's, and dd.

    python benchmarks/checkpoint.py [--ranks 1 2 4] [--millions 50] [--repeats 5] [--folder DIR]

Each number of ranks is one job on this machine, in which all ways take turns, in an order that
changes: noise falls on all alike. Every save ends with what it wrote safe on the disk of --folder,
is loaded again, and is removed. Prints tables, and writes them and every figure to docs/results/.
Takes about 10 minutes, and 10 GB of memory at 4 ranks.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import values
from emulated import HERE, Nodes, facts, folders, imprint, write

MIB = 2**20


def main() -> int:
    """Measure at every number of ranks, and write what came out."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--ranks", type=values.count, nargs="+", default=[1, 2, 4], metavar="N")
    options.add_argument(
        "--millions", type=values.positive, default=50, help="of parameters, about"
    )
    options.add_argument(
        "--repeats", type=values.count, default=5, help="rounds, after 1 that warms up"
    )
    options.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    options.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    given = options.parse_args()
    if not given.folder.is_dir():
        options.error(f"--folder {given.folder} is no folder: give one on the disk to measure")
    if file_system(given.folder) == "tmpfs":
        options.error(f"--folder {given.folder} is in memory (tmpfs): give one on a disk")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    results, _ = folders(given.output)
    page = {**facts(), "repeats": given.repeats, "file_system": file_system(given.folder)}
    page["jobs"] = [job_of(ranks, given) for ranks in given.ranks]
    write(results, "checkpoint", page, report(page))
    return 0


@dataclass(frozen=True)
class Machine:
    """So many ranks on this machine as it is, in place of emulated nodes."""

    ranks: int

    def mpirun(
        self, command: Sequence[str], *, bin: Path, env: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """As `Cluster.mpirun`."""
        path = os.pathsep.join([str(bin), os.environ["PATH"]])
        mpirun = shutil.which("mpirun", path=path) or sys.exit(f"no mpirun in {path}")
        said = subprocess.run([mpirun, "--version"], check=True, capture_output=True, text=True)
        options = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in said.stdout else []
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        line = [mpirun, *options, "-n", str(self.ranks), *command]
        return line, {**os.environ, **root, **env, "PATH": path}


def job_of(ranks: int, given: argparse.Namespace) -> dict[str, Any]:
    """All ways at one number of ranks: every turn, and a row a way."""
    stage, start = 0 if ranks == 1 else 1, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=given.folder.resolve()) as folder:
        arguments = ["--stage", stage, "--millions", given.millions, "--repeats", given.repeats]
        job = Nodes(Machine(ranks), folder).run("checkpoint.py", [*arguments, "--folder", folder])
    print(f"{ranks} ranks: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    plain = [what for what in job["ways"] if what.startswith("dd")]
    disk_s = (
        min(median(job, what, "save_s") for what in plain),
        min(turn["save_s"] for what in plain for turn in measured(job, what)),
    )
    memcpy_s = statistics.median(turn["memcpy_s"] for turn in measured(job))
    rows = [row_of(job, what, disk_s, memcpy_s) for what in job["ways"]]
    return {"ranks": ranks, "stage": stage, "memcpy_s": memcpy_s, "rows": rows, **job}


def measured(job: dict[str, Any], what: str | None = None) -> list[dict[str, Any]]:
    """The turns after the warm-up, of one way or of all."""
    return [turn for turn in job["turns"] if turn["round"] and what in (None, turn["what"])]


def median(job: dict[str, Any], what: str, key: str) -> float | None:
    """Of a way's turns; None where it has no such figure."""
    found = [turn[key] for turn in measured(job, what) if turn.get(key) is not None]
    return statistics.median(found) if found else None


def row_of(
    job: dict[str, Any], what: str, disk_s: tuple[float, float], memcpy_s: float
) -> dict[str, Any]:
    """One way over all rounds: medians of time; of memory the most, the first round included."""
    keys = ("save_s", "pause_s", "later_s", "warm_s", "cold_s", "file_bytes")
    row: dict[str, Any] = {"what": what, **{key: median(job, what, key) for key in keys}}
    saves = [turn["save_s"] for turn in measured(job, what)]
    row |= {
        "save_range_s": [min(saves), max(saves)],
        "of_disk": [disk_s[0] / row["save_s"], disk_s[1] / min(saves)],
    }
    peaks = [
        turn["peak_bytes"] for turn in job["turns"] if turn["what"] == what and "peak_bytes" in turn
    ]
    row["peak_bytes"] = max(map(max, peaks)) if peaks else None
    row["peak_bytes_of_all"] = max(map(sum, peaks)) if peaks else None
    row["to_memcpy"] = row["pause_s"] / memcpy_s if row["pause_s"] is not None else None
    return row


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on."""
    place, found = folder.resolve(), {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        found[Path(mount.replace("\\040", " "))] = kind
    return next(found[one] for one in (place, *place.parents) if one in found)


def report(page: dict[str, Any]) -> str:
    """The results as a page of Markdown."""
    jobs = page["jobs"]
    lines = [
        "# Checkpoints: save and load",
        "",
        f"{imprint(page, jobs[0]['versions'])}; {page['file_system']}. A transformer of "
        f"{jobs[0]['parameters'] / 1e6:.1f} M parameters in fp32 with AdamW, "
        f"{jobs[0]['state_bytes'] / 1e6:.1f} MB of state; one thread a rank for torch; all ranks "
        f"on one machine. Medians of {page['repeats']} rounds, after one that warms up; by:",
        "",
        f"    {page['command']}",
        "",
        *METHOD,
    ]
    for job in jobs:
        count = f"{job['ranks']} rank{'s' * (job['ranks'] > 1)}"
        copied = job["state_bytes"] / job["memcpy_s"] / 1e9
        lines += ["", f"## {count}, mntrain's stage {job['stage']}", "", *table(job), ""]
        lines.append(f"The memcpy takes {job['memcpy_s']:.3f} s, {copied:.1f} GB/s.")
        lines += ["", *(f"- {what}: {words}." for what, words in job["ways"].items())]
        lines += [f"- {what} is absent: {why}." for what, why in job["absent"].items()]
    return "\n".join(lines) + "\n"


METHOD = [
    "All ways take turns in one job, in an order that changes; before each, what the one before "
    "has left is removed, and that is on the disk. A save is over when its files are safe on the "
    "disk, and lasts until the last rank is done. The disk's rate is that of dd, of zeros, as many "
    "bytes as the state has: of as many at once as ranks, or of one, whichever is faster. Shares "
    "are of time, of medians and in parentheses of the fastest saves, which other load hinders "
    "least: what a way writes besides the state does not count for it.",
    "",
    "The pause is how long training waits: of mntrain beside training until begin() returns, and "
    "after the plus sign in advance(), which comes when it need not wait; of async_save until it "
    "returns; of others all of it. The memcpy is of as much, every rank its part at the same time, "
    "into memory that exists.",
    "",
    "Loads are warm, with all files in the page cache, or cold, after posix_fadvise(DONTNEED) and "
    "a look whether it worked; a machine beneath this one may still have them. mntrain's load "
    "includes the comparison of every byte with its checksum; torch.load took a file in which a "
    "bit was flipped. What is loaded is compared with what was saved.",
    "",
    "Memory is what a save takes at its peak above what the rank had before: of the rank that "
    "takes most, and of all, shared memory in part; the most of all rounds, so that what stays for "
    "the next save counts.",
]


def table(job: dict[str, Any]) -> list[str]:
    """Lines of Markdown: a row a way."""
    lines = [
        "| | save, s (least to most) | of the disk's rate (fastest) | pause, s | to the memcpy "
        "| load warm, s | load cold, s | memory of a rank (of all), MiB | written, MB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in job["rows"]:
        low, high = row["save_range_s"]
        cells = [row["what"], f"{row['save_s']:.2f} ({low:.2f} to {high:.2f})"]
        cells.append("{:.2f} ({:.2f})".format(*row["of_disk"]))
        pause = form(row["pause_s"], ".3f")
        if row["later_s"] is not None:
            pause += f" + {row['later_s']:.3f}"
        cells += [pause, form(row["to_memcpy"], ".1f")]
        cells += [form(row[key], ".2f") for key in ("warm_s", "cold_s")]
        memory = [row[key] for key in ("peak_bytes", "peak_bytes_of_all")]
        cells.append("" if None in memory else "{:.0f} ({:.0f})".format(*(m / MIB for m in memory)))
        cells.append(form(row["file_bytes"], ".1f", 1e6))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def form(value: float | None, how: str, unit: float = 1) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else format(value / unit, how)


if __name__ == "__main__":
    sys.exit(main())
