"""Writers of a run's metrics: metrics.jsonl, copies for other tools, and what its end leaves.

metrics.jsonl is the record of a run. Lines that it cannot take, on a full disk for example, wait in
memory until it can. At an error, a copy (`mntrain.metrics.copies`) gets no more, with a warning.
Training continues.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mntrain.comm.forked import call_in_child
from mntrain.metrics.copies import COPIES, Copy
from mntrain.metrics.files import (
    METRICS_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    Line,
    append_whole,
    json_text,
    write_page,
    write_summary,
)
from mntrain.options.config import LogConfig

WARN_EVERY_S, RETRY_S = 60.0, 1.0  # while the record cannot be written


class MetricsFiles:
    """metrics.jsonl of a run and its copies, its summary and its page, in one process.

    `warn` prints a warning, and `expect_own` raises OSError if another folder is in the place of
    the directory: then nothing is written there. Continues the files that are there, which must
    have been rewound to the step that the job continues from (`mntrain.run.directory.rewind`).
    """

    def __init__(
        self,
        run_dir: Path,
        log: LogConfig,
        warn: Callable[[str], None],
        expect_own: Callable[[], None] = lambda: None,
    ) -> None:
        self.missing: list[str] = []
        """Names of what was not written, a text for each file; complete after `close`."""
        self._warn, self._expect_own, self._open = warn, expect_own, True
        self._run_dir, self._path, self._draws = run_dir, run_dir / METRICS_FILE, log.report
        with suppress(OSError):  # the first line waits
            append_whole(self._path, b"")
        self._waiting: deque[Line] = deque()  # lines that the record lacks
        self._error = ""  # why the record cannot be written
        self._retry_at = self._warned_at = -math.inf
        self._copies: dict[str, Copy] = {}
        for option, (name, kind) in COPIES.items():
            if getattr(log, option) not in (None, False):
                with self._guarded(name):
                    self._copies[name] = kind(run_dir, log)
        call_in_child(self._leave_to_parent)

    def write(self, line: Line) -> None:
        """Append a line, with its step; it is on disk, or on its way, or waits in memory."""
        now = time.monotonic()
        self._waiting.append(line)
        if now >= self._retry_at:
            self._flush(now)
        for name, copy in list(self._copies.items()):
            with self._guarded(name, f" at step {line['step']}"):
                copy.write(line)

    def close(self, *, succeeded: bool = False) -> None:
        """Close all files; `missing` then has what is lost. May be called again. Never raises."""
        if not self._open:
            return
        self._open = False
        self._flush(time.monotonic())
        why = f" ({self._error})" if self._error else ""
        if number := len(self._waiting):
            self.missing.append(f"{number} line{'s' * (number != 1)} of {METRICS_FILE}{why}")
        for name, copy in list(self._copies.items()):
            with self._guarded(name):
                copy.close(succeeded=succeeded)

    def _leave_to_parent(self) -> None:
        """Let `close` do nothing in a forked child: the files and the copies go on."""
        self._open = False

    def finish(self, summary: Mapping[str, Any]) -> list[str]:
        """Close all files, write summary.json and then the page; return what is missing.

        A text for each file, which is also in the summary. A preempted job leaves no page: its time
        may be short, and the next job does.
        """
        self.close(succeeded=summary["status"] != "failed")
        missing, whole = [*self.missing], dict(summary)
        if missing:
            whole["not_written"] = self.missing
        try:
            self._expect_own()
            write_summary(self._run_dir, whole)
        except OSError as error:
            missing.append(f"{SUMMARY_FILE} ({error.strerror or error})")
        draws = self._draws and summary["status"] != "preempted"
        if draws and (why := write_page(self._run_dir)):
            self._warn(f"no {REPORT_FILE}: {why}")
        return missing

    def _flush(self, now: float) -> None:
        """Write the lines that wait, as far as that is possible, and warn of a change."""
        failed, self._error = self._error, ""
        try:
            if self._waiting:
                self._expect_own()
            while self._waiting:
                append_whole(self._path, (json_text(self._waiting[0]) + "\n").encode())
                self._waiting.popleft()
        except OSError as error:
            self._error, self._retry_at = error.strerror or str(error), now + RETRY_S
        if self._error and now >= self._warned_at + WARN_EVERY_S:
            self._warned_at = now
            self._warn(
                f"{METRICS_FILE} cannot be written: {self._error}. Training continues, and "
                "lines wait in memory until there is space"
            )
        elif failed and not self._error:
            self._warn("all lines of metrics that waited are written")

    @contextmanager
    def _guarded(self, name: str, when: str = "") -> Iterator[None]:
        """End a copy whose block raises, with a warning."""
        try:
            yield
        except Exception as error:  # of other people's code and servers
            self._copies.pop(name, None)
            self._warn(
                f"{name} gets no more metrics: {type(error).__name__}{when}: "
                f"{str(error).rstrip('.')}. Training continues, and metrics.jsonl has every step"
            )
