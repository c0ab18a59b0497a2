"""Options of `python -m mntrain doctor`. Needs neither torch nor MPI."""

from collections.abc import Sequence

from pydantic import Field
from pydantic.dataclasses import dataclass

from mntrain.cli import parse_options
from mntrain.config_types import STRICT, OptionalPath

_PROGRAM = "python -m mntrain doctor"
_DESCRIPTION = f"""Check in a few seconds that this cluster is fit to train: the launcher and MPI,
the hosts, the run directory, and the links between them. The exit code is 0 if no check fails.
  {_PROGRAM}
      this machine
  mpirun -n 16 {_PROGRAM} --run.dir runs
      the hosts of a job; in a batch script, before the training"""


@dataclass(frozen=True, config=STRICT)
class DoctorRunOptions:
    """The run directory."""

    dir: OptionalPath = Field(
        default=None, description="folder whose file system is checked. none: the current one."
    )


@dataclass(frozen=True, config=STRICT)
class DoctorOptions:
    """The report. The same on all ranks."""

    json: bool = Field(default=False, description="print one JSON object instead of a table.")
    run: DoctorRunOptions = Field(default=DoctorRunOptions())


def parse(argv: Sequence[str], *, print_errors: bool = True) -> DoctorOptions:
    """Return the options of a command line; errors as in `mntrain.cli.parse_options`."""
    return parse_options(
        DoctorOptions, argv, prog=_PROGRAM, description=_DESCRIPTION, print_errors=print_errors
    )
