"""Writers of a run's metrics: metrics.jsonl, metrics.csv, TensorBoard and Weights & Biases.

metrics.jsonl is the record of a run, and the others are copies of it for other tools. Lines that it
cannot take, on a full disk for example, wait in memory until it can; metrics.csv is then written
anew from it. At an error, TensorBoard or W&B gets no more, with a warning. Training continues.
"""

import csv
import io
import math
import os
import secrets
import socket
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from mntrain.config import LogConfig
from mntrain.metrics.files import (
    CONFIG_FILE,
    METRICS_FILE,
    append_whole,
    flatten,
    json_text,
    read_metrics,
    write_whole,
)

CSV_FILE, TENSORBOARD_FOLDER, WANDB_ID_FILE = "metrics.csv", "tensorboard", ".wandb-id"
WAITING = 10_000  # lines that wait in memory at most
WARN_EVERY_S, RETRY_S = 60.0, 1.0  # while a file cannot be written
_WANDB_S = 40  # to connect, and at the end: an unreachable server must not hold the ranks for long

# By option: the module that is imported, its package, and the extra that installs it.
_NEEDED = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb", "wandb"),
    "report": ("matplotlib", "matplotlib", "plot"),
}

Line = Mapping[str, Any]


def expect_installed(log: LogConfig, option: str = "--log.{}") -> None:
    """Raise ValueError if a package that an option needs cannot be imported. Local.

    `option` is how errors write an option of this name.
    """
    for name, (module, package, extra) in _NEEDED.items():
        if getattr(log, name):
            try:
                import_module(module)
            except Exception as error:  # a broken installation raises anything
                why = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
                raise ValueError(
                    f"{option.format(name)} needs the package {package}, which cannot be imported"
                    f"{why}: pip install 'mntrain[{extra}]', or leave the option out"
                ) from error


class MetricsFiles:
    """metrics.jsonl of a run and its copies, in one process.

    `warn` prints a warning. Makes the run's directory if there is none. Continues the files that
    are there, which must have been rewound to the step that the job continues from
    (`mntrain.run.directory.rewind`).
    """

    def __init__(self, run_dir: Path, log: LogConfig, warn: Callable[[str], None]) -> None:
        self.missing: list[str] = []
        """What was not written, a text for each file; complete after `close`."""
        self._warn, self._open = warn, True
        self._path = run_dir / METRICS_FILE
        with suppress(OSError):  # the first line waits
            append_whole(self._path, b"")
        self._waiting: deque[Line] = deque()  # lines that the record lacks
        self._lost = 0  # the oldest lines, for which there was no place in memory
        self._table = _Table(run_dir) if log.csv else None
        self._failed, self._error = "", ""  # the file that cannot be written, and why
        self._retry_at = self._warned_at = -math.inf
        self._copies: dict[str, _Events | _WandbRun] = {}
        if log.tensorboard:
            with self._guarded("TensorBoard"):
                self._copies["TensorBoard"] = _Events(run_dir)
        if log.wandb is not None:
            with self._guarded("W&B"):
                self._copies["W&B"] = _WandbRun(run_dir, log.wandb)

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
        if self._table is not None and not self._table.complete:
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
                self._table.append(written)
            self._failed = ""
        except OSError as error:
            self._error, self._retry_at = error.strerror or str(error), now + RETRY_S
            if self._table is not None:
                self._table.complete = False
        older = f"; {self._lost} older ones are lost" if self._lost else ""
        if self._failed and now >= self._warned_at + WARN_EVERY_S:
            self._warned_at = now
            self._warn(
                f"{self._failed} cannot be written: {self._error}. Training continues, and up to "
                f"{WAITING} lines wait in memory until there is space{older}"
            )
        elif failed and not self._failed:
            self._warn(f"all lines of metrics that waited are written{older}")

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


class _Table:
    """metrics.csv: one row for each line of metrics.jsonl, with the same text for each number.

    A value that a line lacks, and one that is not finite, is an empty cell. A new name, such as
    that of the first evaluation, adds a column at the end: the file is then written anew, as it is
    at the start, and after an error.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / CSV_FILE
        self._columns: list[str] = []
        self.complete = False  # the file has all lines of metrics.jsonl

    def append(self, lines: Sequence[Line]) -> None:
        """Add the rows of lines that have just got into metrics.jsonl. Raises OSError."""
        rows = [flatten(line) for line in lines]
        known = all(row.keys() <= set(self._columns) for row in rows)
        if self.complete and known and self._path.exists():
            append_whole(self._path, _csv_text(self._columns, rows))
        else:
            self._columns = _write_table(self._path, read_metrics(self._run_dir))
            self.complete = True


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


class _Events:
    """Event files in RUN/tensorboard: a scalar for each number, and config.toml as text.

    An event is one write, without the thread of TensorBoard's own writer, which waits for ever on a
    full disk. TensorBoard drops what an earlier job wrote of steps after the last one of
    metrics.jsonl, as with SummaryWriter's purge_step.
    """

    _numbers = count()  # in the names of this process's files

    def __init__(self, run_dir: Path) -> None:
        events = import_module("tensorboard.compat.proto.event_pb2")
        self._event = events.Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._record = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._path = run_dir / TENSORBOARD_FOLDER / f"events.out.tfevents.{name}"
        last = max((int(line["step"]) for line in read_metrics(run_dir)), default=0)
        version, start = "brain.Event:2", events.SessionLog(status=events.SessionLog.START)
        self._add(0, file_version=version)
        self._add(last + 1, file_version=version)
        self._add(last + 1, session_log=start)
        if text := _read_config(run_dir):
            code = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown
            texts = import_module("torch.utils.tensorboard.summary")
            self._add(last, summary=texts.text(CONFIG_FILE, code))

    def write(self, line: Line) -> None:
        # One event a step takes a fifth of the time of SummaryWriter.add_scalar for each number.
        scalars = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in flatten(line).items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._add(int(line["step"]), summary=self._summary(value=scalars))

    def close(self, *, succeeded: bool) -> None:
        """Do nothing: the file is closed after each event."""

    def _add(self, step: int, **content: Any) -> None:
        record = io.BytesIO()
        event = self._event(wall_time=time.time(), step=step, **content)
        self._record(record).write(event.SerializeToString())
        append_whole(self._path, record.getvalue())


class _WandbRun:
    """A run of W&B, which the next job of the same run continues.

    W&B keeps the first values that it got of a step. A run that starts over is a new one there.
    """

    def __init__(self, run_dir: Path, project: str) -> None:
        wandb = import_module("wandb")
        path = run_dir / WANDB_ID_FILE
        if not path.exists():
            write_whole(path, secrets.token_hex(8).encode())
        self._run = wandb.init(
            project=project,
            name=run_dir.resolve().name,
            id=path.read_text().strip(),
            resume="allow",
            reinit="create_new",  # beside a run of the user's own
            dir=str(run_dir),
            config=tomllib.loads(_read_config(run_dir)),
            allow_val_change=True,
            settings=wandb.Settings(init_timeout=_WANDB_S, finish_timeout=_WANDB_S),
        )

    def write(self, line: Line) -> None:
        self._run.log(flatten(line), step=int(line["step"]))

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


def _read_config(run_dir: Path) -> str:
    path = run_dir / CONFIG_FILE
    return path.read_text(encoding="utf-8") if path.exists() else ""
