"""Lose nodes of runs that `mntrain launch` started, and measure what each loss costs.

    python benchmarks/outage.py [--runs 2+1 4+1 3+0 8+0]

A run 4+1 is a job on four emulated nodes of one rank, beside one that is spare; without a spare, it
goes on with fewer nodes and ranks. It saves in the nodes' memory every few steps, and at times in
the run directory. Nodes are lost one after the other, in several ways. The run is not started anew
in between: what was stopped or cut comes back. At the end, the losses of all steps are compared
with those of a run without an outage. Writes docs/results/outage-mpich.md, or outage-openmpi.md
with that library.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from emulated import Cluster, is_open_mpi
from results import DOCS, facts, heading, spread, table, write

# A node that has ended does not come back.
LOSSES = {
    "2+1": "rank stop cut processes cut end",
    "4+1": "cut rank processes stop rank end",
    "3+0": "processes cut rank stop end",
    "8+0": "rank processes stop end cut processes stop end",
}
KINDS = {
    "rank": "a rank is killed",
    "processes": "all ranks of a node are killed",
    "stop": "a node is stopped",
    "cut": "a node's network is cut",
    "end": "a node ends",
}
LOCAL_EVERY, EVERY, STEPS, TIMEOUT_S = 6, 20, 100_000, 40
LOCAL = "dev/shm/mntrain-outage"
JOB = ["-u", "-m", "mntrain", "--model.layers", "2", "--model.width", "64", "--model.context", "32"]
JOB += ["--device", "cpu", "--train.steps", str(STEPS), "--train.batch-size", "24"]
JOB += ["--train.eval-every", "0", "--zero.stage", "1", "--checkpoint.every", str(EVERY)]
JOB += ["--checkpoint.local", f"/{LOCAL}", "--checkpoint.local-every", str(LOCAL_EVERY)]
JOB += ["--comm.timeout", str(TIMEOUT_S), "--comm.warn-after", "10"]
LIMIT_S = 400.0  # for one loss
_LOOK_S = 0.002


class Layout(NamedTuple):
    """The number of nodes that a run uses, each with one rank, and of those that are spare."""

    nodes: int
    spares: int

    @classmethod
    def of(cls, text: str) -> "Layout":
        """Parse 4+1."""
        return cls(*map(int, text.split("+")))

    @property
    def options(self) -> list[str]:
        """The options of launch."""
        return ["--spares", "1"] if self.spares else ["--nodes", f"1:{self.nodes}"]


class Run:
    """A run under launch on emulated nodes, and the times of its lines."""

    def __init__(self, cluster: Any, folder: Path, layout: Layout) -> None:
        self.cluster, self.folder = cluster, folder / "run"
        self.metrics = self.folder / "metrics.jsonl"
        command, environment = cluster.mpirun(
            [sys.executable, *JOB, "--run.dir", str(self.folder)], env={"OMP_NUM_THREADS": "1"}
        )
        command[command.index("-n") + 1] = str(layout.nodes)
        launch = [sys.executable, "-m", "mntrain", "launch", *layout.options, "--", *command]
        self.lines: list[tuple[float, str]] = []
        self.hosts = list(cluster.hosts[: layout.nodes])  # of the present start
        self.began = time.time()
        self.process = subprocess.Popen(
            launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line))
            if found := re.search(r"launch: start \d+ on ([^:]*):", line):  # names, or addresses
                names = [name.rpartition(".")[2] for name in found[1].split(", ")]
                self.hosts = [f"n{name.removeprefix('n')}" for name in names]

    def until(self, happened: Callable[[], Any]) -> Any:
        """Wait until something is true, and return it; else print the output, and exit."""
        end = time.time() + LIMIT_S
        while not (found := happened()):
            if self.process.poll() is not None or time.time() > end:
                text = "".join(f"{at - self.began:.1f} {line}" for at, line in self.lines)
                print(text, flush=True)
                sys.exit("the run did not go on")
            time.sleep(_LOOK_S)
        return found

    def said(self, pattern: str, since: float) -> list[tuple[float, "re.Match[str]"]]:
        """Return the lines since a time that have a pattern, and when they came."""
        found = [(at, re.search(pattern, line)) for at, line in list(self.lines) if at >= since]
        return [(at, one) for at, one in found if one]

    def step(self) -> int:
        """Return the last step of metrics.jsonl."""
        return max(losses_in(self.metrics), default=0)

    def ranks(self, host: str) -> list[int]:
        """Return the processes of the ranks on a node."""
        word = f"--run.dir\0{self.folder}\0".encode()
        own = os.readlink(f"/proc/{self.cluster.pid(host)}/ns/pid")
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                of_rank = line.startswith(f"{sys.executable}\0-u\0-m\0mntrain\0".encode())
                if of_rank and word in line and os.readlink(entry / "ns" / "pid") == own:
                    found.append(int(entry.name))
        return found


def losses_in(metrics: Path) -> dict[int, float]:
    """Return the losses by step."""
    found = {}
    with suppress(FileNotFoundError):
        for line in metrics.read_text().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                found[record["step"]] = record["loss"]
    return found


def lose(run: Run, kind: str, chance: random.Random) -> dict[str, Any]:
    """Lose a node, and return the figures once the run takes steps again."""
    cluster, host = run.cluster, chance.choice(run.hosts)
    first = run.step()
    run.until(lambda: run.step() > first + LOCAL_EVERY)
    time.sleep(chance.uniform(0, 0.5))
    step, at = run.step(), time.time()
    if kind in ("rank", "processes"):
        for process in run.ranks(host):  # each node has one
            os.kill(process, signal.SIGKILL)
    elif kind == "stop":
        cluster.stop(host)
    elif kind == "cut":
        cluster.link(host, up=False)
    else:
        cluster.crash(host)
    run.until(lambda: run.said(r"launch: start \d+ trains", at))
    trains = time.time()
    starts = [came for came, _ in run.said(r"launch: start \d+ on ", at) if came < trains]
    began = r"resumed after step (\d+)|step +1/"  # a new run, without a whole step
    resumed = run.until(lambda: run.said(began, starts[-1]))
    done = int(resumed[0][1][1] or 0)
    report = run.said(r"mntrain: (error: .*(lost|not answer)|warning: .*no rank on)", at)
    if kind == "cut":
        cluster.link(host, up=True)
    return {
        "kind": kind,
        "steps_lost": step - done,
        "report_s": report[0][0] - at if report else None,
        "start_s": starts[0] - at,
        "begin_s": trains - starts[-1],
    }


def outages(text: str, folder: Path, chance: random.Random) -> dict[str, Any]:
    """Return the figures of a run, with its losses, and those of one without an outage."""
    layout, found = Layout.of(text), []
    load = os.getloadavg()[0]
    with Cluster((1,) * sum(layout)) as cluster:
        run = Run(cluster, folder, layout)
        try:
            run.until(run.step)
            plain_s = time.time() - run.began
            run.until(lambda: run.step() > EVERY)
            for number, kind in enumerate(LOSSES[text].split(), 1):
                found.append(lose(run, kind, chance))
                print(text, number, found[-1], flush=True)
            run.process.send_signal(signal.SIGUSR1)
            run.process.wait(LIMIT_S)
        finally:
            run.process.terminate()
            run.process.wait(LIMIT_S)
            (folder / "output").write_text("".join(line for _, line in run.lines))
    ours = losses_in(run.metrics)
    with Cluster((1,) * layout.nodes) as cluster:
        whole = folder / "whole"
        words = [*JOB, "--run.dir", str(whole), "--run.stop-after", str(max(ours))]
        command, environment = cluster.mpirun(
            [sys.executable, *words], env={"OMP_NUM_THREADS": "1"}
        )
        began = time.time()
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as plain:
            while not losses_in(whole / "metrics.jsonl") and plain.poll() is None:
                time.sleep(_LOOK_S)
            plain_s = (plain_s + time.time() - began) / 2
    theirs = losses_in(whole / "metrics.jsonl")
    missing = float("inf")
    return {
        "run": text,
        "load": load,
        "losses": found,
        "plain_s": plain_s,
        "steps": len(theirs),
        "same": sum(ours.get(step) == loss for step, loss in theirs.items()),
        "difference": max(
            abs(ours.get(step, missing) - loss) / loss for step, loss in theirs.items()
        ),
    }


def main() -> None:
    """Lose nodes, compare the losses, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    about, chance = facts(), random.Random(options.seed)
    about["versions"] = {"torch": torch.__version__}
    library, runs = "Open MPI" if is_open_mpi() else "MPICH", []
    for text in options.runs:
        with tempfile.TemporaryDirectory(prefix=".outage-", dir=".") as name:
            runs.append({"library": library, **outages(text, Path(name).resolve(), chance)})
    name = f"outage-{library.lower().replace(' ', '')}"
    publish({**about, "runs": runs}, name, options.output)


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    runs = page["runs"]
    losses = [loss for run in runs for loss in run["losses"]]
    about = (
        "Emulated nodes of one rank on one machine, some spare; jobs of `mntrain launch` that save "
        f"in the nodes' memory every {LOCAL_EVERY} steps and in the run directory every {EVERY}, "
        f"with `--comm.timeout {TIMEOUT_S}`. Seconds are the median, and the least and the "
        "largest: from the loss until the ranks report it, and until `launch` starts the job "
        "again, which is what a loss costs beside a start; then those of that start until its "
        "first step. Ranks share the cores, so a start takes many times as long as on nodes of "
        "their own."
    )
    lines = heading(page, "What the loss of a node costs", page["versions"], about)
    rows = []
    for kind, words in KINDS.items():
        if those := [loss for loss in losses if loss["kind"] == kind]:
            steps = [loss["steps_lost"] for loss in those]
            cells = [words, str(len(those)), f"{min(steps)} to {max(steps)}"]
            for part in ("report_s", "start_s", "begin_s"):
                known = [loss[part] for loss in those if loss[part] is not None]
                cells.append(spread(known, 1) if known else "none")
            rows.append(cells)
    head = ["loss", "times", "steps lost", "report, s", "next start, s", "that start, s"]
    lines += [*table(head, rows), ""]
    rows = []
    for run in runs:
        same = f"{run['same']} of {run['steps']}"
        difference = f"{run['difference']:.0e}" if run["difference"] else "none"
        cells = [str(len(run["losses"])), same, difference, f"{run['plain_s']:.1f}"]
        rows.append([run["library"], run["run"], *cells, f"{run['load']:.0f}"])
    head = ["library", "nodes + spare", "losses", "steps with bitwise the loss of a run without"]
    head += ["largest relative difference", "a start, s", "load before"]
    lines += [*table(head, rows, texts=2), ""]
    lines.append(
        f"Each run went on after each of {len(losses)} losses. Without a spare node, some steps "
        "are taken by fewer ranks, and differ by rounding."
    )
    write(output, name, lines)


if __name__ == "__main__":
    main()
