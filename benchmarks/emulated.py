"""Benchmark jobs, on emulated nodes and on this machine."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import HERE

sys.path[:0] = [str(HERE.parent / "tests" / name) for name in ("cluster", "helpers")]
from launch import OPEN_MPI_ENVIRONMENT, is_open_mpi, mpirun_words  # noqa: E402
from nodes import Cluster, available  # noqa: E402

# Payload of 1 Gbit/s, as tc counts it, without Ethernet, IP and TCP headers.
PAYLOAD_BYTES_PER_GBIT = 119e6
LIMIT_S, RUN_S = 900, 3600  # for one job, and for a whole run
# glibc's own thresholds after a program has freed a block of 32 MiB. Before that, glibc returns
# memory to the kernel in every step and takes it back page by page, so that the same computation
# would be faster or slower depending on what else its process has freed.
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
MARK = "RESULT "  # a rank script prints this and then its result as JSON


@dataclass(frozen=True)
class Layout:
    """The number of ranks on each node, and the rate of each node's link (None on one node)."""

    ranks: tuple[int, ...]
    link: str | None

    @classmethod
    def of(cls, text: str, link: str) -> "Layout":
        """Parse "2,2": two nodes of two ranks; ends this program if that or the link is wrong."""
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
            sys.exit(f"layout {text!r}: give the ranks of each node, such as 2,2")
        if not re.fullmatch(r"(0\.\d*[1-9]|[1-9]\d*)gbit", link):
            sys.exit(f"link {link!r}: give a rate in gbit, such as 1gbit")
        ranks = tuple(int(number) for number in text.split(","))
        return cls(ranks, link if len(ranks) > 1 else None)

    @property
    def name(self) -> str:
        """The name for files: 2+2."""
        return "+".join(map(str, self.ranks))

    @property
    def bytes_per_s(self) -> float | None:
        """The payload rate of a link in each direction; None without a network."""
        return float(self.link.removesuffix("gbit")) * PAYLOAD_BYTES_PER_GBIT if self.link else None

    def __str__(self) -> str:
        count = sum(self.ranks)
        if len(self.ranks) == 1:
            return f"{count} rank{'s' * (count > 1)} on one node"
        same = len(set(self.ranks)) == 1
        each = self.ranks[0] if same else " + ".join(map(str, self.ranks))
        return f"{count} ranks on {len(self.ranks)} nodes of {each}, links of {self.link}"


@dataclass(frozen=True)
class Nodes:
    """Running emulated nodes, for one job after the other."""

    cluster: Cluster
    cache: str

    def run(
        self,
        script: str,
        arguments: Sequence[object],
        python: Path = Path(sys.executable),
        checkout: Path = HERE.parent,
    ) -> dict[str, Any]:
        """Run a script of a checkout's benchmarks/ranks under `python` and its mpirun.

        Returns the result that the script reports. Exits with the output of the ranks if they fail
        or exceed LIMIT_S.
        """
        path = checkout / "benchmarks" / "ranks" / script
        command = [str(python), str(path), *map(str, arguments)]
        settings = {"XDG_CACHE_HOME": self.cache, "PYTHONPATH": str(checkout), **HEAP}
        line, environment = self.cluster.mpirun(command, bin=python.parent, env=settings)
        return report_in(output_of(line, environment, LIMIT_S))


@contextmanager
def nodes(layout: Layout) -> Iterator[Nodes]:
    """Start the nodes of a layout, with an empty cache. Ends this program if it cannot.

    SIGTERM and SIGHUP become exits, which stop the nodes.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if reason := available():
        sys.exit(f"{Path(sys.argv[0]).name}: cannot emulate nodes here: {reason}")
    with tempfile.TemporaryDirectory() as cache, Cluster(layout.ranks, layout.link) as cluster:
        yield Nodes(cluster, cache)


def on_ranks(
    ranks: int,
    command: Sequence[object],
    env: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> str:
    """Run `python` with these words on ranks of this machine, and return their output."""
    own = OPEN_MPI_ENVIRONMENT if is_open_mpi() else {}
    environment = {**os.environ, **own, "PYTHONPATH": str(HERE.parent), **HEAP, **(env or {})}
    words = [*mpirun_words(ranks), sys.executable, *map(str, command)]
    return output_of(words, environment, limit_s)


def trained(command: str, env: Mapping[str, str] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Run `mpirun -n N python ...` once; return the metrics of its steps and its summary."""
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(int(words[2]), [*words[4:], "--run.dir", folder], env, RUN_S)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        return list(map(json.loads, lines)), json.loads(Path(folder, "summary.json").read_text())


def report_in(text: str) -> dict[str, Any]:
    """Return the result in the output of a rank script; exits if there is none."""
    for line in text.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    sys.exit(f"{text}\nthe job printed no result")


def output_of(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Run a job and return its output. The job never outlives this call.

    Exits with the job's output if it fails or exceeds the time limit.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        sys.exit(f"{shlex.join(command)} took longer than {limit_s:g} s")
    finally:
        if process.poll() is None:  # mpirun gets time to remove its temporary files
            process.terminate()
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode:
        sys.exit(f"{out}{err}{shlex.join(command)}: code {process.returncode}")
    return out
