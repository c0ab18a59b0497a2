"""Options of `python -m mntrain doctor`. Needs neither torch nor MPI."""

import re
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from mntrain.options.command_line import parse_options
from mntrain.options.types import STRICT, OptionalPath

_PROGRAM = "python -m mntrain doctor"
_DESCRIPTION = f"""Check in a few seconds that this cluster is fit to train: the launcher and MPI,
the hosts, the run directory, and the links between them. The exit code is 0 if no check fails.
  {_PROGRAM}
      this machine
  mpirun -n 16 {_PROGRAM} --run.dir runs
      the hosts of a job; in a batch script, before the training"""

_BITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def _parse_rate(value: Any) -> Any:
    if value in (None, "none"):
        return None
    text = value.lower() if isinstance(value, str) else ""
    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[kmgt]?bit", text):
        raise ValueError("must be a rate such as 10gbit, 100mbit or 500kbit")
    return text


OptionalRate = Annotated[str | None, BeforeValidator(_parse_rate)]  # as tc writes it


def mb_per_s(rate: str) -> float:
    """Return a rate such as "10gbit" in 10^6 bytes per second."""
    number = rate.rstrip("kmgtbi")
    return float(number) * _BITS[rate.removeprefix(number)] / 8e6


@dataclass(frozen=True, config=STRICT)
class DoctorRunOptions:
    """The run directory."""

    dir: OptionalPath = Field(
        default=None, description="folder whose file system is checked. none: the current one."
    )


@dataclass(frozen=True, config=STRICT)
class DoctorCheckpointOptions:
    """Checkpoints in the nodes' memory."""

    local: OptionalPath = Field(
        default=None,
        description="folder on each node for --checkpoint.local of a job, which is checked. none: "
        "there is to be none.",
    )


@dataclass(frozen=True, config=STRICT)
class DoctorOptions:
    """The report. The same on all ranks."""

    json: bool = Field(default=False, description="print one JSON object instead of a table.")
    expect: OptionalRate = Field(
        default=None,
        description="rate that each direction between two nodes should reach, such as 10gbit or "
        "100mbit; less than half of it fails. none: directions are compared with each other.",
    )
    timeout: float = Field(
        default=60.0,
        gt=0,
        description="seconds without any progress until it gives up, for example while ranks "
        "start from a slow file system. It gives up earlier if a node does not answer.",
    )
    run: DoctorRunOptions = Field(default=DoctorRunOptions())
    checkpoint: DoctorCheckpointOptions = Field(default=DoctorCheckpointOptions())


parse = partial(parse_options, DoctorOptions, prog=_PROGRAM, description=_DESCRIPTION)
