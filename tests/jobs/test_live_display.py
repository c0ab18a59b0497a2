"""The live display of `mpirun python -m mntrain` on a real pseudo-terminal, which is emulated."""

import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pyte
import pytest
from job import RANKED, job_words
from launch import environment, mpirun_words
from reports import emulate, lines_of
from terminals import pseudo_terminal

# A task whose last rank prints a line of its own in each step.
TALKATIVE = (
    RANKED
    + r"""
class Talkative(LanguageModel):
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        if RANK == 1:
            line = f"call {self.calls:03d} of rank 1"
            for part in (line, "\n"):  # so a redraw may come in the middle
                print(part, end="", flush=True)
            with open("calls", "a") as file:
                print(line, file=file)
        return super().loss(model, batch)
"""
)
NAMES = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")


def command_line(folder: Path, *options: str, ranks: int = 2) -> list[str]:
    return [*mpirun_words(ranks), *job_words(folder, *options)]


def emulated_run(
    command: Sequence[str], folder: Path, width: int, resized: int = 0
) -> tuple[list[str], str, pyte.HistoryScreen]:
    """Run a job on a terminal of this width, which may be resized when steps are shown.

    Returns the lines that it is left with, above its first row too, the output and the screen.
    """
    environ = {k: v for k, v in environment(folder, {}).items() if k not in NAMES}
    environ["TERM"] = "xterm-256color"
    with pseudo_terminal(width) as terminal:
        streams = {"stdin": subprocess.DEVNULL, "stdout": terminal.file, "stderr": terminal.file}
        job = subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True, **streams)
        before = ""
        try:
            deadline = time.monotonic() + 100
            while resized and "tokens/s" not in before and time.monotonic() < deadline:
                time.sleep(0.01)
                before = terminal.output
            if resized:
                terminal.resize(resized, 24)
            assert job.wait(100) == 0, terminal.output
        finally:
            job.kill()
            job.wait()
    lines, screen = emulate(before or terminal.output, width, 24)
    if resized:
        screen.resize(24, resized)
        pyte.Stream(screen).feed(terminal.output[len(before) :])
        lines = lines_of(screen)
    return lines, terminal.output, screen


SLOW = pytest.mark.exhaustive


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("width", "resized"),
    [
        (140, 50),
        pytest.param(50, 140, marks=SLOW),
        pytest.param(30, 0, marks=SLOW),
    ],
)
def test_a_terminal_under_mpirun_ends_with_one_panel_that_fits(tmp_path, width, resized):
    options = ["--train.steps", "150", "--train.eval-every", "0"]
    lines, output, screen = emulated_run(command_line(tmp_path, *options), tmp_path, width, resized)
    now = resized or width
    frames = re.findall(r"step +(\d+)/150", output)
    assert len(frames) > 2  # it was drawn several times
    assert frames == sorted(frames, key=int)
    (first,) = [number for number, line in enumerate(lines) if re.match(r"step +\d+/", line)]
    panel = lines[first : first + 3]
    assert re.match("step 150/150( |$)", panel[0])
    assert panel[1].startswith("loss ")
    assert re.match(r"data +\d+%", panel[2])
    assert max(map(len, panel)) < now
    assert lines[first - 1] == ""
    assert lines[first + 3] == "sample"
    drawn = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output)
    live = [line for line in drawn.splitlines() if "/150" in line or "loss" in line[:4]]
    assert max(map(len, live)) < max(width, now)
    assert lines.count("completed") == 1
    assert not screen.cursor.hidden
    assert pyte.modes.DECAWM in screen.mode


@pytest.mark.exhaustive
def test_lines_of_other_ranks_stay_and_leave_one_panel(tmp_path):
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    command = command_line(tmp_path, "--train.steps", "40", "--task", "talkative:Talkative")
    lines, _, _ = emulated_run(command, tmp_path, 80)
    said = [line[:18] for line in lines if line.startswith("call ")]
    assert said == (tmp_path / "calls").read_text().splitlines()
    assert len(said) > 70
    assert len([line for line in lines if re.match(r"step +\d+/", line)]) == 1


@pytest.mark.exhaustive
def test_a_pipe_at_mpirun_gets_a_log(tmp_path):
    words = command_line(tmp_path, "--train.steps", "20", "--train.eval-every", "0")
    lines, output, _ = emulated_run(["sh", "-c", f"{shlex.join(words)} | cat"], tmp_path, 80)
    assert "\x1b" not in output
    text = "".join(lines)
    assert [int(step) for step in re.findall(r"step +(\d+)/20 ", text)] == [*range(1, 21)]
