"""Injection of one fault into a job, and the judgement of what the job said and left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launch import Result, find_mpirun, is_open_mpi, mpirun
from nodes import Cluster

from chaos.kinds import KINDS
from mntrain.recorder.recording import FILE_BYTES

SCRIPTS = Path(__file__).parent
STAMP = "FAULT_STAMP"  # names the file in which the job notes the time of the fault
LIMIT_S = 300.0  # for a job
LOST_S = 200.0  # for one that loses a node: mpirun waits for it for ever
END_S = 60.0  # in which processes end after a report
CHECKPOINT = 900_000  # bytes: there is room for one, not for two


@dataclass(frozen=True)
class Fault:
    """A fault of one rank of a job."""

    kind: str
    rank: int
    ranks: int
    stage: int = 0
    on_nodes: bool = False
    sync: str = ""  # how its nodes, of one rank each, exchange

    def __str__(self) -> str:
        where = " on two nodes" if self.on_nodes else ""
        sync = f", {self.sync}" if self.sync else ""
        return f"{self.kind}, rank {self.rank} of {self.ranks}{where}, stage {self.stage}{sync}"


@dataclass(frozen=True)
class Outcome:
    """The end of the job."""

    fault: Fault
    result: Result
    ended: bool  # by itself
    right: bool  # rank, cause and exit code
    seconds: float | None  # from the fault, or from the end of the time limit, to the end


def inject(fault: Fault, timeout: float) -> Outcome:
    """Run a job with a fault; ranks wait for each other for at most `timeout` seconds."""
    expected = KINDS[fault.kind]
    limit = timeout if expected.waits else 10 * timeout
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stamp, run_dir = folder / "stamp", folder / "shared" / "run"
        run_dir.parent.mkdir()
        if fault.kind == "full disk":
            stack.enter_context(small_file_system(run_dir, fault.ranks * FILE_BYTES + CHECKPOINT))
        cluster = None
        if fault.on_nodes or expected.nodes:
            cluster = stack.enter_context(Cluster(ranks=(1, fault.ranks - 1), link=None))
        if expected.nodes:
            act = threading.Thread(target=lose_node, args=(fault, cluster, stamp), daemon=True)
            act.start()
            stack.callback(act.join, END_S)
        command = [sys.executable, SCRIPTS / expected.script, fault.kind, str(fault.rank)]
        if expected.script == "fault.py":
            command += ["--stage", str(fault.stage), "--timeout", str(limit)]
            command += ["--sync", fault.sync] if fault.sync else []
        else:
            command += [run_dir, "--zero.stage", str(fault.stage)]
        start = time.time()
        result = mpirun(
            fault.ranks,
            command,
            timeout=LIMIT_S,
            env={STAMP: str(stamp)},
            cluster=cluster or launcher(fault),
            outlived=expected.dies,
            patience_s=END_S,
        )
        happened = read_time(stamp)
        reported = read_time(folder / "stamp.reported")
    ended = not result.timed_out and not (folder / "survivors").exists()
    return judge(fault, result, ended, (start, happened, reported), limit)


def judge(
    fault: Fault,
    result: Result,
    ended: bool,
    times: tuple[float, float | None, float | None],
    limit: float,
) -> Outcome:
    """Compare what a job said with what it should say."""
    expected = KINDS[fault.kind]
    start, happened, reported = times
    found = re.search(expected.report.format(rank=fault.rank), result.stderr) is not None
    completed = "completed" in result.stdout and result.returncode == 0
    failed = result.returncode == expected.code or is_open_mpi() or expected.nodes
    right = found and ended and (completed if expected.completes else failed)
    seconds = None
    if happened is not None and ended and not expected.completes:
        end = reported if expected.nodes and reported else start + result.seconds
        seconds = end - happened - (limit if expected.waits else 0)
    return Outcome(fault, result, ended, right, seconds)


def read_time(path: Path) -> float | None:
    """Return the time in a file, if there is one."""
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None


@dataclass(frozen=True)
class Starter:
    """A launcher of jobs on this machine, with its own words."""

    words: list[str]

    def mpirun(self, command):
        """Return the command line and the environment."""
        settings = {} if is_open_mpi() else {"UCX_NET_DEVICES": "lo"}
        allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        return [*self.words, *command], settings | dict.fromkeys(allowed, "1")


def launcher(fault: Fault) -> Starter | None:
    """Return what starts the job, if it is not the mpirun of this environment alone."""
    own = [find_mpirun(), "-n", str(fault.ranks)]
    if fault.kind == "wrong mpirun":
        other = ["mpirun.mpich"] if is_open_mpi() else ["mpirun.openmpi", "--oversubscribe"]
        return Starter([*other, "-n", str(fault.ranks)])
    if words := KINDS[fault.kind].shell:
        return Starter(["unshare", "-m", "sh", "-c", f'{words} && exec "$@"', "sh", *own])
    return None


@contextlib.contextmanager
def small_file_system(folder: Path, nbytes: int) -> Iterator[None]:
    """Mount a file system of some bytes on a folder."""
    folder.mkdir()
    options = f"size={nbytes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def lose_node(fault: Fault, cluster: Cluster, stamp: Path) -> None:
    """Do to a node what the kind says when training has begun; end mpirun if it waits for ever."""
    host = cluster.hosts[fault.rank > 0]
    if not until(stamp.exists, LIMIT_S):
        return
    stamp.write_text(str(time.time()))
    if fault.kind == "node lost":
        cluster.crash(host)
    else:
        cluster.link(host, up=False)
    if fault.kind.startswith("link cut for"):
        time.sleep(float(fault.kind.split()[-2]))
        cluster.link(host, up=True)
    reported = stamp.with_name("stamp.reported")
    if fault.kind != "link cut for 3 s" and until(reported.exists, LOST_S):
        if not until(lambda: not processes(stamp, "python"), END_S):
            stamp.with_name("survivors").touch()
        for pid in processes(stamp, ""):
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


def processes(stamp: Path, program: str) -> list[int]:
    """Return the processes of the job whose program's name contains a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{STAMP}={stamp}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if program in os.path.basename(words[0].decode(errors="replace")):
                    found.append(int(entry.name))
    return found
