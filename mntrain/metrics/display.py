"""The display of a run for a person.

Only the master reports. A terminal gets a few lines that are redrawn in place, and a log gets a
line now and then.

Text from outside (hosts, names of metrics, directories) is shown literally: it is not read as
markup and cannot send escape sequences to the terminal.
"""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.text import Text

from mntrain.metrics.registry import (
    METRICS,
    PHASES,
    RecentSteps,
    StepRecord,
    count_text,
    short_time,
)
from mntrain.metrics.terminal import LiveLines, console_on, find_terminal, fit

_STATUS_STYLES = {"completed": "green", "stopped": "green", "failed": "bold red"}
_REDRAW_S = 0.25  # a redraw takes some ms, during which all ranks wait for the master
_LOG_LINES = 20  # of a whole run, or more if its steps are slow:
_LOG_INTERVAL_S = 30.0
_MIN_BAR = 10  # cells of a progress bar that is shown at all


def printable(text: str, encoding: str, style: str = "") -> Text:
    """Return text from outside, with control and unencodable characters replaced."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return Text(shown.encode(encoding, "replace").decode(encoding), style)


class Display:
    """Display of a rank, silent on all but the master. All methods are local.

    A context manager, whose end is that of the live display. `steps` is the number of the last
    step, `items` names what losses count, and `console` stands in for stdout and stderr.
    """

    def __init__(
        self, master: bool, steps: int, items: str = "items", console: Console | None = None
    ) -> None:
        self._master, self._steps, self._items = master, steps, items
        self._terminal = find_terminal(sys.stdout) if master and console is None else None
        self._console = console or console_on(self._terminal)
        self._errors = console or Console(stderr=True)
        self._one_terminal = self._terminal is None or find_terminal(sys.stderr) is not None
        self._recent = RecentSteps[StepRecord](10)  # the last of them is the last step
        self._live: LiveLines | None = None
        self._display_ended = False
        self._drawn_at = 0.0
        self._since_line_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Leave the last live lines on the terminal, for good. May be called by any thread."""
        self._display_ended = True
        if self._live is not None:
            self._live.stop()

    def note(self, text: str, style: str = "") -> None:
        """Print text, above the live lines if there are any; a terminal wraps it."""
        if self._master:
            self._console.print(printable(text, self._console.encoding, style), soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print a warning to stderr, or above the live lines if they are on the same terminal."""
        if self._master:
            live = self._live is not None and not self._display_ended
            above = live and self._one_terminal
            console = self._console if above else self._errors
            warning = printable(f"warning: {message}", console.encoding, "yellow")
            console.print(warning, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """Redraw the live lines, or print a line if one is due."""
        if not self._master:
            return
        first = not self._recent.values
        self._recent.add(record)
        if self._console.is_terminal and self._console.is_interactive:
            self._redraw()
        else:
            self._since_line_s += record.step_s
            due = record.step % math.ceil(self._steps / _LOG_LINES) == 0
            last = record.step == self._steps
            if first or due or last or self._since_line_s >= _LOG_INTERVAL_S:
                self.note(self._line())
                self._since_line_s = 0.0
        if evaluation := record.pairs("evaluation"):
            shown = "  ".join(f"{label} {text}" for label, text in evaluation)
            self.note(f"step {record.step}  {shown}", "bold")
        if record.step == self._steps:
            self.end()

    def finish(self, status: str, lines: Sequence[str]) -> None:
        """End the live display, and print the status and the lines of the final report."""
        self.end()
        self.note("")
        self.note(status, _STATUS_STYLES.get(status, "yellow"))
        for line in lines:
            self.note(line)

    def _line(self) -> str:
        count, *speed = self._progress()
        return "  ".join([count, *self._values(), *speed])

    def _values(self) -> list[str]:
        return [f"{label} {text}" for label, text in self._recent.values[-1].pairs("line")]

    def _progress(self) -> list[str]:
        last = self._recent.values[-1]
        count = f"step {last.step:>{len(str(self._steps))}}/{self._steps}"
        if not self._recent.warm:
            return [count, f"warm-up, {short_time(last.step_s)}"]
        step_s = statistics.median(record.step_s for record in self._recent.values)
        rate = statistics.median(record.tokens_per_s for record in self._recent.values)
        left = timedelta(seconds=round((self._steps - last.step) * step_s))
        speed = f"{count_text(rate)} {self._items}/s"
        return [count, f"left {left}", speed, f"{short_time(step_s)}/step"]

    def _live_lines(self, width: int) -> list[Text]:
        progress = fit(self._progress(), width)
        lines = [progress, fit(self._values(), width)]
        if self._recent.warm:
            lines.append(fit(self._shares(), width))
        texts = [printable(line, self._console.encoding) for line in lines]
        left = width - len(progress) - 2
        if left >= _MIN_BAR:
            done = self._recent.values[-1].step
            bar = ProgressBar(total=self._steps, completed=done, width=left)
            segments = self._console.render(bar)
            texts[0].append("  ").append_tokens((part, style) for part, style, _ in segments)
        return texts

    def _shares(self) -> list[str]:
        records = self._recent.values
        total = sum(record.step_s for record in records) or 1.0
        shares = {
            METRICS[phase].label: sum(getattr(record, phase) for record in records) / total
            for phase in PHASES
        }
        shares["other"] = max(0.0, 1 - sum(shares.values()))
        return [f"{name} {share:.0%}" for name, share in shares.items()]

    def _redraw(self) -> None:
        if self._display_ended:
            return
        if self._live is None:
            console, terminal, shared = self._console, self._terminal, self._one_terminal
            self._live = LiveLines(console, self._live_lines, terminal, takes_stderr=shared)
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._live.refresh()
            self._drawn_at = time.monotonic()
