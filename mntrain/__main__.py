"""The command line: `python -m mntrain [train | bench | ckpt] [options]`."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from mntrain import cli
from mntrain._version import __version__
from mntrain.bench import bench_options

# Modules that import torch or MPI are imported inside functions: --help needs neither.
# ruff: noqa: PLC0415

T = TypeVar("T")

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Variables in which launchers pass the rank. Slurm's is last: mpirun in a job inherits it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: this process's), and return the exit code.

    The default command is train. Every rank parses the same words before MPI starts, so all exit
    alike, and rank 0 alone prints. Raises SystemExit as `cli.parse_options` does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    prints = _is_rank_0()
    if words[:1] == ["--version"]:
        if prints:
            print(f"mntrain {__version__}")
        return 0
    named = bool(words) and not words[0].startswith("-")
    command = words.pop(0) if named else "train"
    if command == "train":
        config = _parse(cli.parse, words, prints)
        from mntrain.train.trainer import run

        return _run_on_all_ranks(lambda: run(config), prints)
    if command == "bench":
        options = _parse(bench_options.parse, words, prints)
        from mntrain.bench.run import run as run_bench

        return _run_on_all_ranks(lambda: run_bench(options, words), prints)
    if command == "ckpt":  # inspects checkpoints, on rank 0 alone
        from mntrain.checkpoint.commands import run as run_ckpt

        return run_ckpt(words) if prints else 0
    if prints:
        print(
            f"mntrain: {command}: no such command; give train (default), bench or ckpt",
            file=sys.stderr,
        )
    _wait_for_rank_0()
    return 2


def _parse(parse: Callable[..., T], words: Sequence[str], prints: bool) -> T:
    """Return the parsed options. A rank waits for rank 0 before it exits with an error."""
    try:
        return parse(words, print_errors=prints)
    except SystemExit as end:
        if end.code:
            _wait_for_rank_0()
        raise


def _run_on_all_ranks(run: Callable[[], int], prints: bool) -> int:
    """Run a job, or report that the launcher's ranks do not form one MPI world. Collective."""
    from mntrain.comm.mpi import SilentSingletonsError

    try:
        return run()
    except SilentSingletonsError as error:
        if prints:
            print(f"mntrain: error: {error}", file=sys.stderr)
        return 2


def _wait_for_rank_0() -> None:
    """Wait until rank 0 has printed: launchers kill it when another rank exits with an error."""
    if any(name in os.environ for name in _RANK_VARIABLES):
        from mntrain.comm.mpi import barrier

        sys.stderr.flush()
        barrier()


def _is_rank_0() -> bool:
    """Return True on rank 0, and in a process that no launcher started."""
    ranks = (os.environ[name] for name in _RANK_VARIABLES if name in os.environ)
    return next(ranks, "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
