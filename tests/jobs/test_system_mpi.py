"""`make train MPI=system` with the MPI libraries that this system has.

The virtual environment has the packages of the running one, but no MPI library, and a pip that
only notes its arguments.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from job import SMALL, summary, write_corpus

ROOT = Path(__file__).parents[2]
HERE = Path(sys.executable).parent

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


def version(mpirun: str) -> str:
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True)
    return done.stdout


def system_mpirun(library: str) -> str | None:
    """The mpirun of this library, outside of the running environment. Debian may have both."""
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != HERE)
    mark = {"MPICH": "HYDRA", "Open MPI": "open-mpi.org"}[library]
    names = ("mpirun", "mpirun.mpich", "mpirun.openmpi")
    found = filter(None, (shutil.which(name, path=path) for name in names))
    return next((mpirun for mpirun in found if mark in version(mpirun)), None)


def make_environment(folder: Path) -> Path:
    """Make an environment as make does, but for what pip would install."""
    venv.create(folder, symlinks=True)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = folder / "lib" / python / "site-packages" / "paths.pth"
    paths.write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    write_script(folder / "bin" / "pip", 'echo "$*" >>"$0.log"')
    (folder / ".made").touch()
    return folder


def write_script(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


def make(*words: str, first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Run make in the repository; after a time limit, end it and what it has started."""
    path = os.pathsep.join([str(first_on_path), os.environ["PATH"]])
    return subprocess.run(
        ["timeout", "250", "make", "-C", str(ROOT), f"PYTHON={sys.executable}", *words],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "library", ["MPICH", pytest.param("Open MPI", marks=pytest.mark.exhaustive)]
)
def test_make_train_runs_on_the_mpi_of_the_system(library, tmp_path):
    if (mpirun := system_mpirun(library)) is None:
        pytest.skip(f"this system has no mpirun of {library}")
    # Open MPI looks at its name; MPICH looks for its helpers beside it.
    write_script(tmp_path / "bin" / "mpirun", f'exec -a "$(dirname {mpirun})/mpirun" {mpirun} "$@"')
    environment = make_environment(tmp_path / "environment")
    data, run = write_corpus(tmp_path), tmp_path / "run"
    options = shlex.join([*SMALL, "--data.path", str(data), "--run.dir", str(run)])
    words = ["train", "RANKS=3", "MPI=system", f"VENV={environment}", f"ARGS={options}"]
    done = make(*words, first_on_path=tmp_path / "bin")
    assert done.returncode == 0, done.stdout + done.stderr
    installed = (environment / "bin" / "pip.log").read_text()
    assert installed == "install --quiet --no-compile --constraint constraints.txt --editable .\n"
    end = summary(tmp_path)
    assert (end["status"], end["world"]["nodes"]) == ("completed", 2)
    used = end["world"]["library"]
    assert used.startswith(library)
    assert used.removeprefix(library).strip() in version(mpirun)
