"""Comparison of options over ranks: those of a command, and those of an own loop."""

import json
from collections.abc import Mapping
from numbers import Real
from pathlib import PurePath
from typing import Any, TypeVar

from mntrain.alike.values import Peers, compare
from mntrain.errors import AgreedError, agreement, start_mpi
from mntrain.options.command_line import RefusedOptionsError, named_options
from mntrain.options.config import MAY_DIFFER, RANK_OPTIONS, CommConfig, Config, flag_of
from mntrain.options.types import words_of
from mntrain.watchdog.start_timer import limited_start

T = TypeVar("T")

SAME_OPTIONS_AND_FILES = "give all ranks the same options, and all nodes the same files"


def agree_on_options(parsed: T | RefusedOptionsError) -> T:
    """Return the options of a command, if all ranks have the same. Collective, before any world.

    Raises AgreedError on all ranks if any differs, if a rank refuses its options, if MPI cannot
    start, and if the launcher started more ranks than MPI sees. Versions and sources of packages
    are compared by the checks of the world (`mntrain.alike.rank_facts`).
    """
    limits = parsed.comm if isinstance(parsed, Config) else CommConfig()
    with limited_start(limits.timeout, limits.lost_after):
        comm, _ = start_mpi()
        try:
            with agreement(comm.gather, comm.rank):
                if isinstance(parsed, RefusedOptionsError):
                    raise ValueError(parsed.text)
            compare(comm, describe_options(parsed), SAME_OPTIONS_AND_FILES)
        except AgreedError:
            comm.free()
            raise
        comm.free()
        return parsed


def describe_options(options: Any) -> dict[str, str]:
    """Return the text of each option that ranks must share, by its flag. Local."""
    return {
        flag_of(name): " ".join(words_of(value))
        for name, value in named_options(options).items()
        if name not in MAY_DIFFER
    }


def compare_config(ranks: Peers, config: Mapping[str, Any] | None) -> None:
    """Compare what an own loop gives as its options, unless a rank gives None. Collective.

    Numbers, text, paths, None and containers of these are compared, and of other objects the class;
    but not an option that `MAY_DIFFER` or `RANK_OPTIONS` names. Raises AgreedError on all ranks.
    """
    if all(ranks.gather(config is not None)):
        fix = "give all ranks the same, and leave out of config what is of one rank only"
        compare(ranks, _compared_values(config or {}), fix)


def _compared_values(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return the text of each option that is to be compared, by its dotted name."""
    told: dict[str, object] = {}
    for name, value in config.items():
        dotted = f"{prefix}{name}".lower().replace("-", "_")
        if isinstance(value, Mapping):
            told |= _compared_values(value, f"{prefix}{name}.")
        elif dotted not in MAY_DIFFER and dotted.rpartition(".")[2] not in RANK_OPTIONS:
            told[f"config {prefix}{name}"] = json.dumps(value, skipkeys=True, default=_comparable)
    return told


def _comparable(value: object) -> object:
    """Return what JSON has in place of a value that it lacks."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, Real | PurePath) else type(value).__qualname__
