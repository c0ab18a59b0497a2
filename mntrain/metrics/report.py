"""Reports of a run: shown to a person, and written to the run's directory.

Only the master reports. A terminal gets one panel that is redrawn in place, a log gets a line now
and then, and the directory gets metrics.jsonl and summary.json.
"""

import json
import math
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mntrain.metrics.registry import StepRecord
from mntrain.metrics.terminal import (
    ProgressPanel,
    memory_table,
    overlap,
    place_table,
    plain,
    result_table,
    stdout,
    traffic_table,
)
from mntrain.rank_info import Place

_STATUS_STYLES = {
    "completed": "green",
    "stopped": "green",
    "interrupted": "yellow",
    "preempted": "yellow",
}
_REDRAW_S = 0.25  # a redraw takes some ms, during which all ranks wait for the master
_LOG_LINES = 20  # of a whole run, or more if its steps are slow:
_LOG_INTERVAL_S = 30.0


def make_reporter(
    master: bool, run_dir: Path, steps: int, console: Console | None = None
) -> "Reporter":
    """Return the reporter of a rank: a `ConsoleReporter` on the master, else a silent one. Local.

    `steps` is the number of the last step. `console` stands in for stdout and stderr.
    """
    return ConsoleReporter(run_dir, steps, console) if master else Reporter()


class Reporter:
    """Silent reporter, for all ranks but the master. A context manager; all methods are local."""

    def start(self, lines: Sequence[tuple[str, str]], places: Sequence[Place]) -> None:
        """Show what runs where: lines with their rich style, and the places by rank."""

    def step(self, record: StepRecord) -> None:
        """Show a step and append it to metrics.jsonl. Raises RuntimeError unless entered."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the statistics of the run, close, and write summary.json last, atomically."""

    def text(self, title: str, body: str) -> None:
        """Show a block of text, such as a generated sample; nothing if the body is empty."""

    def warn(self, message: str) -> None:
        """Show a warning: on stderr, or above the live panel."""

    def note(self, message: str) -> None:
        """Show a line of information."""

    def close(self) -> None:
        """Release the terminal and close metrics.jsonl. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ConsoleReporter(Reporter):
    """The master's reporter. Entering it makes the run's directory if there is none."""

    def __init__(self, run_dir: Path, steps: int, console: Console | None = None) -> None:
        self._console = console or stdout()
        self._errors = console or Console(stderr=True)
        # The panel's bars need UTF-8.
        self._in_place = self._console.is_interactive and self._console.encoding.startswith("utf")
        self._panel = ProgressPanel(steps)
        self._live: Live | None = None
        self._drawn_at = 0.0
        self._since_line_s = 0.0
        self._run_dir = run_dir
        self._metrics: TextIO | None = None

    def __enter__(self) -> Self:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = self._run_dir / "metrics.jsonl"
        self._metrics = path.open("a", buffering=1, encoding="utf-8")
        return self

    def start(self, lines: Sequence[tuple[str, str]], places: Sequence[Place]) -> None:
        """Print the lines and the table of places."""
        for line, style in lines:
            self._print(line, style)
        self._print_tables(place_table(places, self._console.encoding))

    def step(self, record: StepRecord) -> None:
        """Append the step to metrics.jsonl, and redraw the panel or print a line if one is due."""
        if self._metrics is None:
            raise RuntimeError(
                f"step {record.step} was reported after the reporter was closed, or before it was "
                "entered"
            )
        self._metrics.write(_json(record.to_json()) + "\n")
        first = not self._panel.recent
        self._panel.add(record)
        if self._in_place:
            self._redraw()
        else:
            self._since_line_s += record.step_s
            due = record.step % math.ceil(self._panel.steps / _LOG_LINES) == 0
            last = record.step == self._panel.steps
            if first or due or last or self._since_line_s >= _LOG_INTERVAL_S:
                self._print(self._panel.line())
                self._since_line_s = 0.0
        if evaluation := record.pairs("evaluation"):
            shown = "  ".join(f"{label} {text}" for label, text in evaluation)
            self._print(f"step {record.step}  {shown}", "bold")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the result and the tables of memory and traffic, close, and write summary.json."""
        self._stop_live()
        self._print("")
        self._print(summary["status"], _STATUS_STYLES.get(summary["status"], "bold red"))
        self._console.print(
            result_table(summary, self._panel.steps, self._panel.unit, self._console.encoding)
        )
        if summary["ranks"]:
            self._print_tables(memory_table(summary["memory"]), traffic_table(summary["ranks"]))
            self._print(overlap(summary["ranks"]))
        self._print(str(summary["run_dir"]))
        self.close()
        _write_atomically(self._run_dir / "summary.json", _json(summary, indent=2) + "\n")

    def text(self, title: str, body: str) -> None:
        """Print the title, and the body indented below it."""
        if body:
            self._print(title, "bold")
            self._print(textwrap.indent(body, "  "))

    def warn(self, message: str) -> None:
        """Print to stderr, or above the live panel, which such a line would tear.

        Whether stderr is the same terminal cannot be known: mpirun reads it through a pipe.
        """
        console = self._errors if self._live is None else self._console
        warning = plain(f"warning: {message}", self._console.encoding, "yellow")
        console.print(warning, soft_wrap=True)

    def note(self, message: str) -> None:
        """Print a line."""
        self._print(message)

    def close(self) -> None:
        """Stop the live panel and close metrics.jsonl."""
        try:
            self._stop_live()
        finally:
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = None

    def _print(self, line: str, style: str = "") -> None:
        """Print a line, above the live panel if there is one; a terminal wraps it."""
        self._console.print(plain(line, self._console.encoding, style), soft_wrap=True)

    def _print_tables(self, *tables: Table) -> None:
        """Print tables with an empty line around each."""
        self._print("")
        for table in tables:
            self._console.print(table)
            self._print("")

    def _redraw(self) -> None:
        """Draw the live panel, at most every `_REDRAW_S` seconds."""
        if self._live is None:
            # No refresh thread: it would compete with the training for the interpreter.
            self._live = Live(
                get_renderable=lambda: self._panel.frame(self._console.width),
                console=self._console,
                auto_refresh=False,
            )
            self._live.start()
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._live.refresh()
            self._drawn_at = time.monotonic()

    def _stop_live(self) -> None:
        """Draw the last frame, which stays on the screen, and show the cursor again."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def _json(value: Any, indent: int | None = None) -> str:
    """Return the JSON of plain objects and paths, with null for floats that are not finite."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, default=str, indent=indent)


def _write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers and crashes find the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
