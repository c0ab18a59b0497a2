"""Injection of one fault into a job, and the judgement of what the job said and left."""

import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch import Result, is_open_mpi, mpirun, processes
from nodes import Cluster

from chaos.kinds import KINDS

STAMP = "FAULT_STAMP"  # names the file in which the job notes when it trains
LIMIT_S = 300.0  # for a job
LOST_S = 200.0  # for one that loses a node: mpirun waits for it for ever
END_S = 60.0  # in which processes end after a report


@dataclass(frozen=True)
class Fault:
    """A fault of one rank of a job, whose nodes exchange `rarely`, or whose ranks are on one."""

    kind: str
    rank: int
    ranks: int
    stage: int = 0
    rarely: bool = False


@dataclass(frozen=True)
class Outcome:
    """The end of the job."""

    result: Result
    ended: bool  # by itself
    right: bool  # rank, cause and exit code
    seconds: float | None  # from the loss of a node to the report


def inject(fault: Fault, timeout: float) -> Outcome:
    """Run a job with a fault; ranks wait for each other for at most `timeout` seconds."""
    expected = KINDS[fault.kind]
    limit = timeout if expected.waits else 10 * timeout
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stamp, cluster = folder / "stamp", None
        if expected.nodes:
            cluster = stack.enter_context(Cluster(ranks=(1, fault.ranks - 1), link=None))
            act = threading.Thread(target=lose_node, args=(fault, cluster, stamp), daemon=True)
            act.start()
            stack.callback(act.join, END_S)
        command = [sys.executable, Path(__file__).with_name("fault.py"), fault.kind]
        command += [str(fault.rank), "--stage", str(fault.stage), "--timeout", str(limit)]
        result = mpirun(
            fault.ranks,
            [*command, *(["--rarely"] if fault.rarely else [])],
            timeout=LIMIT_S,
            env={STAMP: str(stamp)},
            cluster=cluster,
            outlived=expected.dies,
            patience_s=END_S,
        )
        happened, reported = read_time(stamp), read_time(folder / "stamp.reported")
        ended = not result.timed_out and not (folder / "survivors").exists()
    found = re.search(expected.report.format(rank=fault.rank), result.stderr) is not None
    completed = "completed" in result.stdout and result.returncode == 0
    failed = result.returncode == 1 or is_open_mpi() or expected.nodes
    right = found and ended and (completed if expected.completes else failed)
    seconds = reported - happened if reported and happened else None
    return Outcome(result, ended, right, seconds)


def read_time(path: Path) -> float | None:
    """Return the time in a file, if there is one."""
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None


def lose_node(fault: Fault, cluster: Cluster, stamp: Path) -> None:
    """Do to a node what the kind says when training has begun; end mpirun if it waits for ever."""
    host = cluster.hosts[fault.rank > 0]
    if not until(stamp.exists, LIMIT_S):
        return
    stamp.write_text(str(time.time()))
    if fault.kind == "link cut for 3 s":
        cluster.link(host, up=False)
        time.sleep(3.0)
        cluster.link(host, up=True)
        return
    cluster.crash(host)
    if until(stamp.with_name("stamp.reported").exists, LOST_S):
        if not until(lambda: not python_processes(stamp), END_S):
            stamp.with_name("survivors").touch()
        for pid in processes(stamp, STAMP):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until a condition holds; return False after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def python_processes(stamp: Path) -> list[int]:
    """Return the living processes of the job that run Python."""
    found = []
    for pid in processes(stamp, STAMP):
        with contextlib.suppress(OSError):  # it ended meanwhile
            program, *_ = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"python" in os.path.basename(program):
                found.append(pid)
    return found
