"""The scripts of slurm/ in a real Slurm, and what befalls long runs there: signals, walls, crashes.

A story is what a few jobs go through in a cluster of their own; tests look at how it ended. The
stories that the selected tests ask for are told side by side, for most of their time is waiting.
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from job import SMALL, losses, metrics, summary, write_corpus
from launch import is_open_mpi

from slurm import SlurmCluster, available

pytestmark = [pytest.mark.cluster, pytest.mark.thorough, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
STEPS = 40
LONG = ["--task", "slow:Slow", "--train.steps", str(STEPS)]
TASK = '''
import pathlib, time
from mntrain.tasks.lm import LanguageModel

class Slow(LanguageModel):
    """Takes its time, until somebody says that it need not."""
    def loss(self, model, batch):
        if model.training and not pathlib.Path("go").exists():
            time.sleep(0.5)
        return super().loss(model, batch)
'''

# In place of Python: what takes long on a busy machine comes before the signal to start.
STARTER = f"""#!{sys.executable}
import os, pathlib, runpy, sys, time
import torch._dynamo
pathlib.Path("ready-" + os.environ["SLURM_PROCID"]).touch()
while "launch" not in sys.argv and not pathlib.Path("start").exists():
    time.sleep(0.1)
sys.argv = sys.argv[2:]
sys.path.insert(0, "")
runpy.run_module("mntrain", run_name="__main__", alter_sys=True)
"""

PLUGINS = ("pmix", "pmi2") if is_open_mpi() else ("pmi2", "pmix")  # the right and the wrong one
ENDED = ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT")
STORIES: dict[str, Callable] = {}
ONE_AT_A_TIME = threading.Lock()  # clusters that look for a free network


def story(tell: Callable) -> Callable:
    """Make a fixture of what `tell(cluster, folder)` gives."""
    STORIES[tell.__name__] = tell

    @pytest.fixture(scope="module", name=tell.__name__)
    def told(stories):
        return stories[tell.__name__].result()

    return told


@pytest.fixture(scope="module")
def stories(request, tmp_path_factory) -> Iterator[dict[str, Future]]:
    if (reason := available()) is not None:
        pytest.skip(reason)
    mine = [item for item in request.session.items if item.path == request.path]
    wanted = {name for item in mine for name in item.fixturenames} & STORIES.keys()
    with ThreadPoolExecutor(5) as pool:
        yield {
            name: pool.submit(_told, tell, tmp_path_factory.mktemp(name))
            for name, tell in STORIES.items()
            if name in wanted
        }
        pool.shutdown(cancel_futures=True)


# Seen once in some hundred starts, and twice in a row on a busy machine: Slurm 22.05 takes the
# first 1024 bytes of a rank's message for all of it, and MPICH ends in MPI_Init. That says nothing
# about the scripts: see slurm/README.md.
PMI2_LOST = "mpi/pmi2: request not begin with 'cmd='"


def _told(tell: Callable, folder: Path):
    for start in range(3):
        try:
            return _told_once(tell, folder / f"start {start}")
        except RuntimeError as error:
            if PMI2_LOST not in str(error):
                raise
    return _told_once(tell, folder / "last start")


def _told_once(tell: Callable, folder: Path):
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        with ONE_AT_A_TIME:
            nodes = 3 if tell.__name__ == "relaunched" else 2
            cluster = stack.enter_context(SlurmCluster(nodes, cpus=8))
        return tell(cluster, folder)


@dataclass
class SlurmJob:
    """A job of a script in a cluster: its run directory is folder/run, its log folder/log."""

    cluster: SlurmCluster
    folder: Path
    id: str

    @classmethod
    def submit(
        cls,
        cluster: SlurmCluster,
        folder: Path,
        script: str,
        *options: str,
        slurm=("--ntasks-per-node=1",),
        **env: str,
    ) -> "SlurmJob":
        """Submit a job: two ranks on two nodes, unless sbatch's options, `slurm`, say else."""
        folder.mkdir(exist_ok=True)
        (folder / "slow.py").write_text(TASK)
        settings = {
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]),
            # A node has more ranks than this machine has cores.
            "MPIRUN_OPTIONS": "--bind-to none" if is_open_mpi() else "-bind-to none",
            "OMP_NUM_THREADS": "1",
            "RUN_DIR": "run",
        }
        words = [*SMALL, "--data.path", str(write_corpus(folder)), *options]
        options = ["--output=log", *slurm]
        id = cluster.submit(
            SCRIPTS / script, *words, cwd=folder, env=settings | env, options=options
        )
        return cls(cluster, folder, id)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def until(self, happened: Callable[[], bool], what: str, timeout: float = 250) -> None:
        deadline = time.monotonic() + timeout
        while not happened():
            facts = self.cluster.facts(self.id)
            if time.monotonic() > deadline or facts["JobState"] in ENDED:
                raise RuntimeError(
                    f"{what} has not happened: {facts}\n{self.log}\n{self.cluster.logs()}"
                )
            time.sleep(0.4)

    def until_step(self, step: int) -> None:
        file = self.folder / "run" / "metrics.jsonl"
        self.until(lambda: file.exists() and file.read_text().count("\n") >= step, f"step {step}")

    def until_checkpoint(self, step: int) -> None:
        """Wait for a complete checkpoint of `step` or a later one: saves lag behind the steps."""
        folder = self.folder / "run" / "checkpoints"
        first = f"step-{step:08}"
        self.until(
            lambda: any(found.name >= first for found in folder.glob("step-*")),
            f"a checkpoint of step {step}",
        )

    def until_restart(self, number: int) -> None:
        mark = f"requeue.sbatch: job {self.id}, start {1 + number}: on "
        self.until(lambda: mark in self.log, f"restart {number}")

    def go(self) -> None:
        """Let the job be quick from now on."""
        (self.folder / "go").touch()

    def end(self, state: str = "COMPLETED", timeout: float = 250) -> "SlurmJob":
        """Wait for the job's end, which must be this one; with its log, if it is another."""
        try:
            self.cluster.wait(self.id, [state], timeout)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.log}\n{self.cluster.logs()}") from None
        self.facts = self.cluster.facts(self.id)
        return self


