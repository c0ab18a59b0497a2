"""The command line: `python -m mntrain [train | bench | ckpt] [options]`."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from mntrain import cli
from mntrain._version import __version__
from mntrain.bench import bench_options

T = TypeVar("T")

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
    job = _parsed(cli.parse, words, talks, _ALSO)
    from mntrain.train.trainer import run  # noqa: PLC0415 - torch and MPI, which --help does without

    return _with_all_ranks(lambda: run(job), talks)


def _bench(words: Sequence[str], talks: bool) -> int:
    """Measure the collectives; collective as above."""
    asked = _parsed(bench_options.parse, words, talks)
    from mntrain.bench.run import run  # noqa: PLC0415 - as above

    return _with_all_ranks(lambda: run(asked, words), talks)


def _ckpt(words: Sequence[str], talks: bool) -> int:
    """Look at checkpoints; no rank but one has anything to do."""
    from mntrain.checkpoint.commands import run  # noqa: PLC0415 - as above

    return run(words) if talks else 0


_COMMANDS: dict[str, Callable[[Sequence[str], bool], int]] = {
    "train": _train,
    "bench": _bench,
    "ckpt": _ckpt,
}
_ALSO = """
other commands, each with a --help of its own:
  python -m mntrain bench
      measure the collectives of this cluster
  python -m mntrain ckpt list|show|verify|diff|export
      look at checkpoints, compare them, and take the model out of one"""


def _parsed(parse: Callable[..., T], words: Sequence[str], talks: bool, also: str = "") -> T:
    """Return what `parse` makes of the words; `also` follows its help."""
    try:
        return parse(words, print_errors=talks)
    except SystemExit as end:
        if end.code:
            _let_talk(os.environ)
        elif talks and also:
            print(also)
        raise


def _with_all_ranks(run: Callable[[], int], talks: bool) -> int:
    """Run a job; where the launcher's ranks do not see each other, say so instead."""
    from mntrain.comm.launcher import SilentSingletonsError  # noqa: PLC0415 - as above

    try:
        return run()
    except SilentSingletonsError as error:
        if talks:
            print(f"mntrain: error: {error}", file=sys.stderr)
        return 2


def _let_talk(environment: Mapping[str, str]) -> None:
    """Wait for the rank that talks: launchers kill it when another one exits with an error."""
    if any(name in environment for name in _RANK_VARIABLES):
        from mntrain.comm.mpi import barrier  # noqa: PLC0415 - as above

        sys.stderr.flush()
        barrier()


def _talks(environment: Mapping[str, str]) -> bool:
    """Return whether this process prints what all ranks know: rank 0, or no launcher's child."""
    ranks = (environment[name] for name in _RANK_VARIABLES if name in environment)
    return next(ranks, "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
