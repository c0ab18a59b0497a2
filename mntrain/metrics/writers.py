"""Writers of a run's metrics: metrics.jsonl, metrics.csv, and copies for other tools.

metrics.jsonl is the record of a run, and the others are copies of it for other tools. Lines that it
cannot take, on a full disk for example, wait in memory until it can; metrics.csv is then written
anew from it. At an error, a copy (`mntrain.metrics.copies`) gets no more, with a warning. Training
continues.
"""

import csv
import io
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mntrain.config import LogConfig
from mntrain.metrics.copies import Copy, make_copies
from mntrain.metrics.files import (
    METRICS_FILE,
    Line,
    append_whole,
    flatten,
    json_text,
    read_metrics,
    write_whole,
)

CSV_FILE = "metrics.csv"
WAITING = 10_000  # lines that wait in memory at most
WARN_EVERY_S, RETRY_S = 60.0, 1.0  # while a file cannot be written


class MetricsFiles:
    """metrics.jsonl of a run and its copies, in one process.

    `warn` prints a warning. Continues the files that are there, which must have been rewound to the
    step that the job continues from (`mntrain.run.directory.rewind`).
    """

    def __init__(self, run_dir: Path, log: LogConfig, warn: Callable[[str], None]) -> None:
        self.missing: list[str] = []
        """Names of what was not written, a text for each file; complete after `close`."""
        self._warn, self._open = warn, True
        self._path = run_dir / METRICS_FILE
        with suppress(OSError):  # the first line waits
            append_whole(self._path, b"")
        self._waiting: deque[Line] = deque()  # lines that the record lacks
        self._lost = 0  # the oldest lines, for which there was no place in memory
        self._table = run_dir / CSV_FILE if log.csv else None
        self._columns: list[str] = []  # of the table, if it has all lines of the record
        self._failed, self._error = "", ""  # the file that cannot be written, and why
        self._retry_at = self._warned_at = -math.inf
        self._copies: dict[str, Copy] = {}
        for name, make in make_copies(run_dir, log).items():
            with self._guarded(name):
                self._copies[name] = make()

    def write(self, line: Line) -> None:
        """Append a line, with its step; it is on disk, or on its way, or waits in memory."""
        now = time.monotonic()
        self._waiting.append(line)
        if now >= self._retry_at:
            self._flush(now)
        if len(self._waiting) > WAITING:
            self._waiting.popleft()
            self._lost += 1
        for name, copy in list(self._copies.items()):
            with self._guarded(name, f" at step {line['step']}"):
                copy.write(line)

    def close(self, *, succeeded: bool = False) -> None:
        """Close all files; `missing` then has what is lost. May be called again. Never raises."""
        if not self._open:
            return
        self._open = False
        self._flush(time.monotonic())
        why = f" ({self._error})" if self._failed else ""
        if number := self._lost + len(self._waiting):
            self.missing.append(f"{number} line{'s' * (number != 1)} of {METRICS_FILE}{why}")
        if self._table is not None and not self._columns:
            self.missing.append(f"the last rows of {CSV_FILE}{why}")
        for name, copy in list(self._copies.items()):
            with self._guarded(name):
                copy.close(succeeded=succeeded)

    def _flush(self, now: float) -> None:
        """Write the lines that wait, as far as that is possible, and warn of a change."""
        failed, self._failed = self._failed, METRICS_FILE
        written: list[Line] = []
        try:
            while self._waiting:
                append_whole(self._path, (json_text(self._waiting[0]) + "\n").encode())
                written.append(self._waiting.popleft())
            self._failed = CSV_FILE
            if self._table is not None:
                self._append_rows(self._table, written)
            self._failed = ""
        except OSError as error:
            self._error, self._retry_at = error.strerror or str(error), now + RETRY_S
            self._columns = []
        older = f"; {self._lost} older ones are lost" if self._lost else ""
        if self._failed and now >= self._warned_at + WARN_EVERY_S:
            self._warned_at = now
            self._warn(
                f"{self._failed} cannot be written: {self._error}. Training continues, and up to "
                f"{WAITING} lines wait in memory until there is space{older}"
            )
        elif failed and not self._failed:
            self._warn(f"all lines of metrics that waited are written{older}")

    def _append_rows(self, table: Path, lines: Sequence[Line]) -> None:
        """Add the rows of lines that have just got into the record to a table. Raises OSError.

        A row has the same text for each number as the line. A value that a line lacks, and one that
        is not finite, is an empty cell. A new name, such as that of the first evaluation, adds a
        column at the end: the table is then written anew, as at the start, and after an error.
        """
        rows, columns = [flatten(line) for line in lines], set(self._columns)
        if columns and all(row.keys() <= columns for row in rows) and table.exists():
            append_whole(table, _csv_text(self._columns, rows))
        else:
            self._columns = _write_table(table, read_metrics(table.parent))

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


def rewind_csv(run_dir: Path, lines: Sequence[Line]) -> None:
    """Write a run's metrics.csv anew with these lines of metrics.jsonl, if the run has one."""
    path = run_dir / CSV_FILE
    if path.exists():
        _write_table(path, lines)


def _write_table(path: Path, lines: Sequence[Line]) -> list[str]:
    """Write a table, and return its columns, in the order in which the lines first have them."""
    rows = [flatten(line) for line in lines]
    columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
    header = dict(zip(columns, columns, strict=True))
    write_whole(path, _csv_text(columns, [header, *rows]))
    return columns


def _csv_text(columns: Sequence[str], rows: Iterable[Line]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = [row.get(name) for name in columns]
        writer.writerow(
            [c if not isinstance(c, float) or math.isfinite(c) else None for c in cells]
        )
    return text.getvalue().encode()
