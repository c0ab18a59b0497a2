"""Benchmark jobs on emulated nodes, and the files that hold their results."""

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "cluster"))
from nodes import Cluster, available  # noqa: E402

# Payload of 1 Gbit/s, as tc counts it, without Ethernet, IP and TCP headers.
PAYLOAD_BYTES_PER_GBIT = 119e6
LIMIT_S = 900  # for one job
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
        """Parse "2,2": two nodes of two ranks."""
        ranks = tuple(int(number) for number in text.split(","))
        return cls(ranks, link if len(ranks) > 1 else None)

    @property
    def name(self) -> str:
        """The name for files: 2+2."""
        return "+".join(map(str, self.ranks))

    @property
    def bytes_per_s(self) -> float | None:
        """The payload rate of a link in each direction; None without a network."""
        if self.link is None:
            return None
        return float(self.link.removesuffix("gbit")) * PAYLOAD_BYTES_PER_GBIT

    def __str__(self) -> str:
        if len(self.ranks) == 1:
            return f"{sum(self.ranks)} rank{'s' * (sum(self.ranks) > 1)} on one node"
        each = " + ".join(map(str, self.ranks))
        if len(set(self.ranks)) == 1:
            each = str(self.ranks[0])
        return f"{sum(self.ranks)} ranks on {len(self.ranks)} nodes of {each}, links of {self.link}"


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
        return parse_report(self.output(command, python, checkout), command)

    def output(
        self,
        command: Sequence[str],
        python: Path = Path(sys.executable),
        checkout: Path = HERE.parent,
    ) -> str:
        """Run a command under mpirun, with a checkout's packages, and return its output."""
        environment = {"XDG_CACHE_HOME": self.cache, "PYTHONPATH": str(checkout), **HEAP}
        line, environment = self.cluster.mpirun(command, bin=python.parent, env=environment)
        return output_of(line, environment, LIMIT_S)


def parse_report(text: str, command: Sequence[str]) -> dict[str, Any]:
    """Return the result in the output of a rank script; exits if there is none."""
    for line in text.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    sys.exit(f"{shlex.join(command)} printed no result")


def output_of(command: Sequence[str], environment: dict[str, str], limit_s: float) -> str:
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
        _stop(process)
    if process.returncode:
        sys.exit(f"{out}{err}{shlex.join(command)}: code {process.returncode}")
    return out


def here() -> dict[str, str]:
    """Return the environment in which `python` and `mpirun` are those of this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(HERE.parent), **HEAP}


def _stop(process: subprocess.Popen[str]) -> None:
    """Terminate mpirun, and give it time to remove its temporary files."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def nodes(layout: Layout) -> Iterator[Nodes]:
    """Start the nodes of a layout, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache, Cluster(layout.ranks, layout.link) as cluster:
        yield Nodes(cluster, cache)


def need_nodes() -> None:
    """Exit with the reason if nodes cannot be emulated here.

    Also turns SIGTERM and SIGHUP into exits, which stop running nodes.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if reason := available():
        sys.exit(f"{Path(sys.argv[0]).name}: cannot emulate nodes here: {reason}")


def facts() -> dict[str, Any]:
    """Return the date, the machine, its load, and the command.

    Call it before the jobs: the load then tells whether the machine was idle. Other work slows
    candidates that poll more than candidates that sleep, so it may change their order.
    """
    return {
        "load": os.getloadavg()[0],
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def environment_line(facts: dict[str, Any], versions: dict[str, str]) -> str:
    """Return one line with date, machine, load and versions."""
    machine = f"{facts['machine']}, load before: {facts['load']:.1f}"
    return f"{facts['date']}; {machine}; " + ", ".join(
        f"{name} {number}" for name, number in versions.items()
    )


def heading(page: dict[str, Any], title: str, versions: dict[str, str], about: str) -> list[str]:
    """Return the first lines of a page: its title, what was measured where, and the command."""
    line = f"{environment_line(page, versions)}. {about} Command:"
    return [f"# {title}", "", line, "", f"    {page['command']}", ""]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> list[str]:
    """Return a Markdown table: its first columns are `texts`, the others numbers."""
    rule = "|---" * texts + "|--:" * (len(head) - texts) + "|"
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, rule, *others]


def folders(output: Path) -> tuple[Path, Path]:
    """Return the directories of pages and figures; create them if necessary."""
    results, images = output / "results", output / "img"
    for folder in (results, images):
        folder.mkdir(parents=True, exist_ok=True)
    return results, images


def write(results: Path, name: str, page: dict[str, Any], report: str) -> None:
    """Write a page and its figures as Markdown and JSON, and print the page."""
    (results / f"{name}.json").write_text(json.dumps(page, indent=1) + "\n")
    (results / f"{name}.md").write_text(report)
    print(report, flush=True)