@story
def lost_its_shell(cluster, folder):
    """The node with the batch shell crashes, and comes back."""
    job = SlurmJob.submit(cluster, folder, "requeue.sbatch", *LONG, "--checkpoint.every", "1")
    job.until_checkpoint(3)
    cluster.crash("n1")
    job.until(lambda: cluster.facts(job.id)["Restarts"] == "1", "that Slurm notices")
    job.go()
    cluster.boot("n1")
    return job.end()


@story
def out_of_time(cluster, folder):
    """An allocation whose end is near; in the next one, somebody has seen enough."""
    # In place of USR1, which Slurm may send up to a minute early: CONT does nothing.
    python, options = folder / "python", ["--ntasks-per-node=1", "--signal=B:CONT@0"]
    python.write_text(STARTER)
    python.chmod(0o755)
    settings = {"PYTHON": str(python), "MPI_PLUGIN": PLUGINS[0]}  # the starter would not tell it
    job = SlurmJob.submit(cluster, folder, "requeue.sbatch", *LONG, slurm=options, **settings)
    job.until(lambda: all((folder / f"ready-{rank}").exists() for rank in "01"), "a start")
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 40))
    cluster.call("scontrol", "update", f"jobid={job.id}", f"EndTime={end}")
    (folder / "start").touch()
    job.until(lambda: cluster.facts(job.id)["Restarts"] == "1", "a requeue")
    cluster.call("scontrol", "update", f"jobid={job.id}", "TimeLimit=20")
    job.until_restart(1)
    job.until_step(len(metrics(folder)) + 1)
    cluster.cancel(job.id)
    return job.end("CANCELLED")


@story
def lost_a_node(cluster, folder):
    """The other node crashes, and stays away."""
    options = [*LONG, "--checkpoint.every", "1"]
    nodes = ["--nodes=1-2", "--mincpus=1"]
    job = SlurmJob.submit(
        cluster, folder, "requeue.sbatch", *options, slurm=nodes, RANKS_PER_NODE="1"
    )
    job.until_checkpoint(3)
    cluster.crash("n2")
    job.go()
    return job.end()


@story
def relaunched(cluster, folder):
    """A node of two is lost, and a third one is spare."""
    options = [*LONG, "--checkpoint.every", "1"]
    nodes = ["--nodes=3", "--ntasks-per-node=1", "--no-kill"]
    settings = {"RELAUNCH": "--spares 1"}
    job = SlurmJob.submit(cluster, folder, "train.sbatch", *options, slurm=nodes, **settings)
    job.until_checkpoint(3)
    cluster.crash("n2")
    job.until(lambda: "launch: start 2 on n1, n3" in job.log, "another start")
    job.go()
    return job.end()


