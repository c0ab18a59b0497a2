"""Options of `python -m mntrain plan`. Needs neither torch nor MPI."""

import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from mntrain.options.command_line import parse_options
from mntrain.options.config import Config
from mntrain.options.types import STRICT, OrNone, unique

_PROGRAM = "python -m mntrain plan"
_DESCRIPTION = f"""Say what a job will take, before it runs: the memory of a rank by role, and the
bytes of a step, at every stage, on several numbers of ranks. Takes all options of a job. The tables
replace --zero.stage and --train.precision. One process, without MPI and GPU. For example:
  {_PROGRAM} --config run.toml
      a table for each precision
  {_PROGRAM} --config run.toml --ranks 8 16 32 --ranks-per-node 8 --memory 40G
      the smallest of these jobs whose ranks have 40 GiB"""

_UNITS = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _parse_memory(word: Any) -> Any:
    if word in (None, "none") or isinstance(word, int):
        return None if word == "none" else word
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])", str(word).upper())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not nbytes:
        raise ValueError("must be a size such as 40G or 512M, in powers of 1024")
    return nbytes


def _numbers(words: Any) -> Any:
    """Return words as whole numbers; others as they are."""
    try:
        return tuple(int(word) for word in words)
    except (TypeError, ValueError):
        return words


Ranks = Annotated[int, Field(ge=1)]
Precision = Literal["fp32", "bf16", "bf16-pure", "fp16"]


@dataclass(frozen=True, config=STRICT)
class PlanOptions(Config):
    """A job, and the numbers of ranks and precisions that it may have."""

    ranks: Annotated[
        tuple[Ranks, ...],
        BeforeValidator(_numbers),
        AfterValidator(lambda ranks: unique(tuple(sorted(ranks)))),
    ] = Field(default=(1, 2, 4, 8), description="numbers of ranks.")
    precisions: Annotated[tuple[Precision, ...], AfterValidator(unique)] = Field(
        default=("fp32", "bf16", "bf16-pure"),
        description="precisions, a table for each: as those of --train.precision.",
    )
    ranks_per_node: OrNone[int] = Field(
        default=None,
        ge=1,
        description="ranks of a node. none: --comm.ranks-per-node, or else all on one node.",
    )
    memory: Annotated[int | None, BeforeValidator(_parse_memory)] = Field(
        default=None,
        description="memory of a rank, such as 40G, for which to find the smallest job. none: do "
        "not.",
    )


parse = partial(parse_options, PlanOptions, prog=_PROGRAM, description=_DESCRIPTION)
