"""The hosts that a job may use: of the scheduler, and of hostfiles.

Sources: man srun (SLURM_*); "PBS_NODEFILE" in the PBS Professional User's Guide; "Environment
variables set for job execution" in the reference of IBM Spectrum LSF (LSB_DJOB_HOSTFILE, a line for
each slot; LSB_MCPU_HOSTS, "host slots" pairs); man flux-hostlist (`instance`: the hosts of the
brokers in the order of their ranks; with --expand separated by spaces).
"""

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from mntrain.checks.launcher import expand_counts

_FLUX_S = 10.0


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it takes; None if that is not said.

    `entry` is its text in the list or file that it was read from.
    """

    name: str
    slots: int | None = None
    entry: str = ""


def of_scheduler(environment: Mapping[str, str]) -> list[Host]:
    """Return the hosts of this process's allocation; none outside of one.

    Raises OSError for a file of the scheduler that cannot be read.
    """
    if "SLURM_JOB_NODELIST" in environment:
        names = expand(environment["SLURM_JOB_NODELIST"])
        counts = expand_counts(environment.get("SLURM_TASKS_PER_NODE", ""))
        slots = counts if len(counts) == len(names) else [None] * len(names)
        return [Host(name, count) for name, count in zip(names, slots, strict=True)]
    for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):  # a line for each rank
        if variable in environment:
            return merged(read_hostfile(Path(environment[variable]).read_text()))
    if "LSB_MCPU_HOSTS" in environment:
        words = environment["LSB_MCPU_HOSTS"].split()
        return [Host(name, int(n)) for name, n in zip(words[::2], words[1::2], strict=True)]
    return [Host(name) for name in of_brokers(environment)]


def of_brokers(environment: Mapping[str, str]) -> list[str]:
    """Return the hosts of this process's instance of Flux by broker; none outside of one.

    It hides the id of its own job. Runs `flux`; none if that fails.
    """
    if not {"FLUX_URI", "FLUX_JOB_ID"} & environment.keys():
        return []
    words = ["flux", "hostlist", "--expand", "instance"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_FLUX_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


def expand(text: str) -> list[str]:
    """Return the names in a list as Slurm writes it: n[1-3,07],login1."""
    found: list[str] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        pieces = [
            list(_numbers(piece[1:-1])) if piece.startswith("[") else [piece]
            for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part)
        ]
        found += ["".join(combination) for combination in product(*pieces)]
    return found


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"


def read_hostfile(text: str) -> list[Host]:
    """Return the hosts in a hostfile of MPICH (n1:4) or Open MPI (n1 slots=4), line by line.

    Raises ValueError for a line that begins with no host.
    """
    found = []
    for line in text.splitlines():
        if entry := line.partition("#")[0].strip():
            host = _read_entry(entry, entry.split()[0])
            given = re.search(r"\bslots\s*=\s*(\d+)", entry)
            found.append(replace(host, slots=host.slots or (int(given[1]) if given else None)))
    return found


def read_list(text: str) -> list[Host]:
    """Return the hosts in a list such as n1:4,n2:4. Raises ValueError for an entry that is none.

    mpirun takes no notice of an empty entry, such as that after a last comma.
    """
    return [_read_entry(entry, entry) for entry in filter(None, text.split(","))]


def _read_entry(entry: str, word: str) -> Host:
    """Return the host of an entry, whose name and number of ranks are in a word: n1, n1:4.

    Open MPI also takes as many ranks as there are cores: n1:*, n1:auto.
    """
    match = re.fullmatch(r"([^\s:]+)(?::([1-9]\d*|\*|auto))?", word)
    if match is None:
        raise ValueError(
            f"{word!r} is no host: give names, with a number of ranks or without one, such as "
            "n1:4,n2:4"
        )
    name, count = match.groups()
    return Host(name, int(count) if count and count.isdigit() else None, entry)


def merged(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once; one that is there several times takes a rank for each, or more."""
    by_name: dict[str, list[Host]] = {}
    for host in hosts:
        by_name.setdefault(host.name, []).append(host)
    repeats = any(len(same) > 1 for same in by_name.values())
    found = []
    for name, same in by_name.items():
        if len(same) == 1 and (same[0].slots or not repeats):
            found += same
        else:
            found.append(Host(name, sum(host.slots or 1 for host in same)))
    return found
