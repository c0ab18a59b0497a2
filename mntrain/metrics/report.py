"""What is told of a run: shown to a person by `display`, and kept in the run's directory.

Only the master's reporter says and writes anything. On a terminal it redraws one block in place;
in a log it adds a line now and then. The directory gets metrics.jsonl and summary.json.
"""

import json
import math
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mntrain.metrics.step import StepRecord
from mntrain.metrics.terminal import (
    ProgressPanel,
    evaluation,
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
_REDRAW_S = 0.25  # a frame takes the master some ms, for which all ranks wait
_LINES = 20  # of a log, unless its steps are slow
_LINE_S = 30.0


def make_reporter(
    master: bool, run_dir: Path, steps: int, console: Console | None = None
) -> "Reporter":
    """Return the reporter of a rank: on the master the one that speaks, else the silent one. Local.

    `steps` is the number of the last step. `console` stands in for stdout and stderr.
    """
    return ConsoleReporter(run_dir, steps, console) if master else Reporter()


class Reporter:
    """What the trainer calls on every rank; this one is silent, for all ranks but the master.

    A context manager, which closes it. All methods are local.
    """

    def start(
        self,
        places: Sequence[Place],
        *,
        library: str,
        thread_level: str,
        topology: str,
        algorithm: str,
        tuning: str,
        concern: str,
        zero: str,
        model: str,
        transport: str = "",
        kernels: str = "",
    ) -> None:
        """Show what runs where. `places` is by rank; the rest are texts such as "MPICH 5.0.2".

        `tuning` says why it is this algorithm, `transport` how tensors of GPUs travel, `kernels`
        what they are added with, `concern` what keeps the job slow, a line each; any may be empty.
        """

    def step(self, record: StepRecord) -> None:
        """Show a step, and append it to metrics.jsonl. Raises RuntimeError once closed."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the statistics of the run, close, and last of all write summary.json, whole."""

    def text(self, title: str, body: str) -> None:
        """Show a block of text, such as a generated sample; nothing where the body is empty."""

    def warn(self, message: str) -> None:
        """Show a warning: on stderr, or above the live display."""

    def note(self, message: str) -> None:
        """Show a line of news."""

    def close(self) -> None:
        """Give the terminal back and close metrics.jsonl. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ConsoleReporter(Reporter):
    """The master's reporter. It makes the run's directory if there is none."""

    def __init__(self, run_dir: Path, steps: int, console: Console | None = None) -> None:
        self._console = console or stdout()
        self._errors = console or Console(stderr=True)
        # Without UTF-8 there are no blocks to draw with.
        self._in_place = self._console.is_interactive and self._console.encoding.startswith("utf")
        self._progress = ProgressPanel(steps)
        self._live: Live | None = None
        self._drawn_at = 0.0
        self._unsaid_s = 0.0
        self._run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = (run_dir / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")

    def start(
        self,
        places: Sequence[Place],
        *,
        library: str,
        thread_level: str,
        topology: str,
        algorithm: str,
        tuning: str,
        concern: str,
        zero: str,
        model: str,
        transport: str = "",
        kernels: str = "",
    ) -> None:
        """See `Reporter.start`."""
        self._say(model, "bold")
        self._say(f"{topology}, {algorithm}, {library} (thread level {thread_level})")
        if tuning:
            self._say(f"auto: {tuning}")
        if transport:
            self._say(f"transport: {transport}")
        if kernels:
            self._say(f"kernels: {kernels}")
        for line in filter(None, concern.split("\n")):
            self._say(f"warning: {line}", "yellow")
        self._say(zero)
        self._apart(place_table(places, self._console.encoding))

    def step(self, record: StepRecord) -> None:
        """See `Reporter.step`."""
        if self._metrics.closed:
            raise RuntimeError(f"step {record.step} was reported after the reporter was closed")
        self._metrics.write(_json(record.to_json()) + "\n")
        first = not self._progress.recent
        self._progress.add(record)
        if self._in_place:
            self._redraw()
        else:
            self._unsaid_s += record.step_s
            due = record.step % math.ceil(self._progress.steps / _LINES) == 0
            last = record.step == self._progress.steps
            if first or due or last or self._unsaid_s >= _LINE_S:
                self._say(self._progress.line())
                self._unsaid_s = 0.0
        if record.eval_loss is not None:
            result = evaluation(record.eval_loss, record.eval_metrics)
            self._say(f"step {record.step}  eval loss {result}", "bold")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See `Reporter.finish`."""
        self._stop_live()
        self._say("")
        self._say(summary["status"], _STATUS_STYLES.get(summary["status"], "bold red"))
        steps, unit = self._progress.steps, self._progress.unit
        self._console.print(result_table(summary, steps, unit, self._console.encoding))
        if summary["ranks"]:
            self._apart(memory_table(summary["memory"]), traffic_table(summary["ranks"]))
            self._say(overlap(summary["ranks"]))
        self._say(str(summary["run_dir"]))
        self.close()
        _write_whole(self._run_dir / "summary.json", _json(summary, indent=2) + "\n")

    def text(self, title: str, body: str) -> None:
        """See `Reporter.text`."""
        if body:
            self._say(title, "bold")
            self._say(textwrap.indent(body, "  "))

    def warn(self, message: str) -> None:
        """See `Reporter.warn`."""
        self._alert(f"warning: {message}", "yellow")

    def note(self, message: str) -> None:
        """See `Reporter.note`."""
        self._say(message)

    def close(self) -> None:
        """See `Reporter.close`."""
        try:
            self._stop_live()
        finally:
            self._metrics.close()

    def _text(self, text: str, style: str = "") -> Text:
        return plain(text, self._console.encoding, style)

    def _say(self, line: str, style: str = "") -> None:
        """Print a line, above the live display if there is one; the terminal wraps it, if any."""
        self._console.print(self._text(line, style), soft_wrap=True)

    def _apart(self, *tables: Table) -> None:
        """Print tables with an empty line around each."""
        self._say("")
        for table in tables:
            self._console.print(table)
            self._say("")

    def _alert(self, line: str, style: str) -> None:
        """Print a line to stderr, or above the live display, which the line would tear.

        Whether stderr ends at the same terminal cannot be known: mpirun reads it through a pipe.
        """
        console = self._errors if self._live is None else self._console
        console.print(self._text(line, style), soft_wrap=True)

    def _redraw(self) -> None:
        """Draw the live display, if that was not done just now."""
        if self._live is None:
            # No thread of its own: it would compete with the training for the interpreter.
            self._live = Live(
                get_renderable=lambda: self._progress.frame(self._console.width),
                console=self._console,
                auto_refresh=False,
            )
            self._live.start()
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._live.refresh()
            self._drawn_at = time.monotonic()

    def _stop_live(self) -> None:
        """Draw the last frame, which stays, and show the cursor again."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def _json(value: Any, indent: int | None = None) -> str:
    """JSON of plain objects and paths; null for floats that are not finite, which JSON lacks."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, default=str, indent=indent)


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that readers and crashes find the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
