"""Options of `python -m mntrain bench`. Needs neither torch nor MPI."""

import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from mntrain.comm import algorithms
from mntrain.options.command_line import parse_options
from mntrain.options.config import Device
from mntrain.options.types import STRICT, OptionalPath, OrNone, unique

_PROGRAM = "python -m mntrain bench"
_DESCRIPTION = f"""Measure the collectives of this cluster in fp32, and the share of the link's
bandwidth that they reach between nodes. For example:
  mpirun -n 4 {_PROGRAM}
      all collectives, by all algorithms, at five sizes: about a minute
  mpirun -n 4 {_PROGRAM} --comm.ranks-per-node 2
      the same on one machine, as if it were two nodes
  mpirun -n 16 {_PROGRAM} --sizes 1M 256M --json bench.json
      two sizes, with all figures in a file"""

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
ALGORITHMS = algorithms.names()
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TOO_LARGE = 8 << 30  # bytes: elements are counted in 32 bits


def _parse_size(word: Any) -> Any:
    if not isinstance(word, str):
        return word
    match = re.fullmatch(r"(\d+)([KMG]?)", word.upper())
    nbytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if not nbytes or nbytes % 4:
        raise ValueError("must be a positive multiple of 4 bytes, such as 64K")
    if nbytes >= _TOO_LARGE:
        raise ValueError("must be less than 8G")
    return nbytes


@dataclass(frozen=True, config=STRICT)
class BenchCommOptions:
    """Virtual nodes."""

    ranks_per_node: OrNone[int] = Field(
        default=None, ge=1, description="ranks per virtual node. none: use the real nodes."
    )


@dataclass(frozen=True, config=STRICT)
class BenchOptions:
    """Cases to measure, and a file for the results. The same on all ranks."""

    sizes: Annotated[
        tuple[Annotated[int, BeforeValidator(_parse_size)], ...],
        AfterValidator(lambda sizes: unique(tuple(sorted(sizes)))),
    ] = Field(
        default=("4K", "64K", "1M", "16M", "64M"),
        validate_default=True,
        description="sizes of the tensor in bytes, such as 64K or 1M. K, M, G: powers of 1024.",
    )
    algorithms: Annotated[
        tuple[Literal[ALGORITHMS], ...],  # type: ignore[valid-type]
        AfterValidator(unique),
    ] = Field(
        default=("lanes", "leader", "flat"),
        description=f"algorithms to measure, of {', '.join(ALGORITHMS)}.",
    )
    seconds: float = Field(
        default=60.0,
        gt=0,
        description="time in seconds. Each case is measured at least once, and at most 20 times.",
    )
    json: OptionalPath = Field(default=None, description="file for all figures. none: no file.")
    device: Device = Field(
        default="auto", description="device of each rank. auto: cuda if there is one."
    )
    comm: BenchCommOptions = Field(default=BenchCommOptions())


parse = partial(parse_options, BenchOptions, prog=_PROGRAM, description=_DESCRIPTION)


def size_label(nbytes: int) -> str:
    """Return a size as it is typed: 64K, 1M, 1536."""
    unit = max((u for u in _UNITS if nbytes % _UNITS[u] == 0), key=_UNITS.__getitem__)
    return f"{nbytes // _UNITS[unit]}{unit}"
