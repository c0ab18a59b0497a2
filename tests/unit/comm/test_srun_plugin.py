"""The PMI plugin of srun that each MPI library gets."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from launch import is_open_mpi

from mntrain.checks.launcher import srun_plugin
from mntrain.comm import mpi
from mntrain.comm.srun_plugin import main

MPICH = (
    "MPICH Version:      5.0.2\nMPICH Release date: Mon Jan 12\nMPICH configure:    --prefix=/opt"
)


@pytest.mark.parametrize(
    ("library", "plugin"),
    [
        ("Open MPI v5.0.11, package: Open MPI", "pmix"),
        (MPICH, "pmi2"),
        (f"{MPICH} --with-pmilib=install", "pmi2"),
        (f"{MPICH} --with-pmix=/usr --with-device=ch4:ofi", "pmix"),
        (f"{MPICH} --with-pmi=pmix", "pmix"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.8 (ANL base 3.4a2)", "cray_shasta"),
        ("Intel(R) MPI Library 2021.16 for Linux* OS", "pmi2"),
        ("MVAPICH2 Version      :\t2.3.7", "pmi2"),
    ],
)
def test_each_library_has_its_plugin(library, plugin):
    assert srun_plugin(library) == plugin


def missing():
    raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")


def unknown():
    return SimpleNamespace(Get_library_version=lambda: "Foo MPI 1.0\nbuilt today")


@pytest.mark.parametrize(
    ("library", "words"),
    [(unknown, "not known: Foo MPI 1.0; load"), (missing, ": cannot load MPI library; load")],
)
def test_an_unknown_or_missing_library_is_one_line_with_a_fix(capsys, monkeypatch, library, words):
    monkeypatch.setattr(mpi, "import_unstarted", library)
    assert main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{words} the module" in err
    assert "or set MPI_PLUGIN" in err


def test_the_command_prints_the_plugin_of_this_python_without_torch_or_a_start_of_mpi():
    program = (
        "import runpy, sys\n"
        "try: runpy.run_module('mntrain.comm.srun_plugin', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end\n"
        "from mpi4py import MPI\n"
        "assert not MPI.Is_initialized()\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("pmix\n" if is_open_mpi() else "pmi2\n")
