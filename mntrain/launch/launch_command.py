"""`mntrain launch`: a command that starts ranks, again and again as long as machines are to blame.

One process, without MPI and torch, on the machine on which mpirun or srun is started.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mntrain.checks import launcher
from mntrain.launch.launcher_command import LauncherCommand
from mntrain.launch.relaunch import Launch
from mntrain.launch.starts import Signals
from mntrain.options.arguments import CommandParser


class Options(NamedTuple):
    """The options: hosts that are kept free, and how few and how many are used."""

    spares: int | None
    nodes: tuple[int, int] | None
    command: list[str]


def parse(words: Sequence[str]) -> Options:
    """Return the options of a command line. Raises ValueError for bad input, and SystemExit."""
    parser = CommandParser(
        prog="python -m mntrain launch",
        usage="%(prog)s [--spares N] [--nodes MIN:MAX] -- COMMAND",
        description="Start a command (mpirun, srun or flux run) again when a node or rank was "
        "lost, on the hosts of the allocation or hostfile that still answer.",
    )
    parser.add_argument("--spares", metavar="N", help="hosts that the first start leaves free")
    parser.add_argument(
        "--nodes",
        metavar="MIN:MAX",
        help="take MAX hosts, and go on with as few as MIN (default: as many as at first)",
    )
    own = list(words[: words.index("--")]) if "--" in words else list(words)
    command = list(words[len(own) + 1 :])
    if not command and not {"-h", "--help"} & set(own):
        raise ValueError("launch: no command: give one after --, such as -- mpirun -n 4 python ...")
    options = parser.read(own)
    nodes = re.fullmatch(r"(\d+)(?::(\d+))?", options.nodes or "1")
    spares = "0" if options.spares is None else options.spares
    if not spares.isdecimal():
        raise ValueError(f"launch: --spares {spares}: give a number, 0 or more")
    least, most = map(int, (nodes[1], nodes[2] or nodes[1])) if nodes else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"launch: --nodes {options.nodes}: give MIN:MAX, such as 7:8")
    return Options(
        None if options.spares is None else int(spares),
        (least, most) if options.nodes else None,
        command,
    )


def run(words: Sequence[str]) -> int:
    """Run a command line, and return the exit code: that of the command's last start, or 75.

    Raises SystemExit as `parse` does; OSError, and ValueError for bad input.
    """
    options = parse(words)
    if launcher.first_number(os.environ, launcher.SIZE_VARIABLES[:2]) is not None:
        raise ValueError("launch: this is a rank of mpirun: start launch, and mpirun after its --")
    if shutil.which(program := options.command[0]) is None:
        raise ValueError(
            f"launch: {program} is no program that can be run: give mpirun, srun or the path of "
            "another one after --"
        )
    command = LauncherCommand(options.command, os.environ)
    full, least = _numbers(options, command)
    shared = "." if os.access(".", os.W_OK) else None  # ranks see the current folder in general
    with (
        Signals() as signals,
        # A file server may keep names in it; the exit code is that of the command all the same.
        tempfile.TemporaryDirectory(
            prefix=".mntrain-launch-", dir=shared, ignore_cleanup_errors=True
        ) as folder,
    ):
        launch = Launch(command, full=full, least=least, folder=Path(folder), signals=signals)
        return launch.run(as_given=options.spares is None and options.nodes is None)


def _numbers(options: Options, command: LauncherCommand) -> tuple[int, int]:
    """Return how many hosts are used if there are enough, and the fewest."""
    count = len(command.hosts) or 1
    full = command.needed()
    if options.spares is not None:
        full = count - options.spares
        if full < 1:
            raise ValueError(
                f"launch: --spares {options.spares}: there {'are' if count > 1 else 'is'} {count} "
                f"host{'s' * (count > 1)} in all; give fewer, or name more hosts"
            )
    if options.nodes is None:
        return full, full
    least, most = options.nodes
    full = min(most, full) if options.spares is not None else most
    if not least <= full <= count:
        raise ValueError(
            f"launch: --nodes {least}:{most}: there are {full if full < least else count} hosts to "
            "use; give fewer, or name more hosts"
        )
    return full, least