@story
def uninterrupted(cluster, folder):
    """The run of the other stories, in one piece."""
    (folder / "go").touch()
    return SlurmJob.submit(cluster, folder, "train.sbatch", *LONG).end()


@story
def launched(cluster, folder):
    """Jobs at once: by mpirun; by an srun without a plugin, and with a wrong one; two arrays."""
    wide = ["--ntasks-per-node=2"]
    mpirun = SlurmJob.submit(cluster, folder / "mpirun", "train-mpirun.sbatch", *LONG, slurm=wide)
    mpirun.go()
    alone, wrong = (
        SlurmJob.submit(cluster, folder / plugin, "train.sbatch", MPI_PLUGIN=plugin)
        for plugin in ("none", PLUGINS[1])
    )
    (folder / "sweep.txt").write_text("--run.seed 1\n--optim.lr '0.001'  --run.seed 2\n")
    arguments = [cluster, folder, "array.sbatch"]
    settings = {"SWEEP": "sweep.txt", "SWEEP_DIR": "sweep"}
    array = SlurmJob.submit(
        *arguments, slurm=["--array=1-3", "--ntasks-per-node=1", "--output=log-%a"], **settings
    )
    for task in (1, 2):
        cluster.wait(f"{array.id}_{task}", timeout=250)
    cluster.wait(f"{array.id}_3", ["FAILED"])
    again = SlurmJob.submit(*arguments, slurm=["--array=2", "--output=log"], **settings)
    return mpirun.end(), alone.end("FAILED"), wrong.end("FAILED"), folder, again.end()


@story
def signalled(cluster, folder):
    """A signal to the batch shell, and, when the run goes on, another one to the tasks."""
    job = SlurmJob.submit(cluster, folder, "requeue.sbatch", *LONG)
    job.until_step(2)
    cluster.signal(job.id, "USR1", "--batch")
    job.until_restart(1)
    job.until_step(len(metrics(folder)) + 1)
    cluster.signal(job.id, "TERM")
    job.until_restart(2)
    job.go()
    return job.end()


@story
def outranked(cluster, folder):
    """A job of the partition `urgent` wants the nodes, of one that mpirun started."""
    job = SlurmJob.submit(cluster, folder, "requeue.sbatch", *LONG, LAUNCHER="mpirun")
    job.until_step(2)
    (folder / "urgent.sh").write_text("#!/bin/sh\nsleep 0.1\n")
    options = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    urgent = cluster.submit(folder / "urgent.sh", options=options)
    cluster.wait(urgent)
    assert cluster.state(job.id) in ("PENDING", "COMPLETING"), job.log
    job.go()
    return job.end()


def test_srun_starts_ranks_on_all_nodes(uninterrupted):
    whole = summary(uninterrupted.folder)
    assert whole["status"] == "completed"
    assert [rank["host"] for rank in whole["ranks"]] == ["n1", "n2"]
    assert whole["world"]["nodes"] == 2
    assert "train.sbatch: run: completed" in uninterrupted.log


def test_mpirun_starts_ranks_on_all_nodes(launched, uninterrupted):
    mpirun, *_ = launched
    whole = summary(mpirun.folder)
    assert [rank["host"] for rank in whole["ranks"]] == ["n1", "n1", "n2", "n2"]
    # Sums in another order: fp32 rounding, grown over the steps.
    assert losses(mpirun.folder) == pytest.approx(losses(uninterrupted.folder), rel=2e-4)


def test_ranks_that_train_alone_fail_and_say_which_plugin_is_right(launched):
    _, alone, *_ = launched
    assert not (alone.folder / "run").exists()
    assert "the launcher started 2 ranks" in alone.log
    assert "--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH" in alone.log
    assert "no summary.json of this job" in alone.log


def test_the_wrong_plugin_of_srun_is_one_sentence_before_mpi_dies(launched):
    _, _, wrong, *_ = launched
    ours = [line for line in wrong.log.splitlines() if line.startswith("mntrain: ")]
    (line,) = [line for line in ours if not line.startswith("mntrain: launch: ")]
    assert line.startswith(f"mntrain: srun --mpi={PLUGINS[1]} passes the ranks by PMI")
    assert line.endswith(f"Fix: start the job with srun --mpi={PLUGINS[0]}")
    assert not re.search("Traceback|MPI_ABORT|Abort\\(|Fatal error", wrong.log), wrong.log
    assert not (wrong.folder / "run").exists()


