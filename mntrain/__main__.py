"""The command line: `python -m mntrain [COMMAND] [options]`."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from mntrain._version import __version__
from mntrain.checks import launcher
from mntrain.checks.host import StartError

# Modules that take long to import are imported inside functions: when Ctrl-C is handled already.
# --help needs neither torch nor MPI.
# ruff: noqa: PLC0415

# Commands of one process, on rank 0 alone, and their modules.
READERS = {
    "ckpt": "mntrain.checkpoint.commands",
    "autopsy": "mntrain.recorder.autopsy",
    "launch": "mntrain.launch.launch_command",
    "plan": "mntrain.train.plan.plan_command",
    "report": "mntrain.report.report_command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: this process's), and return the exit code.

    The default command is train. Every rank parses its words before MPI starts; then the ranks
    agree, so all exit alike, and rank 0 alone prints. Without a launcher, raises SystemExit as
    `parse_options` does. A KeyboardInterrupt ends the process with exit code 130 and one line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    prints = not launcher.first_number(os.environ, launcher.RANK_VARIABLES)
    if words[:1] == ["--version"]:
        if prints:
            print(f"mntrain {__version__}")
        return 0
    named = bool(words) and not words[0].startswith("-")
    command = words.pop(0) if named else "train"
    if command in ("train", "bench", "verify"):
        return _run_on_all_ranks(command, words, prints)
    if command == "doctor":  # says itself why the ranks cannot agree
        from mntrain.doctor import doctor_options
        from mntrain.doctor.doctor_command import run as run_doctor

        try:
            options = doctor_options.parse(words, print_errors=prints)
        except SystemExit:
            _wait_for_rank_0()
            raise
        return _interruptible(lambda: run_doctor(options))
    if command in READERS:
        reader = import_module(READERS[command])
        return _interruptible(lambda: _read(reader.run, words)) if prints else 0
    if prints:
        print(
            f"mntrain: {command}: no such command; give train (default), verify, bench, doctor, "
            f"{', '.join(list(READERS)[:-1])} or {list(READERS)[-1]}",
            file=sys.stderr,
        )
    _wait_for_rank_0()
    return 2


def _read(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a command of one process; bad input is one line on stderr and exit code 2."""
    try:
        return run(words)
    except (OSError, ValueError) as error:
        print(f"mntrain: {error}", file=sys.stderr)
        return 2


def _run_on_all_ranks(command: str, words: Sequence[str], prints: bool) -> int:
    """Train, verify or measure with the options in `words`, if all ranks have the same. Collective.

    Returns 2 if a rank refuses its words, if options differ, or if the launcher's ranks do not form
    one MPI world.
    """
    from mntrain.bench import bench_options
    from mntrain.options import command_line

    launched = launcher.first_number(os.environ, launcher.RANK_VARIABLES) is not None
    quiet = launched and not {"-h", "--help"} & set(words)  # the ranks first tell each other
    parse: Callable[..., Any] = command_line.parse if command == "train" else bench_options.parse
    if command == "verify":
        from mntrain.train.verify import verify_command

        parse = verify_command.parse
    try:
        parsed = parse(words, print_errors=prints and not quiet)
    except command_line.RefusedOptionsError as refused:
        if not launched:
            raise
        parsed = refused
    from mntrain.alike.compared_options import agree_on_options
    from mntrain.errors import AgreedError

    try:
        options = agree_on_options(parsed)
        if command == "train":
            from mntrain.train import entry

            return _interruptible(lambda: entry.run_command(options))
        if command == "verify":
            return _interruptible(lambda: verify_command.run(options))
        from mntrain.bench import run as bench

        return _interruptible(lambda: bench.run(options, words))
    except AgreedError as error:
        of_host = isinstance(error.__cause__, StartError) and error.rank == 0
        if prints or of_host:
            command_line.print_problems(str(error))
    _wait_for_rank_0()
    return 2


def _exit_at_interrupts() -> None:
    """Let SIGINT end the process at once, unless it is ignored or the caller handles it.

    Libraries that are being imported may catch a KeyboardInterrupt, and fail in another way later.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_interrupted)


def _exit_interrupted(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """End this process with the exit code of the shell for Ctrl-C; rank 0 says so.

    The interpreter does not shut down: in MPI_Finalize it would wait for the other ranks.
    """
    if not launcher.first_number(os.environ, launcher.RANK_VARIABLES):  # rank 0, or alone
        os.write(2, b"mntrain: interrupted\n")
    os._exit(128 + number)


def _interruptible(run: Callable[[], int]) -> int:
    """Run a command, in which SIGINT raises KeyboardInterrupt, and return its exit code."""
    if signal.getsignal(signal.SIGINT) is _exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:
        sys.stdout.flush()
        _exit_interrupted()


def _wait_for_rank_0() -> None:
    """Wait until rank 0 has printed: launchers kill it when another rank exits with an error."""
    if launcher.first_number(os.environ, launcher.RANK_VARIABLES) is not None:
        from mntrain.comm.mpi import barrier

        sys.stderr.flush()
        with suppress(StartError):  # the ranks cannot wait for each other
            barrier()


if __name__ == "__main__":
    _exit_at_interrupts()
    sys.exit(main())
