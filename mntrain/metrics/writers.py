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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, Self

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
_WANDB_S = 40  # to connect, and at the end: an unreachable server must not hold the ranks for long

Line = Mapping[str, Any]


def expect_installed(log: LogConfig, option: str = "--log.{}") -> None:
    """Raise ValueError if a package that an option needs cannot be imported. Local.

    `option` is how errors write an option of this name.
    """
    for name, module in {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}.items():
        if getattr(log, name):
            try:
                import_module(module)
            except Exception as error:  # a broken installation raises anything
                why = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
                raise ValueError(
                    f"{option.format(name)} needs the package {name}, which cannot be imported"
                    f"{why}: pip install 'mntrain[{name}]', or leave the option out"
                ) from error


class _Output(ABC):
    """A file of a run's metrics, or a run at W&B: lines that it cannot take wait in memory.

    An OSError of `append` and `end` may end by itself; an error of another kind ends the output.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: deque[Line] = deque()
        self.lost = 0  # the oldest lines, for which there was no place in memory
        self.error: OSError | None = None  # why lines wait
        self._retry_at = -math.inf
        self._file: FileIO | None = None

    @abstractmethod
    def append(self, line: Line) -> None:
        """Add all of a line of metrics.jsonl, or raise OSError."""

    def end(self, *, succeeded: bool) -> None:
        """Write what is left, after which this output takes no more. Raises OSError."""
        self.drop()

    def _add(self, content: bytes) -> None:
        assert self._file is not None
        append_whole(self._file, content)

    def drop(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()

    def write(self, line: Line, now: float) -> None:
        """Write a line after those that wait, or let it wait."""
        self.waiting.append(line)
        if now >= self._retry_at:
            self.flush(now)
        if len(self.waiting) > WAITING:
            self.waiting.popleft()
            self.lost += 1

    def flush(self, now: float) -> None:
        """Write the lines that wait, as far as that is possible."""
        try:
            while self.waiting:
                self.append(self.waiting[0])
                self.waiting.popleft()
            self.error = None
        except OSError as error:
            self.error, self._retry_at = error, now + RETRY_S

    def after(self, other: "_Output") -> Self:
        """Take over the lines of one whose file is gone; return this one."""
        with suppress(OSError):
            other.drop()
        self.waiting, self.lost = other.waiting, other.lost
        return self

    def missing(self) -> list[str]:
        """Return what is lost at the end, as a text."""
        count = self.lost + len(self.waiting)
        if not count and not self.error:
            return []
        why = f" ({_reason(self.error)})" if self.error else ""
        amount = f"{count} line{'s' * (count != 1)}" if count else "the last lines"
        return [f"{amount} of {self.name}{why}"]


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
        self._warned_at, self._were_waiting = -math.inf, False
        self._looked_at, self._told = time.monotonic(), False  # of a deleted directory
        self.missing: list[str] = []
        """Lines that were not written, a text for each file; complete after `close`."""
        self._outputs: dict[str, _Output] = {METRICS_FILE: _Record(run_dir)}
        copies = log.csv or log.tensorboard or log.wandb is not None
        for name, make in self._copies(read_metrics(run_dir) if copies else []).items():
            with self._guarded(name):
                self._outputs[name] = make()

    def write(self, line: Line) -> None:
        """Append a line, with its step; it is on disk, or on its way, or waits in memory."""
        now = time.monotonic()
        if now > self._looked_at + _LOOK_S:
            self._restore_deleted(f" before step {line['step']}")
        for name, output in list(self._outputs.items()):
            with self._guarded(name, f" at step {line['step']}"):
                output.write(line, now)
        self._report_waiting(now)

    def close(self, *, succeeded: bool = False) -> None:
        """Close all files; `missing` then has what is lost. May be called again. Never raises."""
        if self._outputs:
            self._restore_deleted("")
        for name, output in list(self._outputs.items()):
            with self._guarded(name):
                output.flush(time.monotonic())
                try:
                    output.end(succeeded=succeeded)
                except OSError as error:  # as some file systems tell of a full disk
                    output.error = output.error or error
                self.missing += output.missing()
        self._outputs = {}

    def _copies(self, lines: Sequence[Line]) -> dict[str, Callable[[], _Output]]:
        run_dir, log = self._run_dir, self._log
        last = max((int(line["step"]) for line in lines), default=0)
        every: dict[str, tuple[object, Callable[[], _Output]]] = {
            CSV_FILE: (log.csv, lambda: _Table(run_dir, self._columns, lines)),
            "TensorBoard": (log.tensorboard, lambda: _Events(run_dir, last)),
            "W&B": (log.wandb, lambda: _WandbRun(run_dir, str(log.wandb))),
        }
        return {name: make for name, (wanted, make) in every.items() if wanted}

    def _restore_deleted(self, when: str) -> None:
        """Make the run's directory and its files anew if they were deleted, and warn once."""
        self._looked_at = time.monotonic()
        if (self._run_dir / METRICS_FILE).exists():
            return
        try:
            self._outputs[METRICS_FILE] = _Record(self._run_dir).after(self._outputs[METRICS_FILE])
        except OSError:  # it cannot be made now: the next look may succeed
            return
        for name, make in self._copies([]).items():
            if name in self._outputs and name != "W&B":
                with self._guarded(name):
                    self._outputs[name] = make().after(self._outputs[name])
        if not self._told:
            self._told = True
            self._warn(
                f"the run directory {self._run_dir}, or {METRICS_FILE} in it, was deleted or moved "
                f"while the job runs: it is made anew, and what it held{when} is no longer there"
            )

    def _report_waiting(self, now: float) -> None:
        """Warn of lines that wait, once a minute, and say when none do any more."""
        waiting = [output for output in self._outputs.values() if output.waiting]
        lost = sum(output.lost for output in self._outputs.values())
        older = f"; {lost} older ones are lost" if lost else ""
        if waiting and now >= self._warned_at + WARN_EVERY_S:
            self._warned_at, self._were_waiting = now, True
            most = max(len(output.waiting) for output in waiting)
            names = " and ".join(output.name for output in waiting)
            self._warn(
                f"{names} cannot be written: {_reason(waiting[0].error)}. Training continues: "
                f"{most} line{'s' * (most != 1)} of at most {WAITING} wait in memory until there "
                f"is space{older}"
            )
        elif self._were_waiting and not waiting:
            self._were_waiting = False
            self._warn(f"all lines of metrics that waited are written{older}")

    @contextmanager
    def _guarded(self, name: str, when: str = "") -> Iterator[None]:
        """Drop a copy whose block raises, with a warning."""
        try:
            yield
        except Exception as error:  # of other people's code and servers
            with suppress(KeyError, OSError):
                self._outputs.pop(name).drop()
            self._warn(
                f"{name} gets no more metrics: {type(error).__name__}{when}: "
                f"{str(error).rstrip('.')}. Training continues, and metrics.jsonl has every step"
            )


