"""`make ... MPI=system` with the MPI libraries that this system has.

The virtual environment has the packages of the running one, but no MPI library.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from launch import OPEN_MPI_ENVIRONMENT

ROOT = Path(__file__).parents[2]
HERE = Path(sys.executable).parent
PRINT_LIBRARY = "from mpi4py import MPI; print(MPI.Get_library_version())"

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


@pytest.mark.parametrize("library", ["MPICH", "Open MPI"])
def test_an_environment_for_the_mpi_of_the_system_has_the_library_of_its_mpirun(library, tmp_path):
    if (mpirun := system_mpirun(library)) is None:
        pytest.skip(f"this system has no mpirun of {library}")
    # Open MPI looks at its name; MPICH looks for its helpers beside it.
    write_script(tmp_path / "bin" / "mpirun", f'exec -a "$(dirname {mpirun})/mpirun" {mpirun} "$@"')
    environment = make_environment(tmp_path / "environment")
    done = make("system-mpi", "MPI=system", f"VENV={environment}", first_on_path=tmp_path / "bin")
    assert done.returncode == 0, done.stdout + done.stderr
    words = ["-n", "1", environment / "bin" / "python", "-c", PRINT_LIBRARY]
    ran = subprocess.run(
        [tmp_path / "bin" / "mpirun", *words],
        env=os.environ | OPEN_MPI_ENVIRONMENT | {"LD_LIBRARY_PATH": str(environment / "lib")},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    name, number = re.match(r"(MPICH|Open MPI)[ v]*(?:Version:\s*)?([\d.]+)", ran.stdout).groups()
    assert name == library
    assert number in version(mpirun)
