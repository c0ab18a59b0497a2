"""Lose nodes of a run that `mntrain launch` started, and measure what each loss costs.

    python benchmarks/outage.py [--losses 12] [--seed 0]

On three emulated nodes of two ranks, of which one is spare, a job saves every few steps. A loss is
one of these, in turn, at a random instant: a rank is killed (SIGKILL), all processes of a node are
stopped (SIGSTOP), its network is cut, or it ends. The run is not started anew in between: what was
stopped or cut comes back, and a node that ended ends the run's losses. At the end the losses of all
steps are compared with those of a run without an outage. Writes docs/results/outage.md; figures
with another MPI library, from an earlier call, stay in it.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from emulated import Cluster, is_open_mpi
from results import DOCS, facts, heading, spread, table, write

KINDS = ("rank killed", "node stopped", "network cut", "node ended")
EVERY, STEPS, TIMEOUT_S = 5, 100_000, 40
JOB = ["-m", "mntrain", "--model.layers", "2", "--model.width", "64", "--model.context", "32"]
JOB += ["--device", "cpu", "--train.steps", str(STEPS), "--train.batch-size", "8"]
JOB += ["--train.eval-every", "0", "--zero.stage", "1", "--checkpoint.every", str(EVERY)]
JOB += ["--comm.timeout", str(TIMEOUT_S), "--comm.warn-after", "10"]
LIMIT_S = 240.0  # for one loss


class Run:
    """A run under launch on emulated nodes, and the times of its lines."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.metrics = cluster, folder / "run" / "metrics.jsonl"
        command, environment = cluster.mpirun(
            [sys.executable, *JOB, "--run.dir", str(folder / "run")], env={"OMP_NUM_THREADS": "1"}
        )
        command[command.index("-n") + 1] = "4"
        launch = [sys.executable, "-m", "mntrain", "launch", "--", *command]
        self.lines: list[tuple[float, str]] = []
        self.began = time.time()
        self.process = subprocess.Popen(
            launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line))

    def until(self, happened: Callable[[], Any]) -> Any:
        """Wait until something is true, and return it; exits with the output if it does not."""
        end = time.time() + LIMIT_S
        while not (found := happened()):
            if self.process.poll() is not None or time.time() > end:
                sys.exit("".join(line for _, line in self.lines) + "the run did not go on")
            time.sleep(0.02)
        return found

    def said(self, pattern: str, since: float) -> tuple[float, "re.Match[str]"] | None:
        """Return the first line since a time that has a pattern, and when it came."""
        for at, line in list(self.lines):
            if at >= since and (found := re.search(pattern, line)):
                return at, found
        return None

    def step(self) -> int:
        """Return the last step of metrics.jsonl."""
        return max(losses_in(self.metrics), default=0)

    def ranks(self) -> list[int]:
        """Return the processes of the ranks."""
        word = f"--run.dir\0{self.metrics.parent}\0".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if word in line and line.startswith(f"{sys.executable}\0-m\0mntrain\0--m".encode()):
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


def lose(run: Run, kind: str, host: str, chance: random.Random) -> dict[str, Any]:
    """Do a loss to a host, and return its figures once the run takes steps again."""
    first = run.step()
    run.until(lambda: run.step() > first + EVERY)
    time.sleep(chance.uniform(0, 0.5))
    at, step, cluster = time.time(), run.step(), run.cluster
    if kind == "rank killed":
        os.kill(chance.choice(run.ranks()), signal.SIGKILL)
    elif kind == "node stopped":
        cluster.stop(host)
    elif kind == "network cut":
        cluster.link(host, up=False)
    else:
        cluster.crash(host)
    started, _ = run.until(lambda: run.said(r"launch: start \d+ on ", at))
    ended, resumed = run.until(lambda: run.said(r"resumed after step (\d+)", at))
    done = int(resumed[1])
    run.until(lambda: run.metrics.stat().st_mtime > ended and run.step() > done)
    trained = time.time()
    report = run.said(r"mntrain: error: .*(lost|not answer)", at)
    if kind == "network cut":
        cluster.link(host, up=True)
    return {
        "kind": kind,
        "steps_lost": step - done,
        "report_s": report[0] - at if report else None,
        "start_s": started - at,
        "step_s": trained - at,
        "begin_s": trained - started,
    }


