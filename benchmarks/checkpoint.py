"""Benchmark checkpoints of a model with AdamW: mntrain, torch, DeepSpeed, and dd.

    python benchmarks/checkpoint.py [--ranks 1 2 4] [--millions 50] [--repeats 5] [--folder DIR]

Each number of ranks is one job on this machine, in which all methods take turns in changing order.
Every save ends when its data is on the disk of --folder; it is then loaded and removed. Prints
tables, and writes them and all figures to docs/results/. Takes about 10 minutes, and needs 10 GB of
memory with 4 ranks.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import option_types
from emulated import HERE, Nodes, environment_line, facts, folders, table, write

MIB = 2**20


def main() -> int:
    """Measure with every number of ranks, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--ranks", type=option_types.count, nargs="+", default=[1, 2, 4], metavar="N"
    )
    parser.add_argument(
        "--millions",
        type=option_types.positive,
        default=50,
        help="approximate number of parameters",
    )
    parser.add_argument(
        "--repeats", type=option_types.count, default=5, help="rounds after a warm-up"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(
            f"--folder {options.folder} is not a directory: give one on the disk to measure"
        )
    if file_system(options.folder) == "tmpfs":
        parser.error(f"--folder {options.folder} is in memory (tmpfs): give a directory on a disk")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    page = {**facts(), "repeats": options.repeats, "file_system": file_system(options.folder)}
    page["jobs"] = [job_of(ranks, options) for ranks in options.ranks]
    publish(page, "checkpoint", options.output)
    return 0


@dataclass(frozen=True)
class Machine:
    """Ranks on this machine, without emulated nodes."""

    ranks: int

    def mpirun(
        self, command: Sequence[str], *, bin: Path, env: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line and environment, as `Cluster.mpirun` does."""
        path = os.pathsep.join([str(bin), os.environ["PATH"]])
        mpirun = shutil.which("mpirun", path=path) or sys.exit(f"no mpirun in {path}")
        version = subprocess.run([mpirun, "--version"], check=True, capture_output=True, text=True)
        options = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version.stdout else []
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        line = [mpirun, *options, "-n", str(self.ranks), *command]
        return line, {**os.environ, **root, **env, "PATH": path}


def job_of(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods with one number of ranks: every turn, and one row per method."""
    stage, start = 0 if ranks == 1 else 1, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=options.folder.resolve()) as folder:
        arguments = ["--stage", stage, "--millions", options.millions, "--repeats", options.repeats]
        job = Nodes(Machine(ranks), folder).run("checkpoint.py", [*arguments, "--folder", folder])
    print(f"{ranks} ranks: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    dd = [what for what in job["ways"] if what.startswith("dd")]
    disk_s = (
        min(median(job, what, "save_s") for what in dd),
        min(turn["save_s"] for what in dd for turn in measured(job, what)),
    )
    memcpy_s = statistics.median(turn["memcpy_s"] for turn in measured(job))
    rows = [row_of(job, what, disk_s, memcpy_s) for what in job["ways"]]
    return {"ranks": ranks, "stage": stage, "memcpy_s": memcpy_s, "rows": rows, **job}


def measured(job: dict[str, Any], what: str | None = None) -> list[dict[str, Any]]:
    """Return the turns after the warm-up, of one method or of all."""
    return [turn for turn in job["turns"] if turn["round"] and what in (None, turn["what"])]


def median(job: dict[str, Any], what: str, key: str) -> float | None:
    """Return the median over a method's turns; None if it has no such figure."""
    values = [turn[key] for turn in measured(job, what) if turn.get(key) is not None]
    return statistics.median(values) if values else None


def row_of(
    job: dict[str, Any], what: str, disk_s: tuple[float, float], memcpy_s: float
) -> dict[str, Any]:
    """Summarize a method: median times, and peak memory over all rounds including the first."""
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
    """Return the type of the file system that a directory is on."""
    path, mounts = folder.resolve(), {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        mounts[Path(mount.replace("\\040", " "))] = kind
    return next(mounts[parent] for parent in (path, *path.parents) if parent in mounts)


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page as Markdown and JSON."""
    write(folders(output)[0], name, page, report(page))


def report(page: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    jobs = page["jobs"]
    lines = [
        "# Saving and loading checkpoints",
        "",
        f"{environment_line(page, jobs[0]['versions'])}; {page['file_system']}. A transformer of "
        f"{jobs[0]['parameters'] / 1e6:.1f} M parameters in fp32 with AdamW, "
        f"{jobs[0]['state_bytes'] / 1e6:.1f} MB of state; one torch thread per rank; all ranks on "
        f"one machine. Medians of {page['repeats']} rounds after a warm-up round. Command:",
        "",
        f"    {page['command']}",
        "",
        *METHOD,
    ]
    for job in jobs:
        count = f"{job['ranks']} rank{'s' * (job['ranks'] > 1)}"
        copied = job["state_bytes"] / job["memcpy_s"] / 1e9
        lines += ["", f"## {count}, mntrain stage {job['stage']}", ""]
        lines += [*table(["", *COLUMNS], rows(job)), ""]
        lines.append(f"A memcpy of the state takes {job['memcpy_s']:.3f} s, {copied:.1f} GB/s.")
        lines += ["", *(f"- {what}: {words}." for what, words in job["ways"].items())]
        lines += [f"- {what} is not available: {why}." for what, why in job["absent"].items()]
    return "\n".join(lines) + "\n"


COLUMNS = (
    "save, s (min to max)",
    "fraction of disk speed (fastest)",
    "pause, s",
    "× memcpy",  # noqa: RUF001 - a multiplication sign
    "load warm, s",
    "load cold, s",
    "memory of a rank (of all), MiB",
    "written, MB",
)
METHOD = [
    "All methods take turns in one job, in changing order. Before each turn, the files of the "
    "previous one are removed, also from the disk. A save ends when its files are on the disk and "
    "the last rank has finished. The disk's speed is that of dd, which writes as many bytes of "
    "zeros, with one process per rank or with one process, whichever is faster. Fractions are of "
    "times: of medians and, in parentheses, of the fastest saves, which other load disturbs least. "
    "Bytes that a method writes in addition to the state do not count in its favor.",
    "",
    "The pause is how long training waits. For mntrain in the background it is the time of "
    "begin(), plus the time of advance(), which is called when it need not wait; for async_save "
    "the time of the call; for all others the whole save. The memcpy copies the same bytes into "
    "existing memory, each rank its part at the same time.",
    "",
    "Loads are warm (all files in the page cache) or cold (after posix_fadvise(DONTNEED), verified "
    "by mincore; a hypervisor may still have them cached). mntrain's load verifies the checksum of "
    "every byte; torch.load accepted a file with a flipped bit. The loaded state is compared with "
    "the saved one.",
    "",
    "Memory is the peak during a save above the rank's memory before: of the rank with the highest "
    "peak, and of all ranks, with shared pages counted in part. It is the highest of all rounds, "
    "so memory that is kept for the next save counts.",
]


def rows(job: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of each method."""
    for row in job["rows"]:
        low, high = row["save_range_s"]
        cells = [row["what"], f"{row['save_s']:.2f} ({low:.2f} to {high:.2f})"]
        cells.append("{:.2f} ({:.2f})".format(*row["of_disk"]))
        pause = formatted(row["pause_s"], ".3f")
        if row["later_s"] is not None:
            pause += f" + {row['later_s']:.3f}"
        cells += [pause, formatted(row["to_memcpy"], ".1f")]
        cells += [formatted(row[key], ".2f") for key in ("warm_s", "cold_s")]
        memory = [row[key] for key in ("peak_bytes", "peak_bytes_of_all")]
        cells.append("" if None in memory else "{:.0f} ({:.0f})".format(*(m / MIB for m in memory)))
        cells.append(formatted(row["file_bytes"], ".1f", 1e6))
        yield cells


def formatted(value: float | None, spec: str, unit: float = 1) -> str:
    """Format a figure; empty if there is none."""
    return "" if value is None else format(value / unit, spec)


if __name__ == "__main__":
    sys.exit(main())
