"""The command line: `python -m mntrain [train] [options]`."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from mntrain import options
from mntrain._version import __version__

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Where launchers tell a process its rank. Slurm's comes last: mpirun inside a job inherits it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names, by default of this process, and return the exit code.

    Without a command it is train. Every rank parses the same words before MPI starts: all exit
    alike, and one alone talks. Raises SystemExit as `options.parse` does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    talks = _talks(os.environ)
    if words[:1] == ["--version"]:
        if talks:
            print(f"mntrain {__version__}")
        return 0
    named = bool(words) and not words[0].startswith("-")
    command = words.pop(0) if named else "train"
    if command not in _COMMANDS:
        if talks:
            print(
                f"mntrain: {command}: no such command; the commands are {', '.join(_COMMANDS)}, "
                "and without one it is train",
                file=sys.stderr,
            )
        _let_talk(os.environ)
        return 2
    return _COMMANDS[command](words, talks)


def _train(words: Sequence[str], talks: bool) -> int:
    """Train; collective over the ranks that the launcher started."""
    try:
        job = options.parse(words, print_errors=talks)
    except SystemExit as end:
        if end.code:
            _let_talk(os.environ)
        raise
    from mntrain.mpi import SilentSingletonsError  # noqa: PLC0415 - as below
    from mntrain.trainer import run  # noqa: PLC0415 - torch and MPI, which --help does without

    try:
        return run(job)
    except SilentSingletonsError as error:
        if talks:
            print(f"mntrain: error: {error}", file=sys.stderr)
        return 2


_COMMANDS: dict[str, Callable[[Sequence[str], bool], int]] = {"train": _train}


def _let_talk(environment: Mapping[str, str]) -> None:
    """Wait for the rank that talks: launchers kill it when another one exits with an error."""
    if any(name in environment for name in _RANK_VARIABLES):
        from mntrain.mpi import meet  # noqa: PLC0415 - as above

        sys.stderr.flush()
        meet()


def _talks(environment: Mapping[str, str]) -> bool:
    """Return whether this process prints what all ranks know: rank 0, or no launcher's child."""
    ranks = (environment[name] for name in _RANK_VARIABLES if name in environment)
    return next(ranks, "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
