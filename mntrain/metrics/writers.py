"""Writers of a run's metrics: metrics.jsonl, metrics.csv, TensorBoard and Weights & Biases.

metrics.jsonl is the record of a run, and the others are copies of it for other tools. Lines that a
file cannot take, on a full disk for example, wait in memory until it can. At any other error, a
copy is closed with a warning. Training continues in both cases.
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
from typing import Any, Protocol

from mntrain.config import LogConfig
from mntrain.metrics.files import (
    CONFIG_FILE,
    METRICS_FILE,
    append_whole,
    flatten,
    json_text,
    open_to_append,
    read_metrics,
    write_whole,
)
from mntrain.metrics.registry import METRICS

CSV_FILE, TENSORBOARD_FOLDER, WANDB_ID_FILE = "metrics.csv", "tensorboard", ".wandb-id"
DECLARED = tuple(name for name, metric in METRICS.items() if not metric.named)
"""Columns that a training job's metrics.csv has from its first row on."""

WAITING = 10_000  # lines of a file that wait in memory at most
WARN_EVERY_S, RETRY_S = 60.0, 1.0  # while a file cannot be written
_LOOK_S = 1.0  # between two looks for a deleted directory
_WANDB_INIT_S, _WANDB_FINISH_S = 40, 40  # an unreachable server must not hold the ranks for long


def expect_installed(log: LogConfig, option: str = "--log.{}") -> None:
    """Raise ValueError if a package that an option needs cannot be imported. Local.

    `option` is how errors write an option of this name.
    """
    packages = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    for name, module in packages.items():
        if getattr(log, name):
            try:
                import_module(module)
            except Exception as error:  # a broken installation raises anything
                why = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
                raise ValueError(
                    f"{option.format(name)} needs the package {name}, which cannot be imported"
                    f"{why}: pip install 'mntrain[{name}]', or leave the option out"
                ) from error


