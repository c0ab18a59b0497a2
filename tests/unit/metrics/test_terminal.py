"""A rank finds the terminal of its launcher: real processes on pseudo-terminals."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import pseudo_terminal

from mntrain.metrics.terminal import Terminal, console_on, find_terminal, size_of

# A program that gives its child a pipe or a pseudo-terminal, which is as wide as its own terminal,
# and copies what the child prints.
PROGRAM = """#!{python}
import fcntl, os, pty, subprocess, sys, termios
words = [word for word in sys.argv[1:] if word not in ("-l", "--tag-output")]
ours, theirs = pty.openpty() if words[0] == "pty" else os.pipe()
if words[0] == "pty" and os.isatty(1):
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(1, termios.TIOCGWINSZ, b"12345678"))
with subprocess.Popen(words[1:], stdout=theirs, stderr=subprocess.PIPE) as child:
    os.close(theirs)
    try:
        while piece := os.read(ours, 4096):
            os.write(1, piece)
    except OSError:  # the pseudo-terminal's other end is closed
        pass
sys.exit(child.wait())
"""

RANK = """
import json, os, sys
from mntrain.metrics.terminal import find_terminal, size_of
with open("result", "w") as file:
    if "nobody" in sys.argv:
        os.setuid(65534)
    terminal = find_terminal(sys.stdout)
    shown = find_terminal(sys.stderr) is not None
    json.dump(None if terminal is None else [*size_of(terminal), shown], file)
"""


def found(folder: Path, command: str, columns: int = 70) -> list[int] | None:
    """The terminal that a rank finds: columns, lines, and whether stderr is shown there, too.

    The command runs on a terminal with 20 lines. In it, RANK is the rank, and `mpirun`,
    `hydra_pmi_proxy` and `driver` are programs that run a command with `pipe` or `pty`.
    """
    for name in ("mpirun", "hydra_pmi_proxy", "driver"):
        (folder / name).write_text(PROGRAM.format(python=sys.executable))
        (folder / name).chmod(0o755)
    (folder / "rank.py").write_text(RANK)
    command = command.replace("RANK", f"{sys.executable} {folder / 'rank.py'}")
    with pseudo_terminal(columns, 20 if columns else 0) as terminal:
        options = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.file)
        options["env"] = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        # A shell of its own session has no controlling terminal, as a job under setsid.
        options |= {"cwd": folder, "start_new_session": True, "timeout": 60}
        subprocess.run(["sh", "-c", command], check=True, **options)
    return json.loads((folder / "result").read_text())


ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("RANK", True),
        ("mpirun pipe RANK", True),
        ("mpirun pty RANK", True),
        ("mpirun pipe hydra_pmi_proxy pipe RANK", True),
        ("mpirun pipe sh -c 'RANK; true'", True),
        ("RANK 2> file", False),
        # The output goes elsewhere, is changed, or is another user's.
        ("mpirun pipe RANK | cat", None),
        ("mpirun pipe RANK > file", None),
        ("driver pipe mpirun pipe RANK", None),
        ("mpirun -l pipe RANK", None),
        ("mpirun --tag-output pty RANK", None),
        ("RANK | cat", None),
        pytest.param("mpirun pipe RANK nobody", None, marks=ROOT),
    ],
)
def test_the_terminal_of_the_user_is_found_if_it_gets_the_output(tmp_path, command, shown):
    assert found(tmp_path, command) == (None if shown is None else [70, 20, shown])


@pytest.mark.parametrize("command", ["RANK", "mpirun pty RANK"])
def test_a_terminal_without_a_size_is_none(tmp_path, command):
    assert found(tmp_path, command, columns=0) is None


def test_a_size_is_that_of_the_moment_and_none_after_the_process(tmp_path):
    with pseudo_terminal(70, 20) as terminal:
        with subprocess.Popen(["sleep", "60"], stdout=terminal.file) as process:
            of_process = Path(f"/proc/{process.pid}/fd/1")
            assert size_of(of_process) == (70, 20)
            terminal.resize(50, 10)
            assert size_of(of_process) == (50, 10)
            process.kill()
        assert size_of(of_process) is None
        assert size_of(terminal.file) == (50, 10)
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    assert [find_terminal(stream) for stream in (None, io.StringIO(), closed)] == [None] * 3


def console_in(terminal: Terminal | None, monkeypatch, **environment: str):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm-256color"} | environment).items():
        monkeypatch.setenv(name, value)
    console = console_on(terminal)
    live = console.is_terminal and console.is_interactive
    return live, console.width, None if console.no_color else console.color_system


@pytest.mark.parametrize(
    ("environment", "live", "color"),
    [
        ({}, True, "256"),
        ({"COLUMNS": "200"}, True, "256"),
        ({"NO_COLOR": "1"}, True, None),
        ({"TERM": "dumb"}, False, None),
        ({"TTY_INTERACTIVE": "0"}, False, "256"),
        ({"TTY_COMPATIBLE": "0"}, False, None),
    ],
)
def test_the_environment_decides_against_a_live_display_and_colors(
    monkeypatch, environment, live, color
):
    with pseudo_terminal(70, 20) as terminal:
        made = console_in(terminal.file, monkeypatch, **environment)
    assert made == (live, 70, color)


def test_without_a_terminal_only_the_environment_decides_for_a_live_display(monkeypatch):
    assert console_in(None, monkeypatch) == (False, 80, None)
    assert console_in(None, monkeypatch, FORCE_COLOR="1") == (True, 80, "256")
    assert console_in(None, monkeypatch, FORCE_COLOR="1", COLUMNS="60") == (True, 60, "256")