def test_each_task_of_an_array_has_a_run_of_its_own(launched):
    *_, folder, again = launched
    ends = [json.loads((folder / "sweep" / n / "summary.json").read_text()) for n in "12"]
    assert [end["status"] for end in ends] == ["completed"] * 2
    configurations = [(folder / "sweep" / n / "config.toml").read_text() for n in "12"]
    assert "seed = 1\n" in configurations[0]
    assert "seed = 2\n" in configurations[1]
    assert "lr = 0.001\n" in configurations[1]
    assert "sweep.txt has lines 1 to 2, but this is task 3" in (folder / "log-3").read_text()
    assert again.log.strip() == "array.sbatch: sweep/2 is complete: nothing to do"


def check_same(job, uninterrupted) -> None:
    """The run has completed, with the losses of one in one piece."""
    whole = summary(job.folder)
    assert (whole["status"], whole["steps"]) == ("completed", STEPS)
    assert whole["resumed_from"] is not None
    assert losses(job.folder) == losses(uninterrupted.folder)


def test_a_signal_to_the_shell_or_to_the_tasks_saves_and_requeues(signalled, uninterrupted):
    assert "start 1: preempted, after USR1" in signalled.log
    assert "start 2: preempted (" in signalled.log
    assert signalled.log.count("requeueing: SIG") == 2
    check_same(signalled, uninterrupted)


def test_a_job_ends_itself_before_its_allocation_and_requeues(out_of_time, uninterrupted):
    # On a busy machine, processes may be ending still when the time is over.
    assert "start 1: preempted" in out_of_time.log
    end = re.search(r"requeueing: the allocation ends (.*)", out_of_time.log)
    saved = out_of_time.folder / summary(out_of_time.folder)["resumed_from"] / "manifest.json"
    assert saved.stat().st_mtime < datetime.fromisoformat(end[1]).timestamp()
    ours, theirs = (
        [line["loss"] for line in metrics(job.folder)] for job in (out_of_time, uninterrupted)
    )
    assert ours == theirs[: len(ours)]


def test_scancel_saves_and_ends_for_good(out_of_time):
    assert out_of_time.log.count("requeueing") == 1
    assert out_of_time.facts["Restarts"] == "1"
    end = summary(out_of_time.folder)
    assert end["status"] == "preempted", out_of_time.log
    assert int(end["checkpoint"][-8:]) == end["steps"] < STEPS


def test_a_job_gives_way_to_an_urgent_one_and_goes_on_after_it(outranked, uninterrupted):
    # Slurm signals the shell and the ranks at once: who saves first has had it of either.
    assert "start 1: preempted" in outranked.log, outranked.log
    assert outranked.facts["Restarts"] == "1"
    check_same(outranked, uninterrupted)


def test_a_run_whose_batch_shell_is_lost_goes_on_when_the_node_is_back(
    lost_its_shell, uninterrupted
):
    assert "start 1: on n[1-2], ranks: 2" in lost_its_shell.log
    assert lost_its_shell.facts["Restarts"] == "1"
    check_same(lost_its_shell, uninterrupted)


def test_a_run_that_lost_a_node_goes_on_with_the_one_left(lost_a_node, uninterrupted):
    assert "start 1: on n[1-2], ranks: 2" in lost_a_node.log
    assert "start 2: on n1, ranks: 1" in lost_a_node.log
    whole = summary(lost_a_node.folder)
    assert (whole["status"], whole["steps"]) == ("completed", STEPS)
    assert [rank["host"] for rank in whole["ranks"]] == ["n1"]
    done = int(whole["resumed_from"][-8:])
    assert done >= 3
    # On as many ranks the losses are the same to the bit; on fewer, sums are in another order.
    ours, theirs = losses(lost_a_node.folder), losses(uninterrupted.folder)
    assert ours[:done] == theirs[:done]
    assert ours == pytest.approx(theirs, rel=2e-4)


def test_a_run_that_lost_a_node_goes_on_in_its_allocation_on_a_spare_one(relaunched, uninterrupted):
    assert relaunched.facts["Restarts"] == "0"
    assert [rank["host"] for rank in summary(relaunched.folder)["ranks"]] == ["n1", "n3"]
    check_same(relaunched, uninterrupted)