def _reason(error: OSError | None) -> str:
    return str(error and (error.strerror or error))


class _Record(_Output):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(METRICS_FILE)
        self._file = open_to_append(run_dir / METRICS_FILE)

    def append(self, line: Line) -> None:
        self._add((json_text(line) + "\n").encode())


class _Table(_Output):
    """metrics.csv: one row for each line of metrics.jsonl, with the same text for each number.

    A value that a line lacks, and one that is not finite, is an empty cell. A new name, such as a
    metric of the task, adds a column at the end: the file is then written anew.
    """

    def __init__(self, run_dir: Path, columns: Iterable[str], lines: Sequence[Line]) -> None:
        super().__init__(CSV_FILE)
        self._path = run_dir / CSV_FILE
        self._open(columns, [flatten(line) for line in lines])

    def append(self, line: Line) -> None:
        row = flatten(line)
        if row.keys() <= set(self._columns):
            self._add(_csv_text(self._columns, [row]))
            return
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self._open(self._columns, [*rows, row])

    def _open(self, columns: Iterable[str], rows: Sequence[Line]) -> None:
        self._columns = _write_table(self._path, columns, rows)
        self.drop()
        self._file = open_to_append(self._path)


def rewind_csv(run_dir: Path, lines: Sequence[Line]) -> None:
    """Write a run's metrics.csv anew with these lines of metrics.jsonl, if the run has one."""
    path = run_dir / CSV_FILE
    if path.exists():
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            columns = next(csv.reader(file), ["step"])
        _write_table(path, columns, [flatten(line) for line in lines])


def _write_table(path: Path, first: Iterable[str], rows: Sequence[Line]) -> list[str]:
    """Write a table, and return its columns: the first ones, and others in the rows' order."""
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
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


class _Events(_Output):
    """Event files in RUN/tensorboard: a scalar for each number, and config.toml as text.

    An event is one write, without TensorBoard's own thread, in which a full disk would end its
    writer with half an event in the file. TensorBoard drops what an earlier job wrote of steps
    after `last`, as with SummaryWriter's purge_step.
    """

    _numbers = count()  # in the names of this process's files

    def __init__(self, run_dir: Path, last: int) -> None:
        super().__init__("TensorBoard")
        events = import_module("tensorboard.compat.proto.event_pb2")
        self._event = events.Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._record = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._file = open_to_append(run_dir / TENSORBOARD_FOLDER / f"events.out.tfevents.{name}")
        version, start = "brain.Event:2", events.SessionLog(status=events.SessionLog.START)
        first = [self._encode(0, file_version=version)]
        first += [self._encode(last + 1, file_version=version)]
        first += [self._encode(last + 1, session_log=start)]
        if text := _read_config(run_dir):
            code = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown
            texts = import_module("torch.utils.tensorboard.summary")
            first += [self._encode(last, summary=texts.text(CONFIG_FILE, code))]
        self._add(b"".join(first))

    def append(self, line: Line) -> None:
        # One event a step takes a fifth of the time of SummaryWriter.add_scalar for each number.
        scalars = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in flatten(line).items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._add(self._encode(int(line["step"]), summary=self._summary(value=scalars)))

    def _encode(self, step: int, **content: Any) -> bytes:
        record = io.BytesIO()
        event = self._event(wall_time=time.time(), step=step, **content)
        self._record(record).write(event.SerializeToString())
        return record.getvalue()


class _WandbRun(_Output):
    """A run of W&B, which the next job of the same run continues.

    W&B keeps the first values that it got of a step. A run that starts over is a new one there.
    """

    def __init__(self, run_dir: Path, project: str) -> None:
        super().__init__("W&B")
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

    def append(self, line: Line) -> None:
        with self._no_retry():
            self._run.log(flatten(line), step=int(line["step"]))

    def end(self, *, succeeded: bool) -> None:
        with self._no_retry():
            self._run.finish(exit_code=0 if succeeded else 1)

    @contextmanager
    def _no_retry(self) -> Iterator[None]:
        """Turn an OSError into another error: each further try would wait for the server again."""
        try:
            yield
        except OSError as error:
            raise RuntimeError(str(error)) from error


def _read_config(run_dir: Path) -> str:
    path = run_dir / CONFIG_FILE
    return path.read_text(encoding="utf-8") if path.exists() else ""
