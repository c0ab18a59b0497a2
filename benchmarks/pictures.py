"""Pictures of what commands print, for the documentation: docs/img/live*.svg, final.svg, plan.svg.

Runs a job with four ranks on two virtual nodes in tmux, once for each width, and draws what its
pane shows when the run is more than half over. Then it draws the final report of such a job, and a
plan. Needs tmux.

    python benchmarks/pictures.py
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from emulated import OPEN_MPI_ENVIRONMENT, mpirun_words
from results import DOCS
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

NAMES = {50: "live-50", 80: "live", 140: "live-140"}
STEPS, LIMIT_S = 200, 300
JOB = "python -m mntrain --comm.ranks-per-node 2"
PLAN = "python -m mntrain plan --config run.toml --ranks 1 8 16 --ranks-per-node 8"
PLAN += " --precisions bf16 --memory 400M"
OPTIONS = "[model]\nlayers = 8\nwidth = 512\n"  # of run.toml
REPORTED = f"{JOB} --zero.stage 2 --comm.wire-dtype bf16"
ENVIRONMENT = {**os.environ, **OPEN_MPI_ENVIRONMENT, "PYTHONPATH": str(DOCS.parent)}


def main() -> None:
    """Draw the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(OPTIONS)
        draw(output([], PLAN, folder), PLAN, "plan")
        words = f"{REPORTED} --run.dir runs/a --train.steps 100"
        report = output(mpirun_words(4), words, folder).rpartition("completed")[2]
        draw(f"completed{report}", f"mpirun -n 4 {REPORTED}", "final")
    for width, name in NAMES.items():
        with tempfile.TemporaryDirectory() as folder:
            shown = capture(width, folder)
        title = f"mpirun -n 4 {JOB} ({width} columns)"
        draw(shown, title if width >= 80 else f"{width} columns", name)


def output(launcher: list[str], command: str, folder: Path) -> str:
    """Return what a command prints where there is no terminal."""
    words = [*launcher, sys.executable, *command.split()[1:]]
    settings = {"cwd": folder, "env": {**ENVIRONMENT, "COLUMNS": "120"}, "text": True}
    return subprocess.run(words, check=True, capture_output=True, **settings).stdout.rstrip()


def capture(width: int, folder: str) -> str:
    """Return what a pane of this width shows in the second half of a run, as ANSI text."""
    job = [*mpirun_words(4), sys.executable, *JOB.split()[1:], "--train.steps", str(STEPS)]
    tmux = ["tmux", "-f", os.devnull, "-L", f"mntrain-{uuid.uuid4().hex}"]
    words = ["new-session", "-d", "-x", str(width), "-y", "24", "-c", folder]
    line = shlex.join([*job, "--run.dir", "runs/a"])
    subprocess.run([*tmux, *words, line], env=ENVIRONMENT, check=True)
    pane, shown = [*tmux, "capture-pane", "-p", "-e"], ""
    try:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            time.sleep(0.3)
            shown = subprocess.run(pane, check=True, capture_output=True, text=True).stdout
            step = re.search(rf"step +(\d+)/{STEPS}  ", shown)
            if step and int(step[1]) > 0.6 * STEPS:
                return shown.rstrip()
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    sys.exit(f"the job did not come to the second half within {LIMIT_S} s:\n{shown}")


def draw(shown: str, title: str, name: str) -> None:
    """Write an SVG picture of ANSI text."""
    longest = max(len(line) for line in Text.from_ansi(shown).plain.splitlines())
    width = max(min(longest, 125), len(title) + 12)  # the buttons of the window
    path = DOCS / "img" / f"{name}.svg"
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=width, record=True, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(shown))
        console.save_svg(str(path), title=title, theme=DIMMED_MONOKAI, unique_id=path.stem)
    print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
