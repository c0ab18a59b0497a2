"""Comparison over ranks of the options with which a job starts."""

import socket
from collections.abc import Mapping
from numbers import Real
from pathlib import PurePath
from typing import Any, TypeVar

from mntrain.cli import RefusedOptionsError, named_options, options_in_file
from mntrain.config import MAY_DIFFER, RANK_OPTIONS, Config, flag_of
from mntrain.config_types import words_of
from mntrain.equal_values import Given, compare
from mntrain.errors import AgreedError, agreement
from mntrain.ranks import Ranks, start_mpi
from mntrain.watchdog.start_timer import TIMEOUT_S, limited_start

T = TypeVar("T")

FIX = "give all ranks the same options, and all nodes the same files"


def agree_on_options(parsed: T | RefusedOptionsError) -> T:
    """Return the options of a command, if all ranks have the same. Collective, before any world.

    Raises AgreedError on all ranks if any differs, if a rank refuses its options, if MPI cannot
    start, and if the launcher started more ranks than MPI sees. Versions and sources of packages
    are compared by the checks of the world (`mntrain.checks.all_ranks`).
    """
    with limited_start(parsed.comm.timeout if isinstance(parsed, Config) else TIMEOUT_S):
        return _agree(parsed)


def _agree(parsed: T | RefusedOptionsError) -> T:
    comm, _ = start_mpi()
    try:
        with agreement(comm.gather_objects, comm.rank):
            if isinstance(parsed, RefusedOptionsError):
                raise ValueError(parsed.text)
            described = describe_options(parsed)
        compare(comm.gather_objects, described, comm.rank, FIX)
    except AgreedError:
        comm.free()
        raise
    comm.free()
    return parsed


def describe_options(options: Any) -> dict[str, Given]:
    """Return each option that ranks must share, by its flag, with the file that it is from. Local.

    Raises ValueError if that file cannot be read any more.
    """
    from_file = options_in_file(options)
    origin = f"from {options.config} on {socket.gethostname()}" if from_file else ""
    return {
        flag_of(name): Given(" ".join(words_of(value)), origin if name in from_file else "")
        for name, value in named_options(options).items()
        if name not in MAY_DIFFER
    }


def compare_config(world: Ranks, config: Mapping[str, Any] | None) -> None:
    """Compare what an own loop gives as its options, unless a rank gives None. Collective.

    Numbers, text, paths, None and containers of these are compared, and of other objects the class;
    but not an option that `MAY_DIFFER` or `RANK_OPTIONS` names. Raises AgreedError on all ranks.
    """
    if all(world.gather(config is not None)):
        given = _plain_options(config or {})
        fix = "give all ranks the same, and leave out of config what is of one rank only"
        compare(world.gather, given, world.rank, fix)


def _plain_options(config: Mapping[str, Any], prefix: str = "config ") -> dict[str, object]:
    """Return the text of each option that is to be compared, by its dotted name."""
    told: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            told |= _plain_options(value, f"{prefix}{name}.")
        elif _is_shared(f"{prefix}{name}".removeprefix("config ")):
            told[f"{prefix}{name}"] = _plain(value)
    return told


def _is_shared(name: str) -> bool:
    """Return whether an option by its dotted name must be the same on all ranks."""
    dotted = name.lower().replace("-", "_")
    return dotted not in MAY_DIFFER and dotted.rpartition(".")[2] not in RANK_OPTIONS


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{n}: {_plain(v)}' for n, v in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    plain = value is None or isinstance(value, str | Real | PurePath)
    return str(value) if plain else type(value).__qualname__
