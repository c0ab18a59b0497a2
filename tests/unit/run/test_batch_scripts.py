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