def hosts_of_last_start(run: Run, hosts: Sequence[str]) -> list[str]:
    """Return the nodes that the last start uses, by their numbers: launch may name addresses."""
    found = [line for _, line in list(run.lines) if "launch: start " in line and " on " in line]
    if not found:
        return list(hosts[:2])
    names = re.findall(r" on ([^:]*):", found[-1])[0].split(", ")
    return [f"n{name.rpartition('.')[2].removeprefix('n')}" for name in names]


def main() -> None:
    """Lose nodes, compare the losses, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--losses", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    page, chance = facts(), random.Random(options.seed)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix=".outage-", dir=".") as name:
        folder = Path(name).resolve()
        with Cluster((2, 2, 2)) as cluster:
            run = Run(cluster, folder)
            try:
                run.until(run.step)
                for number in range(1, options.losses + 1):
                    # Nothing can be lost in turn after a node that does not come back.
                    kind = KINDS[
                        -1 if number == options.losses else (number - 1) % (len(KINDS) - 1)
                    ]
                    host = chance.choice(hosts_of_last_start(run, cluster.hosts))
                    found.append(lose(run, kind, host, chance))
                    print(number, host, found[-1], flush=True)
                run.process.send_signal(signal.SIGUSR1)
                run.process.wait(LIMIT_S)
            finally:
                run.process.kill()
        ours = losses_in(run.metrics)
        with Cluster((2, 2)) as cluster:
            words = [*JOB, "--run.dir", str(folder / "whole"), "--run.stop-after", str(max(ours))]
            command, environment = cluster.mpirun(
                [sys.executable, *words], env={"OMP_NUM_THREADS": "1"}
            )
            whole, began = folder / "whole", time.time()
            with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as plain:
                while not losses_in(whole / "metrics.jsonl") and plain.poll() is None:
                    time.sleep(0.02)
                plain_s = time.time() - began
        theirs = losses_in(whole / "metrics.jsonl")
    same = sum(ours.get(step) == loss for step, loss in theirs.items())
    library = "Open MPI" if is_open_mpi() else "MPICH"
    figures = {"losses": found, "plain_s": plain_s, "steps": len(theirs), "same": same}
    with suppress(OSError):  # of an earlier call
        page["libraries"] = json.loads((options.output / "results/outage.json").read_text())[
            "libraries"
        ]
    page["libraries"] = {
        **page.get("libraries", {}),
        library: {**figures, "command": page["command"]},
    }
    page["versions"] = {"torch": torch.__version__}
    publish(page, "outage", options.output)


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    about = (
        "Three emulated nodes of two ranks on one machine, one of them spare; a job of `mntrain "
        f"launch` saves every {EVERY} steps, with `--comm.timeout {TIMEOUT_S}`. Seconds are the "
        "median, and the least and the largest, from the loss on: until the ranks report it, until "
        "`launch` starts the job again, and until the next step; then those of that start alone. "
        "Ranks share the cores, so a start takes many times as long as on nodes of their own. The "
        "loss of a stopped node is noticed 20 s later if ranks 0 and 1 are on it."
    )
    lines = heading(page, "What the loss of a node costs", page["versions"], about)
    rows = []
    for library, figures in page["libraries"].items():
        for kind in KINDS:
            those = [one for one in figures["losses"] if one["kind"] == kind]
            if those:
                parts = []
                for part in ("report_s", "start_s", "step_s", "begin_s"):
                    values = [one[part] for one in those if one[part] is not None]
                    parts.append(spread(values, 1) if values else "none")
                lost = [one["steps_lost"] for one in those]
                rows.append([library, kind, str(len(those)), f"{min(lost)} to {max(lost)}", *parts])
    head = ["library", "loss", "times", "steps lost", "report, s", "next start, s", "next step, s"]
    lines += [*table([*head, "that start, s"], rows, texts=2), ""]
    for library, figures in page["libraries"].items():
        count = len(figures["losses"])
        lines.append(
            f"- {library} (`{figures['command']}`): the run went on after each of {count} losses, "
            f"and {figures['same']} of {figures['steps']} steps have bitwise the loss of a run "
            f"without an outage. By `mpirun` alone, a start took {figures['plain_s']:.1f} s to its "
            "first step."
        )
    write(output, name, page, lines)


if __name__ == "__main__":
    main()
