"""Ctrl-C before training: while Python imports libraries, and in the other commands."""

import os
import signal
import subprocess
import sys

import pytest
from launch import in_own_group, is_open_mpi, mpirun_words
from waiting import until

# A library that takes long to import, and turns whatever interrupts it into another error.
SLOW_LIBRARY = """
import os, pathlib, time
pathlib.Path("importing", str(os.getpid())).touch()
try:
    for _ in range(10000):  # a signal that comes just before a sleep does not end it
        time.sleep(0.1)
except BaseException:
    raise RuntimeError("a broken library") from None
"""


def path(folder):
    """Return the variable that lets Python find modules in a folder before all others."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def ctrl_c(command, folder, ready, ranks=0):
    """Run a command in a folder, press Ctrl-C once `ready()`, and return the finished process."""
    words = ["env", "--default-signal=INT"]  # ignored in background jobs
    command = [*words, *(mpirun_words(ranks) if ranks else []), *command]
    with (
        (folder / "stderr").open("w") as stderr,
        in_own_group(command, folder, env=path(folder), stderr=stderr) as process,
    ):
        until(ready, process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
        out, _ = process.communicate(timeout=250)
    err = (folder / "stderr").read_text()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("ranks", [0, 2])  # 0: without mpirun
@pytest.mark.parametrize(
    "library", ["torch", pytest.param("pydantic", marks=pytest.mark.exhaustive)]
)  # for the options; for the job
def test_ctrl_c_while_a_library_is_imported_prints_one_line(tmp_path, library, ranks):
    (tmp_path / f"{library}.py").write_text(SLOW_LIBRARY)
    (tmp_path / "importing").mkdir()
    importing, expected = tmp_path / "importing", max(1, ranks)
    command = [sys.executable, "-m", "mntrain"]
    done = ctrl_c(command, tmp_path, lambda: len(list(importing.iterdir())) == expected, ranks)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "[mpiexec" not in line]
    if ranks and is_open_mpi():  # its mpirun kills the ranks, and always returns 1
        assert (done.returncode, "".join(said)) == (1, "")
    else:
        assert (done.returncode, said) == (130, ["mntrain: interrupted"])


def test_an_interrupt_that_the_shell_ignores_stays_ignored(tmp_path):
    (tmp_path / "pydantic.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(3)"
    )
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "mntrain"],
        cwd=tmp_path,
        env=os.environ | path(tmp_path),
        capture_output=True,
        check=False,
        timeout=250,
    )
    assert (done.returncode, done.stderr) == (3, b"")
