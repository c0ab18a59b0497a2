"""Jobs on emulated nodes: where they run, what their ranks report, and what is said of it."""

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "cluster"))
from nodes import Cluster, available  # noqa: E402

# Of 1 Gbit/s as tc counts it, what is left for bytes after Ethernet, IP and TCP headers.
PAYLOAD_BYTES_PER_GBIT = 119e6
LIMIT_S = 900  # for one job
# What glibc's own thresholds become once a program has freed 32 MiB at once. Before that, it gives
# memory back to the kernel in every step, and takes it again page by page: so the same computation
# would take longer or not by what else its process has freed.
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
MARK = "RESULT "  # the line with which a rank's script reports: this, then JSON


@dataclass(frozen=True)
class Layout:
    """How many ranks each node has, and the rate of each node's link: none on one node."""

    ranks: tuple[int, ...]
    link: str | None

    @classmethod
    def of(cls, text: str, link: str) -> "Layout":
        """The layout "2,2": two nodes of two ranks."""
        ranks = tuple(int(number) for number in text.split(","))
        return cls(ranks, link if len(ranks) > 1 else None)

    @property
    def name(self) -> str:
        """For files: 2+2."""
        return "+".join(map(str, self.ranks))

    @property
    def bytes_per_s(self) -> float | None:
        """What a link carries of the tensor each way; None without a network."""
        if self.link is None:
            return None
        return float(self.link.removesuffix("gbit")) * PAYLOAD_BYTES_PER_GBIT

    def __str__(self) -> str:
        """In words."""
        if len(self.ranks) == 1:
            return f"{sum(self.ranks)} rank{'s' * (sum(self.ranks) > 1)} on one node"
        each = " + ".join(map(str, self.ranks))
        if len(set(self.ranks)) == 1:
            each = str(self.ranks[0])
        return f"{sum(self.ranks)} ranks on {len(self.ranks)} nodes of {each}, links of {self.link}"


@dataclass(frozen=True)
class Nodes:
    """Emulated nodes that are up, for one job after the other."""

    cluster: Cluster
    cache: str

    def run(
        self, script: str, arguments: Sequence[object], python: Path = Path(sys.executable)
    ) -> dict[str, Any]:
        """Run a script of ranks/ under the mpirun beside `python`: the object that it reports.

        Ends this program with what the ranks said if they fail, or take longer than LIMIT_S.
        """
        command = [str(python), str(HERE / "ranks" / script), *map(str, arguments)]
        return reported(self.output(command, python), command)

    def output(self, command: Sequence[str], python: Path = Path(sys.executable)) -> str:
        """Run any command so: what it prints."""
        line, environment = self.cluster.mpirun(
            command, bin=python.parent, env={"XDG_CACHE_HOME": self.cache, **HEAP}
        )
        return printed(line, environment, LIMIT_S)


def reported(text: str, command: Sequence[str]) -> dict[str, Any]:
    """The object that a script of ranks/ has printed; ends this program if there is none."""
    for line in text.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    sys.exit(f"{shlex.join(command)} has reported nothing")


def printed(words: Sequence[str], environment: dict[str, str], limit_s: float) -> str:
    """What a job prints. Whatever happens, it has ended when this returns.

    Ends this program with what the job said if it fails, or takes longer than the limit.
    """
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        sys.exit(f"{shlex.join(words)} took longer than {limit_s:g} s")
    finally:
        _stop(process)
    if process.returncode:
        sys.exit(f"{out}{err}{shlex.join(words)}: code {process.returncode}")
    return out


def _stop(process: subprocess.Popen[str]) -> None:
    """End mpirun, which removes its temporary files when it is asked to and has the time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def nodes(layout: Layout) -> Iterator[Nodes]:
    """The layout's nodes, with a cache of their own: what is tuned is tuned here and now."""
    with tempfile.TemporaryDirectory() as cache, Cluster(layout.ranks, layout.link) as cluster:
        yield Nodes(cluster, cache)


def need_nodes() -> None:
    """End this program, with the reason, where nodes cannot be emulated.

    From here on a request to end is an exit, which takes down what is up.
    """
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda number, _: sys.exit(128 + number))
    if reason := available():
        sys.exit(f"{Path(sys.argv[0]).name}: emulated nodes cannot be made here: {reason}")


def facts() -> dict[str, Any]:
    """When, where and by which command this runs, and how busy the machine was just before.

    Call it before the jobs: what else runs slows who polls more than who sleeps, and so a busy
    machine changes not only times but also their order.
    """
    return {
        "load": os.getloadavg()[0],
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def imprint(facts: dict[str, Any], versions: dict[str, str]) -> str:
    """One line of a page: when, where and with what."""
    where = f"{facts['machine']}, load {facts['load']:.1f} before"
    return f"{facts['date']}; {where}; " + ", ".join(
        f"{name} {number}" for name, number in versions.items()
    )


def folders(output: Path) -> tuple[Path, Path]:
    """Where pages and pictures go: made if need be."""
    results, images = output / "results", output / "img"
    for folder in (results, images):
        folder.mkdir(parents=True, exist_ok=True)
    return results, images


def write(results: Path, name: str, page: dict[str, Any], report: str) -> None:
    """Keep a page and all its figures, and show it."""
    (results / f"{name}.json").write_text(json.dumps(page, indent=1) + "\n")
    (results / f"{name}.md").write_text(report)
    print(report, flush=True)
