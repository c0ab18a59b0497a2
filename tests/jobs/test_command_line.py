import subprocess
import sys

import pytest

import mntrain
from mntrain import __version__
from mntrain.__main__ import main

COMMAND = [sys.executable, "-m", "mntrain"]
RANK_VARIABLES = ["PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"]
BAD = ["--train.batchsize", "32"]
MESSAGE = "mntrain: --train.batchsize: no such option; did you mean --train.batch-size?\n"

pytestmark = pytest.mark.usefixtures("no_launcher")


def code_of(argv):
    """The exit code of `main`, returned or raised."""
    try:
        return main(argv)
    except SystemExit as exit_:
        return exit_.code


def test_help_is_printed_without_importing_torch_or_mpi():
    command = [sys.executable, "-X", "importtime", "-m", "mntrain", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert result.stdout.startswith("usage: python -m mntrain")
    assert "--train.batch-size INT" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "mntrain.options.command_line" in imported
    assert not imported & {"torch", "mpi4py", "mntrain.train.trainer"}


@pytest.mark.thorough
def test_package_gives_each_name_it_lists_once_asked_for():
    program = (
        "import sys, mntrain\n"
        "assert set(mntrain.__all__) <= set(dir(mntrain))\n"
        "assert 'torch' not in sys.modules\n"
        "from mntrain import *\n"
        "print(mntrain.init is init, *(name for name in mntrain.__all__ if name in globals()))\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=True
    )
    assert result.stdout.split() == ["True", *mntrain.__all__]
    with pytest.raises(AttributeError, match="module 'mntrain' has no attribute 'Wrold'"):
        mntrain.Wrold  # noqa: B018 - the look-up is what raises


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", *BAD], MESSAGE),
        (
            ["report", "runs/a", "--svgs=x"],
            "mntrain: --svgs: no such option; python -m mntrain report --help lists all\n",
        ),
        (
            ["report"],
            "mntrain: the following arguments are required: RUN_DIR; see python -m mntrain report "
            "--help\n",
        ),
        (
            ["launch", "mpirun", "-n", "4", "python"],
            "mntrain: launch: no command: give one after --, such as -- mpirun -n 4 python ...\n",
        ),
        (
            ["launch", "--spares", "--", "mpirun"],
            "mntrain: argument --spares: expected one argument; see python -m mntrain launch "
            "--help\n",
        ),
        (
            ["autopsy", "runs/a", "-v"],
            "mntrain: -v: no such option; python -m mntrain autopsy --help lists all\n",
        ),
        (
            ["ckpt", "show", "runs/a", "--all"],
            "mntrain: --all: no such option; python -m mntrain ckpt --help lists all\n",
        ),
        (
            ["trian", "--train.steps", "5"],
            "mntrain: trian: no such command; give train (default), verify, bench, doctor, "
            "ckpt, autopsy, launch, plan or report\n",
        ),
    ],
)
def test_unknown_commands_and_options_are_one_line_with_those_that_exist(capsys, argv, said):
    assert code_of(argv) == 2
    assert capsys.readouterr() == ("", said)


def test_version_and_arguments_of_the_process_by_default(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mntrain", "--version"])
    assert main(["--version"]) == main() == 0
    assert capsys.readouterr() == (2 * f"mntrain {__version__}\n", "")


@pytest.mark.parametrize("argv", [BAD, ["--train.steps", "0"], ["--help"], ["--version"], ["foo"]])
@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_rank_0_alone_prints_and_all_exit_alike(capsys, monkeypatch, variable, argv):
    monkeypatch.setenv(variable, "0")
    code = code_of(argv)
    assert "".join(capsys.readouterr())
    monkeypatch.setenv(variable, "1")
    assert code_of(argv) == code
    assert capsys.readouterr() == ("", "")


def test_rank_of_mpirun_goes_before_that_of_the_slurm_task_it_runs_in(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert code_of(BAD) == 2
    assert capsys.readouterr() == ("", "")
