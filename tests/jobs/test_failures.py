"""Failures of jobs: one clear error, a quick end, an exit code that is not 0, nothing lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job import LATE, autopsy, completed, job_words, metrics, summary, train
from launch import in_own_group, is_open_mpi, mpirun
from waiting import until

TASKS = (
    LATE
    + """
class Slow(LanguageModel):
    def loss(self, model, batch):
        time.sleep(0.05)
        return super().loss(model, batch)
"""
)


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
    assert result.stderr.count("mntrain: rank 1: forward in step 2 of sample") == 1
    assert len(metrics(folder)) < 6
    assert summary(folder)["status"] == "crashed"
    assert "failed with KeyError: 'a bug of rank one'" in summary(folder)["reason"]
    done, line = autopsy(folder / "run"), TASKS[: TASKS.index("raise KeyError")].count("\n") + 1
    assert done.returncode == 1, done.stdout
    assert f"rank 1 on {os.uname().nodename} stopped first." in done.stdout
    where = f"{folder / 'broken.py'}:{line}"
    assert f"in forward of step 2: KeyError: 'a bug of rank one', at {where}" in done.stdout
    assert "cause     an exception on one rank: KeyError" in done.stdout


def interrupted(
    folder: Path, *more: str, task: str = "Slow", lines: int = 2, pause: float = 0
) -> subprocess.CompletedProcess:
    """Start a long job, press Ctrl-C once it has taken some steps, and wait for its end."""
    options = ["--train.steps", "100000", "--task", f"broken:{task}", *more]
    command = job_words(folder, *options)
    with in_own_group(command, folder, ranks=2) as process:
        log = folder / "run" / "metrics.jsonl"
        until(lambda: log.exists() and log.read_text().count("\n") >= lines, process)
        time.sleep(pause)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
        out, err = process.communicate(timeout=250)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_ctrl_c_ends_the_job_cleanly_once(folder):
    done = interrupted(folder)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    if is_open_mpi() and not (folder / "run" / "summary.json").exists():
        return  # its mpirun kills a second after the signal, whatever step a busy machine is in
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    whole = summary(folder)
    # Open MPI's mpirun makes SIGTERM of it, which is what a scheduler sends.
    assert whole["status"] == ("preempted" if is_open_mpi() else "interrupted")
    assert whole["steps"] == len(lines) == json.loads(lines[-1])["step"]


@pytest.mark.thorough
def test_a_job_that_hangs_ends_after_a_signal_and_says_whom_it_waits_for(folder):
    done = interrupted(folder, "--run.grace", "1", task="Hangs", lines=1, pause=1)
    assert done.returncode != 0
    if is_open_mpi():
        return  # its mpirun kills a second after the signal
    assert done.returncode == 130
    assert "for rank 1 on" in done.stderr
    assert "in broken" in done.stderr
    assert summary(folder)["status"] == "stalled"


def run(folder, text, ranks, *words, **options):
    """Run a script of one's own."""
    script = folder / "own.py"
    script.write_text(text)
    return mpirun(ranks, [sys.executable, script, *words], cwd=folder, timeout=250, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("late", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_rank_that_does_not_come_to_the_start_ends_the_job(tmp_path, late):
    text = (
        "import os, time\n"
        "rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        f"time.sleep(1000 if rank == '{late}' else 0)\n"
        "import mntrain\n"
        "from mntrain.watchdog import start_timer; start_timer.LEAST_S = 0\n"
        "mntrain.init(timeout=3, warn_after=1)\n"
    )
    result = run(tmp_path, text, 2)
    assert result.returncode != 0
    assert not result.timed_out
    assert result.stderr.count("Timeout (0:00:0") == 1, result.report()
    assert "in _wait_until_all_ranks_have_started_mpi" in result.stderr
    assert f'File "{tmp_path}/own.py", line 6 in <module>' in result.stderr


LATE_AT_EXIT = """
import sys, time
from pathlib import Path
import mntrain, torch
world = mntrain.init(device="cpu", warn_after=0.5, ranks_per_node=1)
def trained(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(4)])
    optimizer = world.optimizer(model, torch.optim.AdamW, **options)
    for _ in range(2):
        model(torch.ones(2, 30)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
if sys.argv[1] == "open":
    expected, late = trained(), trained(stage=2, overlap_forward=True)
else:
    world.sum([1.0])
    world.close()
for turn in range(600):
    if world.rank != 1 or Path("told").exists():
        break
    time.sleep(0.1)
if world.rank == 1 and sys.argv[1] == "open":  # the others, at the exit, still send parameters
    pairs = zip(expected.parameters(), late.parameters())
    assert all(torch.equal(a, b) for a, b in pairs)
print("end")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("world", ["open", pytest.param("closed", marks=pytest.mark.exhaustive)])
def test_ranks_at_the_exit_say_for_which_rank_they_wait(tmp_path, world):
    (tmp_path / "late.py").write_text(LATE_AT_EXIT)
    with in_own_group([sys.executable, "late.py", world], tmp_path, ranks=2) as job:
        lines = []
        for line in job.stderr:
            lines.append(line)
            if "at the exit" in line:
                (tmp_path / "told").touch()
        out, _ = job.communicate()
    said = "".join(lines)
    assert job.returncode == 0, said
    assert out.count("end") == 2
    host = os.uname().nodename
    assert (
        f" at the exit for rank 1 on {host}, which has not reached the end of the job\n"
        f"  rank 1 on {host} (process " in said
    )
    assert "in no collective, at " in said
    assert "late.py:23 in <module>" in said


@pytest.mark.exhaustive
def test_a_save_that_the_end_of_the_script_cuts_is_told_and_keeps_no_rank(tmp_path):
    text = (
        "import time, torch, mntrain\n"
        "def main():\n"
        "    world = mntrain.init(device='cpu')\n"
        "    model = torch.nn.Linear(3, 5)\n"
        "    optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)\n"
        "    checkpoints = world.checkpoints('run', model=model, optimizer=optimizer, every=1)\n"
        "    checkpoints.restore()\n"
        "    model(torch.ones(2, 3)).sum().backward()\n"
        "    optimizer.step()\n"
        "    checkpoints.save(1)\n"
        "    time.sleep(0.5)\n"
        "main()\n"
    )
    result = completed(run(tmp_path, text, 2))
    said = "run/checkpoints/step-00000001 was not saved, since the script has ended before"
    assert result.stderr.count(said) == 1, result.report()
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "checkpoints" / "step-00000001").exists()


FAULTY = """
import os, signal, sys, time
import mntrain, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

KIND, STAGE, LIMIT_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
STEP = 2  # in which it happens, on rank 1

def hang():
    time.sleep(1000)

def end_process():
    os.kill(os.getpid(), signal.SIGKILL)

class Samples(Dataset):
    # A worker process makes them, and ends in its third batch.
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 4 * STEP + 1:
            end_process()
        return torch.randn(32)

def train(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=STAGE)
    faulty, batches = world.rank == 1, None
    if faulty and KIND == "dead worker":
        batches = iter(DataLoader(Samples(), batch_size=4, num_workers=1))
    for step in range(6):
        if faulty and step == STEP:
            {"hang": hang, "killed": end_process}.get(KIND, lambda: None)()
        loss = model(next(batches) if batches else torch.randn(4, 32)).square().mean()
        if faulty and step == STEP and KIND == "continues":
            continue  # as a script does that catches an error
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        world.collectives.all_reduce(torch.ones(8)).wait()

with mntrain.init(device="cpu", timeout=LIMIT_S, warn_after=5.0) as world:
    train(world)
"""

HUNG = r"error: ranks 0, 2 on \S+ have waited \d+ s for rank 1 on (.*\n)*.*own.py:\d+ in hang"
LOST = r"error: rank 1 on \S+ is lost: its process has ended"
APART = r"error: ranks (disagree|wait for each other)(.*\n)*  rank 1: "
ENDED = r"mntrain: rank 1 of \d on \S+ failed:\n(.*\n)*.*DataLoader worker .* (is killed|exited)"


@pytest.mark.parametrize(
    ("kind", "stage", "report"),
    [
        pytest.param("hang", 1, HUNG, id="hang"),
        pytest.param("killed", 2, LOST, id="killed"),
        pytest.param("continues", 0, APART, id="continues", marks=pytest.mark.exhaustive),
        pytest.param("dead worker", 1, ENDED, id="dead worker", marks=pytest.mark.exhaustive),
    ],
)
def test_a_fault_is_reported_once_with_its_rank(tmp_path, kind, stage, report):
    hung, killed = kind == "hang", kind == "killed"
    # Ranks that wait are late after 15 s: a busy machine delays others, too.
    words = [kind, str(stage), "15" if hung else "150"]
    result = run(tmp_path, FAULTY, 3 if hung else 2, *words, outlived=killed)
    assert not result.timed_out, result.report()
    assert killed or result.left == [], result.report()
    assert result.returncode == 1 or (is_open_mpi() and result.returncode), result.report()
    assert re.search(report, result.stderr), result.report()
    reports = result.stderr.count("mntrain: error: ") + result.stderr.count(" failed:\n")
    assert reports == 1, result.report()
    if hung:  # stacks of those that wait, and of the cause
        called = r"in gradient bucket 0: reduce_scatter of 2632 float32 \(collective \d+ of opt"
        assert re.search(called, result.stderr), result.report()
        waiting = result.stderr[result.stderr.index("stack of ranks 0, 2") :]
        assert re.search(r'own.py", line \d+, in train\n    loss.backward\(\)', waiting)
        assert "time.sleep(1000)" in result.stderr


@pytest.mark.parametrize(
    "started_by",
    ["mntrain", *(pytest.param(it, marks=pytest.mark.exhaustive) for it in ("mpi4py", "script"))],
)
def test_children_end_in_every_way_without_ending_mpi_for_their_rank(tmp_path, started_by):
    script = Path(__file__).parents[1] / "helpers" / "ends_of_children.py"
    words = [sys.executable, script, started_by, tmp_path / "run"]
    result = completed(mpirun(2, words, timeout=250))
    said = re.search(r"(\d+) last words; the job goes on", result.stdout)
    assert said, result.report()
    assert result.stdout.count("last words\n") == int(said[1])
    assert result.stderr.count("'in a child'") == 2  # lines of two ranks may be mixed
    assert result.stderr.count("a reason") == 2
    assert result.stderr.count("a forked child of a rank and cannot be a rank itself") == 2
