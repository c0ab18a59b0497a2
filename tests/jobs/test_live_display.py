"""The live display of `mpirun python -m mntrain` on a real pseudo-terminal, which is emulated."""

import re
import subprocess
import time

import pyte
import pytest
from job import job_words
from launch import environment, mpirun_words
from reports import emulate, lines_of
from terminals import pseudo_terminal

NAMES = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")


@pytest.mark.exhaustive
def test_a_terminal_under_mpirun_that_is_resized_ends_with_one_panel_that_fits(tmp_path):
    width, now = 140, 50
    words = job_words(tmp_path, "--train.steps", "150", "--train.eval-every", "0")
    environ = {k: v for k, v in environment(tmp_path, {}).items() if k not in NAMES}
    environ["TERM"] = "xterm-256color"
    with pseudo_terminal(width) as terminal:
        streams = {"stdin": subprocess.DEVNULL, "stdout": terminal.file, "stderr": terminal.file}
        options = {"cwd": tmp_path, "env": environ, "start_new_session": True, **streams}
        job, before = subprocess.Popen([*mpirun_words(2), *words], **options), ""
        try:
            deadline = time.monotonic() + 100
            while "tokens/s" not in before and time.monotonic() < deadline:
                time.sleep(0.01)
                before = terminal.output
            terminal.resize(now, 24)
            assert job.wait(100) == 0, terminal.output
        finally:
            job.kill()
            job.wait()
        output = terminal.output
    _, screen = emulate(before, width, 24)
    screen.resize(24, now)
    pyte.Stream(screen).feed(output[len(before) :])
    lines = lines_of(screen)
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
    assert lines.count("completed") == 1
    assert not screen.cursor.hidden
    assert pyte.modes.DECAWM in screen.mode
