"""What was measured before: the table of every world, and why, in a line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mntrain.comm import algorithms
from mntrain.comm.algorithm_table import AlgorithmChoice, AlgorithmTable
from mntrain.comm.tuning_cache import TuningCache

_MOST_BYTES = 1 << 40  # of a size or a piece; more is nonsense


@dataclass(frozen=True)
class Tuning:
    """What `auto` is, and why, in words."""

    table: AlgorithmTable
    line: str


def _to_json(tuning: Tuning) -> dict[str, Any]:
    steps = [[most, choice.algorithm, choice.chunk_bytes] for most, choice in tuning.table.steps]
    return {"steps": steps, "line": tuning.line}


def _from_json(value: Mapping[str, Any]) -> Tuning:
    """Raises ValueError, TypeError or KeyError for what is no entry."""
    steps = [(_bytes(most, 0), _choice(name, piece)) for most, name, piece in value["steps"]]
    sizes = [most for most, _ in steps]
    line = value["line"]
    sound = type(line) is str and line.isprintable()
    if not sound or not sizes or sizes != sorted(set(sizes)):
        raise ValueError(f"no entry: {value}")
    return Tuning(AlgorithmTable(tuple(steps)), line)


def _choice(algorithm: Any, piece_bytes: Any) -> AlgorithmChoice:
    if algorithm not in algorithms.names():
        raise ValueError(f"no algorithm: {algorithm}")
    return AlgorithmChoice(algorithm, _bytes(piece_bytes, 1))


def _bytes(number: Any, least: int) -> int:
    if type(number) is not int or not least <= number <= _MOST_BYTES:
        raise ValueError(f"no number of bytes: {number}")
    return number


CACHE = TuningCache("tuning.json", _from_json, _to_json)