class Writer(Protocol):
    """One file of a run's metrics, or a run at W&B.

    An OSError of `write` and `close` may end by itself; an error of another kind ends the writer.
    """

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl. Adds all of it, or raises OSError."""

    def close(self, *, succeeded: bool) -> None:
        """Write what is left. Not called after an error of another kind."""


class _Waiting:
    """A writer whose lines wait in memory, up to `WAITING` of them, while it cannot write."""

    def __init__(self, name: str, writer: Writer) -> None:
        self.name, self.writer = name, writer
        self.lines: deque[Mapping[str, Any]] = deque()
        self.lost = 0  # the oldest lines, for which there was no place in memory
        self.error: OSError | None = None  # why lines wait
        self._retry_at = -math.inf

    def write(self, line: Mapping[str, Any], now: float) -> None:
        """Write a line after those that wait, or let it wait."""
        self.lines.append(line)
        if now >= self._retry_at:
            self.flush(now)
        if len(self.lines) > WAITING:
            self.lines.popleft()
            self.lost += 1

    def flush(self, now: float) -> None:
        """Write the lines that wait, as far as that is possible."""
        try:
            while self.lines:
                self.writer.write(self.lines[0])
                self.lines.popleft()
            self.error = None
        except OSError as error:
            self.error = error
            self._retry_at = now + RETRY_S

    def replace(self, writer: Writer) -> None:
        """Go on with another writer, since the file of this one is gone."""
        with suppress(OSError):
            self.writer.close(succeeded=False)
        self.writer = writer


class MetricsFiles:
    """metrics.jsonl of a run and its copies, in one process.

    `columns` are those of metrics.csv from the first row on; `warn` prints a warning. Makes the
    run's directory if there is none. Continues the files that are there, which must have been
    rewound to the step that the job continues from (`mntrain.run.directory.rewind`).
    """

    def __init__(
        self, run_dir: Path, log: LogConfig, columns: Sequence[str], warn: Callable[[str], None]
    ) -> None:
        self._warn, self._run_dir, self._log, self._columns = warn, run_dir, log, columns
        self._warned_at = -math.inf
        self._were_waiting = False
        self._looked_at, self._told = time.monotonic(), False  # of a deleted directory
        self.missing: list[str] = []
        """Lines that were not written, a text for each file; complete after `close`."""
        self._files = {METRICS_FILE: _Waiting(METRICS_FILE, _JsonWriter(run_dir / METRICS_FILE))}
        wanted = log.csv or log.tensorboard or log.wandb is not None
        lines = read_metrics(run_dir) if wanted else []
        for name, make in self._copies(lines).items():
            with self._guarded(name):
                self._files[name] = _Waiting(name, make())
        if (project := log.wandb) is not None:
            with self._guarded("W&B"):
                self._files["W&B"] = _Waiting("W&B", _WandbWriter(run_dir, project))

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line, with its step; it is on disk, or on its way, or waits in memory."""
        now = time.monotonic()
        if now > self._looked_at + _LOOK_S:
            self._restore_deleted(f" before step {line['step']}")
        for name, file in list(self._files.items()):
            with self._guarded(name, f" at step {line['step']}"):
                file.write(line, now)
        self._report_waiting(now)

    def close(self, *, succeeded: bool = False) -> None:
        """Close all files; `missing` then has what is lost. May be called again. Never raises."""
        if self._files:
            self._restore_deleted("")
        for name, file in list(self._files.items()):
            with self._guarded(name):
                file.flush(time.monotonic())
                try:
                    file.writer.close(succeeded=succeeded)
                except OSError as error:  # as some file systems tell of a full disk
                    file.error = file.error or error
                lost = file.lost + len(file.lines)
                if lost or file.error:
                    why = f" ({_reason(file.error)})" if file.error else ""
                    amount = f"{lost} line{'s' * (lost != 1)}" if lost else "the last lines"
                    self.missing.append(f"{amount} of {name}{why}")
        self._files = {}

    def _copies(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Callable[[], Writer]]:
        """Return what opens each copy in the run's directory, which has these lines."""
        copies: dict[str, Callable[[], Writer]] = {}
        if self._log.csv:
            path = self._run_dir / CSV_FILE
            copies[CSV_FILE] = lambda: _CsvWriter(path, self._columns, lines)
        if self._log.tensorboard:
            last = max((int(line["step"]) for line in lines), default=0)
            copies["TensorBoard"] = lambda: _TensorBoardWriter(self._run_dir, last)
        return copies

    def _restore_deleted(self, when: str) -> None:
        """Make the run's directory and its files anew if they were deleted, and warn once."""
        self._looked_at = time.monotonic()
        if (self._run_dir / METRICS_FILE).exists():
            return
        try:
            self._files[METRICS_FILE].replace(_JsonWriter(self._run_dir / METRICS_FILE))
        except OSError:  # it cannot be made now: the next look may succeed
            return
        for name, make in self._copies([]).items():
            if name in self._files:
                with self._guarded(name):
                    self._files[name].replace(make())
        if not self._told:
            self._told = True
            self._warn(
                f"the run directory {self._run_dir}, or {METRICS_FILE} in it, was deleted or moved "
                f"while the job runs: it is made anew, and what it held{when} is no longer there"
            )

    def _report_waiting(self, now: float) -> None:
        """Warn of lines that wait, once a minute, and say when none do any more."""
        waiting = [file for file in self._files.values() if file.lines]
        if waiting and now >= self._warned_at + WARN_EVERY_S:
            self._warned_at, self._were_waiting = now, True
            most = max(len(file.lines) for file in waiting)
            names = " and ".join(file.name for file in waiting)
            self._warn(
                f"{names} cannot be written: {_reason(waiting[0].error)}. Training continues: "
                f"{most} line{'s' * (most != 1)} of at most {WAITING} wait in memory until there "
                f"is space{self._lost()}"
            )
        elif self._were_waiting and not waiting:
            self._were_waiting = False
            self._warn(f"all lines of metrics that waited are written{self._lost()}")

    def _lost(self) -> str:
        lost = sum(file.lost for file in self._files.values())
        return f"; {lost} older ones are lost" if lost else ""

    @contextmanager
    def _guarded(self, name: str, when: str = "") -> Iterator[None]:
        """Drop a copy whose block raises, with a warning."""
        try:
            yield
        except Exception as error:  # of other people's code and servers
            self._files.pop(name, None)
            self._warn(
                f"{name} gets no more metrics: {type(error).__name__}{when}: "
                f"{str(error).rstrip('.')}. Training continues, and metrics.jsonl has every step"
            )


def _reason(error: OSError | None) -> str:
    return str(error and (error.strerror or error))


class _JsonWriter:
    """metrics.jsonl: one line for each step."""

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)

    def write(self, line: Mapping[str, Any]) -> None:
        append_whole(self._file, (json_text(line) + "\n").encode())

    def close(self, *, succeeded: bool) -> None:
        self._file.close()


