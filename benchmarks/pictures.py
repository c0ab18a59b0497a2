"""Pictures of what commands print, for the documentation: docs/img/live*.svg, final.svg, plan.svg.

Runs a job with four ranks on two virtual nodes in tmux, once for each width, and draws what its
pane shows when the run is more than half over. Then it draws the final report of such a job, and a
plan. Needs tmux.

    python benchmarks/pictures.py
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
NAMES = {50: "live-50", 80: "live", 140: "live-140"}
STEPS, LIMIT_S = 200, 300
PLAN = "plan --config run.toml --ranks 1 8 16 --ranks-per-node 8 --precisions bf16 --memory 400M"
OPTIONS = "[model]\nlayers = 8\nwidth = 512\n"  # of run.toml
REPORTED = "--comm.ranks-per-node 2 --zero.stage 2 --comm.wire-dtype bf16"
# Open MPI refuses root, and more ranks than cores, unless told otherwise.
ALLOWED = ["--oversubscribe", "--bind-to", "none"]


def capture(width: int, folder: Path) -> str:
    """Return what a pane of this width shows in the second half of a run, as ANSI text."""
    mpirun = str(Path(sys.executable).parent / "mpirun")
    version = subprocess.run([mpirun, "--version"], check=True, capture_output=True, text=True)
    options = ALLOWED if "Open MPI" in version.stdout else []
    job = [mpirun, *options, "-n", "4", sys.executable, "-m", "mntrain", "--run.dir", "runs/a"]
    job += ["--comm.ranks-per-node", "2", "--train.steps", str(STEPS)]
    tmux = ["tmux", "-f", os.devnull, "-L", f"mntrain-{uuid.uuid4().hex}"]
    size = ["-x", str(width), "-y", "24"]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **allowed, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*tmux, "new-session", "-d", *size, "-c", str(folder), shlex.join(job)],
        env=environment,
        check=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            time.sleep(0.3)
            shown = subprocess.run(
                [*tmux, "capture-pane", "-p", "-e"], check=True, capture_output=True, text=True
            ).stdout
            step = re.search(rf"step +(\d+)/{STEPS}  ", shown)
            if step and int(step[1]) > 0.6 * STEPS:
                return shown.rstrip()
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    sys.exit(f"the job did not come to the second half within {LIMIT_S} s:\n{shown}")


def output(words: Sequence[str], folder: Path) -> str:
    """Return what a command prints where there is no terminal."""
    environment = {**os.environ, "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.rstrip()


def draw(shown: str, title: str, name: str) -> None:
    """Write an SVG picture of ANSI text."""
    longest = max(len(line) for line in Text.from_ansi(shown).plain.splitlines())
    width = max(min(longest, 125), len(title) + 12)  # the buttons of the window
    path = ROOT / "docs" / "img" / f"{name}.svg"
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=width, record=True, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(shown))
        console.save_svg(str(path), title=title, theme=DIMMED_MONOKAI, unique_id=path.stem)
    print(path.relative_to(ROOT))


def main() -> None:
    """Draw the pictures."""
    if shutil.which("tmux") is None:
        sys.exit("there is no tmux: install it (on Debian: apt-get install tmux)")
    mntrain = [sys.executable, "-m", "mntrain"]
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", "4"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(OPTIONS)
        draw(output([*mntrain, *PLAN.split()], folder), f"python -m mntrain {PLAN}", "plan")
        job = [*mpirun, *mntrain, *REPORTED.split(), "--run.dir", "runs/a", "--train.steps", "100"]
        report = output(job, folder).rpartition("completed")[2]
        title = f"mpirun -n 4 python -m mntrain {REPORTED}"
        draw(f"completed{report}", title, "final")
    for width, name in NAMES.items():
        with tempfile.TemporaryDirectory() as folder:
            shown = capture(width, Path(folder))
        title = f"mpirun -n 4 python -m mntrain --comm.ranks-per-node 2 ({width} columns)"
        draw(shown, title if width >= 80 else f"{width} columns", name)


if __name__ == "__main__":
    main()
