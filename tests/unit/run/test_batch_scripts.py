"""The batch scripts, as far as they get without Slurm."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "slurm"


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.glob("*.sbatch")))
@pytest.mark.parametrize("python", ["", "/nowhere/python", "no-such-python"])
def test_a_missing_python_is_one_sentence(name, python, tmp_path):
    slurm = {"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "1", "CPUS_PER_TASK": "1", "JOB_ID": "7"}
    slurm |= {"JOB_NODELIST": "n1", "JOB_NUM_NODES": "1", "NTASKS": "2"}
    environment = {f"SLURM_{variable}": value for variable, value in slurm.items()}
    environment |= {"PATH": os.environ["PATH"], "PYTHON": python}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    result = subprocess.run(["bash", SCRIPTS / name], check=False, **options)
    assert result.returncode == 2
    assert result.stderr == (
        f"{name}: {python or '.venv/bin/python'} cannot be run in {tmp_path}: submit in the folder "
        "of .venv, or set PYTHON to the Python that mntrain is installed in\n"
    )
    assert not list(tmp_path.iterdir())


# In the place of Slurm's programs: a start writes a summary, and takes the steps of the file.
SRUN = """#!/bin/bash
[ "$2" != --nodes=1 ] || exit 0
mkdir -p run/2 && cd run/2
for step in $(cat ../../steps); do echo "{\\"step\\": $step}" >>metrics.jsonl; done
of="\\"status\\": \\"$(cat ../../status)\\", \\"reason\\": \\"SIGUSR1\\""
echo "{$of, \\"at\\": $RANDOM$RANDOM}" >summary.json
exit "$(cat ../../code)"
"""
# Of mntrain: `launch` runs its command once, and another one tells the plugin.
PYTHON = """#!/bin/bash
[ "$3" = launch ] || exec echo pmi2
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


class Slurm:
    """A folder in which the batch scripts run as job 9, the last task of the array 7."""

    def __init__(self, folder):
        self.folder = folder
        programs = {"srun": SRUN, "scontrol": '#!/bin/bash\necho "$*" >>requeued\n'}
        programs["python"] = PYTHON
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        slurm = {"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "2", "CPUS_PER_TASK": "1", "JOB_ID": "7"}
        slurm |= {"JOB_NODELIST": "n1", "JOB_NUM_NODES": "1", "RESTART_COUNT": "0"}
        self.environment = {f"SLURM_{variable}": value for variable, value in slurm.items()}
        self.environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": "./python"}
        self.environment |= {"SWEEP_DIR": "run", "RUN_DIR": "run/2", "SWEEP": "sweep"}
        (folder / "sweep").write_text("\n\n")

    def start(self, name, status, *steps, code=0):
        """Run a script whose job takes these steps; return its code, output and requeues."""
        (self.folder / "status").write_text(status)
        (self.folder / "code").write_text(str(code))
        (self.folder / "steps").write_text(" ".join(map(str, steps)))
        requeued = self.folder / "requeued"
        requeued.unlink(missing_ok=True)
        options = {"cwd": self.folder, "env": self.environment, "capture_output": True}
        done = subprocess.run(["bash", SCRIPTS / name], check=False, text=True, **options)
        asked = requeued.read_text().splitlines() if requeued.exists() else []
        return done.returncode, done.stdout + done.stderr, asked


# What is asked of Slurm: of an array the task alone, though the last one has the array's number.
REQUEUE = {"array.sbatch": ["requeue 7_2"], "requeue.sbatch": ["requeue 7"]}


@pytest.mark.parametrize("name", REQUEUE)
def test_a_job_is_requeued_alone_and_no_more_after_three_starts_without_a_step(name, tmp_path):
    slurm, asked = Slurm(tmp_path), REQUEUE[name]
    for steps in ((), (), (1,), (), (), (2, 3), ()):  # never three in a row
        assert slurm.start(name, "preempted", *steps)[::2] == (0, asked)
    assert slurm.start(name, "preempted")[::2] == (0, asked)
    code, said, requeued = slurm.start(name, "preempted")
    assert (code, requeued) == (1, [])
    assert "three starts in a row have made no step: give more --time" in said
    assert slurm.start(name, "preempted")[::2] == (0, asked)  # submitted again
    assert slurm.start(name, "crashed")[::2] == (1, [])
    assert slurm.start(name, "completed", 4)[::2] == (0, [])
    left = sorted(path.name for path in (tmp_path / "run" / "2").iterdir())
    assert left == ["metrics.jsonl", "summary.json"]


def test_a_job_is_requeued_if_too_few_nodes_are_left_for_launch_and_not_after_another_loss(
    tmp_path,
):
    slurm = Slurm(tmp_path)
    assert slurm.start("requeue.sbatch", "lost", 1, code=75)[::2] == (0, ["requeue 7"])
    assert slurm.start("requeue.sbatch", "lost", 2, code=1)[::2] == (1, [])
