"""When things break: one clear error, a quick end, an exit code that is not 0, nothing lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job import SMALL, completed, metrics, summary, train, write_corpus
from launch import OPEN_MPI_ENVIRONMENT, OPEN_MPI_OPTIONS, find_mpirun, is_open_mpi, mpirun

TASKS = '''
import os, signal, sys, time
import torch
from mntrain.tasks import Loss
from mntrain.tasks.lm import LanguageModel

RANK = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])

class Late(LanguageModel):
    """Breaks in the third forward of rank 1, in the way that a subclass says."""
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        if RANK == 1 and self.calls == 3:
            return self.broken(model, batch)
        return super().loss(model, batch)

class Raises(Late):
    def broken(self, model, batch):
        raise KeyError("a bug of rank one")

class Exits(Late):
    def broken(self, model, batch):
        sys.exit(3)

class Killed(Late):
    def broken(self, model, batch):
        os.kill(os.getpid(), signal.SIGKILL)

class NotANumber(Late):
    def broken(self, model, batch):
        loss = LanguageModel.loss(self, model, batch)
        return Loss(loss.mean * float("nan"), loss.count)

class Slow(LanguageModel):
    def loss(self, model, batch):
        time.sleep(0.05)
        return super().loss(model, batch)

class NeedsMore(LanguageModel):
    def __init__(self, config):
        if RANK == 1:
            raise FileNotFoundError("no /data on this node")
        super().__init__(config)
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "broken.py").write_text(TASKS)
    return tmp_path


def test_an_exception_on_one_rank_ends_the_job_with_rank_host_and_traceback(folder):
    result = train(3, folder, "--task", "broken:Raises")
    assert not result.timed_out, result.report()
    assert result.returncode not in (0, None)
    assert f"mntrain: rank 1 of 3 on {os.uname().nodename} failed" in result.stderr
    assert "KeyError: 'a bug of rank one'" in result.stderr
    assert "in broken" in result.stderr
    assert len(metrics(folder)) < 6


def test_an_exit_on_one_rank_ends_the_job(folder):
    result = train(2, folder, "--task", "broken:Exits")
    assert not result.timed_out, result.report()
    assert result.returncode not in (0, None)
    assert "left the job with exit code 3" in result.stderr


def test_a_killed_rank_ends_the_job(folder):
    result = train(3, folder, "--task", "broken:Killed")
    assert not result.timed_out, result.report()
    assert result.returncode not in (0, None)
    assert not (folder / "run" / "summary.json").exists()


def test_training_that_cannot_go_on_stops_and_says_why_once(folder):
    # Shares of 8 over 3 ranks are 2, 3 and 3: rank 1's third forward is the first of step 2.
    result = train(3, folder, "--task", "broken:NotANumber")
    said = "in step 2, the loss is nan on rank 1"
    assert not result.timed_out, result.report()
    assert result.returncode == 1 or is_open_mpi(), result.report()
    assert result.returncode != 0
    assert result.stderr.count(said) == 1, result.report()
    assert "Traceback" not in result.stderr
    assert summary(folder)["status"] == "failed"
    assert said in summary(folder)["error"]


def test_what_one_rank_lacks_is_said_once_with_its_rank(folder):
    result = train(3, folder, "--task", "broken:NeedsMore")
    assert result.returncode == 2, result.report()
    assert result.stderr.count("rank 1: no /data on this node") == 1, result.report()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--train.batchsize", "8"], "did you mean --train.batch-size"),
        (["--data.path", "no/such/file"], "no/such/file"),
        (["--device", "cuda"], "torch sees no GPU here"),
    ],
)
def test_bad_input_gets_one_clear_error_before_any_work(folder, options, said):
    if options[0] == "--device" and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
    write_corpus(folder)
    result = train(2, folder, *options)
    assert result.returncode == 2, result.report()
    assert result.stderr.count(said) == 1, result.report()
    assert "Traceback" not in result.stderr
    assert not (folder / "run").exists()


def test_silent_singletons_are_refused(folder):
    # As when mpirun and the Python's MPI are of different libraries: each process is alone.
    command = [sys.executable, "-m", "mntrain", "--data.path", str(write_corpus(folder)), *SMALL]
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM"))
    }
    done = subprocess.run(
        command,
        env=environment | {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "the launcher started 4 ranks (SLURM_NTASKS=4), but MPI sees a world of 1" in done.stderr
    assert "Traceback" not in done.stderr


def interrupted(folder: Path, signals: int) -> subprocess.CompletedProcess:
    """Start a long job, press Ctrl-C so many times once it has taken two steps, and wait."""
    write_corpus(folder)
    options = OPEN_MPI_OPTIONS if is_open_mpi() else []
    command = [find_mpirun(), "-n", "2", *options, sys.executable, "-m", "mntrain", *SMALL]
    command += ["--data.path", str(folder / "corpus.txt"), "--run.dir", str(folder / "run")]
    command += ["--train.steps", "100000", "--task", "broken:Slow"]
    environment = os.environ | (OPEN_MPI_ENVIRONMENT if is_open_mpi() else {})
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        log = folder / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not log.exists() or log.read_text().count("\n") < 2:
            assert time.monotonic() < deadline, "no step within a minute"
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        for _ in range(signals):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
        out, err = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_ctrl_c_ends_the_job_cleanly_once(folder):
    done = interrupted(folder, signals=1)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    if is_open_mpi() and not (folder / "run" / "summary.json").exists():
        return  # its mpirun kills a second after the signal, whatever step a busy machine is in
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    whole = summary(folder)
    # Open MPI's mpirun makes SIGTERM of it, which is what a scheduler sends.
    assert whole["status"] == ("preempted" if is_open_mpi() else "interrupted")
    assert whole["steps"] == len(lines) == json.loads(lines[-1])["step"]


def test_the_error_of_a_library_user_is_printed_once(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import mntrain\nwith mntrain.init(algorithm='ring') as world:\n    print('not reached')\n"
    )
    result = mpirun(3, [sys.executable, script], timeout=60)
    assert result.returncode == 1
    assert (
        result.stderr.count("unknown algorithm 'ring': choose auto, flat, lanes, leader, naive")
        == 1
    )
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_exception_in_a_thread_of_one_rank_ends_the_job(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import threading\nimport mntrain\n"
        "def bug():\n    raise KeyError('in a thread')\n"
        "with mntrain.init(tune=False) as world:\n"
        "    if world.rank == 1:\n        threading.Thread(target=bug).start()\n"
        "    threading.Event().wait()\n"
    )
    result = mpirun(2, [sys.executable, script], timeout=60)
    assert not result.timed_out, result.report()
    assert result.returncode not in (0, None)
    assert "rank 1 of 2" in result.stderr
    assert "KeyError: 'in a thread'" in result.stderr


def test_an_agreed_error_leaves_the_world_in_order_for_those_who_catch_it(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import mntrain\n"
        "with mntrain.init(tune=False) as world:\n"
        "    try:\n"
        "        with world.agreement():\n"
        "            if world.rank == 1:\n"
        "                raise ValueError('not here')\n"
        "    except mntrain.AgreedError as error:\n"
        "        told = world.gather(str(error))\n"
        "    if world.rank == 0:\n"
        "        print(told)\n"
    )
    result = completed(mpirun(2, [sys.executable, script], timeout=60))
    assert result.stdout.strip() == "['rank 1: not here', 'rank 1: not here']"
