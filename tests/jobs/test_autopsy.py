"""The autopsy of real jobs: which rank stopped first, in what, where, and who waited."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from job import LATE, autopsy, train, write_corpus

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


@pytest.mark.exhaustive
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
