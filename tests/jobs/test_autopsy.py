"""The autopsy of real jobs: which rank stopped first, in what, where, and who waited."""

import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from job import LATE, autopsy, completed, train, write_corpus
from launch import mpirun

from mntrain.recorder.recording import read

TASKS = (
    LATE
    + """
class Killed(Late):
    def broken(self, model, batch):
        time.sleep(8)  # until the others wait
        os.kill(os.getpid(), signal.SIGKILL)

class Stopped(Late):
    def broken(self, model, batch):
        os.kill(os.getpid(), signal.SIGSTOP)
        return LanguageModel.loss(self, model, batch)

"""
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "broken.py").write_text(TASKS)
    write_corpus(tmp_path)
    return tmp_path


def line_of(text):
    """The line of TASKS that begins with a text."""
    return next(n for n, line in enumerate(TASKS.splitlines(), 1) if line.strip().startswith(text))


@pytest.mark.thorough
def test_a_killed_rank_is_named_with_its_line_and_those_that_waited_for_it(folder):
    train(3, folder, "--task", "broken:Killed")
    done = autopsy(folder / "run")
    assert done.returncode == 1, done.stdout
    assert f"rank 1 on {os.uname().nodename} stopped first." in done.stdout
    assert f"in forward of step 2, at {folder / 'broken.py'}:{line_of('time.sleep(8)')}" in (
        done.stdout
    )
    assert "gone" in done.stdout
    assert "waiting   ranks 0, 2 on" in done.stdout, done.stdout
    assert "gradient bucket 0: all_reduce" in done.stdout


def kill_once_diagnosed(run, ended, said):
    """Kill all ranks as soon as an autopsy gives a cause and has `said`; return its text."""
    while not ended.wait(0.2):
        done = autopsy(run)
        if said in done.stdout and "cause" in done.stdout:
            ended.wait(5)  # while the others give signs of life
            for path in (run / "recorder").glob("rank-*.bin"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(read(path).header.pid, signal.SIGKILL)
            return done.stdout
    return ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["Stopped", pytest.param("Hangs", marks=pytest.mark.exhaustive)])
def test_a_rank_that_no_longer_goes_on_is_named_before_and_after_all_are_killed(folder, task):
    ended = threading.Event()
    with ThreadPoolExecutor() as pool:
        alive = pool.submit(kill_once_diagnosed, folder / "run", ended, "in forward of step 2")
        train(2, folder, "--task", f"broken:{task}")
        ended.set()
    before, after = alive.result(), autopsy(folder / "run").stdout
    name = f"rank 1 on {os.uname().nodename}"
    runs = f"The job still runs, as far as can be seen from here; {name} behind."
    said = before.splitlines()[1].replace("probably ", "")  # on a busy machine it is less sure
    assert said == (runs if task == "Hangs" else f"{name} stopped first.")
    assert after.splitlines()[1] == f"{name} stopped first."
    for text in (before, after):
        assert "waiting   rank 0 on" in text, text
        assert "in forward of step 2" in text
    if task == "Stopped":
        assert "is stopped" in before
        assert "kill -CONT" in before
        assert "SIGSTOP" in after
    else:
        assert "py-spy dump --pid" in before
        assert f"at {folder / 'broken.py'}:{line_of('time.sleep(0.1)')}" in after
        assert "it ran on, but did not call" in after


EARLY = """
import ctypes, os, signal, sys, time
import mntrain

with mntrain.init(device="cpu") as world, world.metrics(sys.argv[1]):
    if world.rank == 1:
        time.sleep(0.2)
        if sys.argv[2] == "crashes":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "end", ["crashes", pytest.param("is killed", marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_ends_at_once_while_no_other_waits_is_named(tmp_path, end):
    (tmp_path / "own.py").write_text(EARLY)
    run = tmp_path / "run"
    mpirun(2, [sys.executable, tmp_path / "own.py", run, end], timeout=250)
    text = autopsy(run).stdout
    host, surely = os.uname().nodename, "" if end == "crashes" else "probably "
    assert text.splitlines()[1] == f"rank 1 on {host} {surely}stopped first.", text
    if end == "crashes":
        line = EARLY[: EARLY.index("ctypes.string_at")].count("\n") + 1
        assert f"Segmentation fault, at {tmp_path / 'own.py'}:{line}" in text


@pytest.mark.exhaustive
def test_a_run_with_recordings_on_a_local_disk_ended_well(folder):
    completed(train(2, folder, "--run.recorder", str(folder / "local")))
    assert not (folder / "run" / "recorder").exists()
    assert len(list((folder / "local").rglob("rank-*.bin"))) == 2
    done = autopsy(folder / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "The job ended well: completed." in done.stdout
    assert "cause" not in done.stdout


@pytest.mark.exhaustive
def test_a_job_without_a_place_to_record_trains_and_warns_once(folder):
    (folder / "file").write_text("")
    result = completed(train(2, folder, "--run.recorder", str(folder / "file")))
    assert result.stderr.count("warning: no recording for autopsy") == 1, result.stderr
    assert "Not a directory" in result.stderr
    assert autopsy(folder / "run").returncode == 2