class _CsvWriter:
    """metrics.csv: one row for each line of metrics.jsonl, with the same text for each number.

    A value that a line lacks, and one that is not finite, is an empty cell. A new name, such as a
    metric of the task, adds a column at the end: the file is then written anew.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], lines: Sequence[Mapping[str, Any]]
    ) -> None:
        self._path = path
        self._rewrite(_columns([*columns], lines), [flatten(line) for line in lines])

    def write(self, line: Mapping[str, Any]) -> None:
        values = flatten(line)
        if new := [name for name in values if name not in self._columns]:
            with self._path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            before = self._file
            self._rewrite([*self._columns, *new], [*rows, values])
            before.close()
        else:
            append_whole(self._file, _csv_text(self._columns, [values]))

    def close(self, *, succeeded: bool) -> None:
        self._file.close()

    def _rewrite(self, columns: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
        header = dict(zip(columns, columns, strict=True))
        write_whole(self._path, _csv_text(columns, [header, *rows]))
        self._columns, self._file = columns, open_to_append(self._path)


def rewind_csv(run_dir: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a run's metrics.csv anew with these lines of metrics.jsonl, if the run has one."""
    path = run_dir / CSV_FILE
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        columns = _columns(next(csv.reader(file), ["step"]), lines)
    header = dict(zip(columns, columns, strict=True))
    write_whole(path, _csv_text(columns, [header, *map(flatten, lines)]))


def _columns(first: list[str], lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return column names, followed by other names in the order in which lines have them."""
    names = [name for line in lines for name in flatten(line)]
    return list(dict.fromkeys([*first, *names]))


def _csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = [row.get(name) for name in columns]
        writer.writerow([None if _is_not_finite(cell) else cell for cell in cells])
    return text.getvalue().encode()


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class _TensorBoardWriter:
    """Event files in RUN/tensorboard: a scalar for each number, and config.toml as text.

    An event is one write, without TensorBoard's own thread, in which a full disk would end its
    writer with half an event in the file. TensorBoard drops what an earlier job wrote of steps
    after `last`, as with SummaryWriter's purge_step.
    """

    _numbers = count()  # in the names of this process's files

    def __init__(self, run_dir: Path, last: int) -> None:
        events = import_module("tensorboard.compat.proto.event_pb2")
        self._event = events.Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._record = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._file = open_to_append(run_dir / TENSORBOARD_FOLDER / f"events.out.tfevents.{name}")
        version, start = "brain.Event:2", events.SessionLog(status=events.SessionLog.START)
        first = [self._made(0, file_version=version)]
        first += [self._made(last + 1, file_version=version)]
        first += [self._made(last + 1, session_log=start)]
        if text := _read_config(run_dir):
            code = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown
            texts = import_module("torch.utils.tensorboard.summary")
            first += [self._made(last, summary=texts.text(CONFIG_FILE, code))]
        append_whole(self._file, b"".join(first))

    def write(self, line: Mapping[str, Any]) -> None:
        # One event a step takes a fifth of the time of SummaryWriter.add_scalar for each number.
        scalars = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in flatten(line).items()
            if name != "step" and isinstance(value, int | float)
        ]
        summary = self._summary(value=scalars)
        try:
            event = self._made(int(line["step"]), summary=summary)
        except Exception:  # the last call of this writer
            self._file.close()
            raise
        append_whole(self._file, event)

    def close(self, *, succeeded: bool) -> None:
        self._file.close()

    def _made(self, step: int, **content: Any) -> bytes:
        """Return an event as the bytes of a record in the file."""
        record = io.BytesIO()
        event = self._event(wall_time=time.time(), step=step, **content)
        self._record(record).write(event.SerializeToString())
        return record.getvalue()


class _WandbWriter:
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
            settings=wandb.Settings(init_timeout=_WANDB_INIT_S, finish_timeout=_WANDB_FINISH_S),
        )

    def write(self, line: Mapping[str, Any]) -> None:
        with _no_waiting():
            self._run.log(flatten(line), step=int(line["step"]))

    def close(self, *, succeeded: bool) -> None:
        with _no_waiting():
            self._run.finish(exit_code=0 if succeeded else 1)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Turn an OSError into another error: each further try would wait for the server again."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(str(error)) from error


def _read_config(run_dir: Path) -> str:
    """Return the text of a run's config.toml, empty if there is none."""
    path = run_dir / CONFIG_FILE
    return path.read_text(encoding="utf-8") if path.exists() else ""
