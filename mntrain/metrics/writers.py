"""Writers of a run's metrics: metrics.jsonl, metrics.csv, TensorBoard and Weights & Biases.

metrics.jsonl is the record of a run, and an error in writing it is raised. The others are copies of
it for other tools: at its first error, a copy is closed with a warning, and training continues.
"""

import csv
import errno
import io
import math
import os
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from mntrain.config import LogConfig
from mntrain.metrics.files import (
    CONFIG_FILE,
    METRICS_FILE,
    flatten,
    json_text,
    open_metrics,
    read_metrics,
    write_whole,
)
from mntrain.metrics.registry import METRICS

CSV_FILE, TENSORBOARD_FOLDER, WANDB_ID_FILE = "metrics.csv", "tensorboard", ".wandb-id"
DECLARED = tuple(name for name, metric in METRICS.items() if not metric.named)
"""Columns that a training job's metrics.csv has from its first row on."""

_LOOK_S = 1.0  # between two looks for a deleted directory
_NEVER_S = 10**9  # TensorBoard's own flushes would fail in a thread of its own
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
    """One copy of a run's metrics. An error in any method ends it."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl, flattened."""

    def close(self, *, succeeded: bool) -> None:
        """Write what is left. Not called after an error."""


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
        self._record = open_metrics(run_dir)
        self._looked_at, self._told = time.monotonic(), False  # of a deleted directory
        self._copies: dict[str, Writer] = {}
        wanted = log.csv or log.tensorboard or log.wandb is not None
        lines = read_metrics(run_dir) if wanted else []
        self._open_copies(lines)
        if log.wandb is not None:
            with self._guarded("W&B"):
                self._copies["W&B"] = _WandbWriter(run_dir, log.wandb)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line, with its step; it is on disk or on its way when this returns."""
        if time.monotonic() > self._looked_at + _LOOK_S:
            self._restore_deleted(f" before step {line['step']}")
        self._record.write(json_text(line) + "\n")
        values = flatten(line)
        for name in list(self._copies):
            with self._guarded(name, f" at step {line['step']}"):
                self._copies[name].write(values)

    def close(self, *, succeeded: bool = False) -> None:
        """Close all files. May be called again."""
        if not self._record.closed:
            self._restore_deleted("")
        for name in list(self._copies):
            with self._guarded(name):
                self._copies.pop(name).close(succeeded=succeeded)
        self._record.close()

    def _open_copies(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Open the copies in the run's directory, which has these lines."""
        if self._log.csv:
            with self._guarded(CSV_FILE):
                path = self._run_dir / CSV_FILE
                self._copies[CSV_FILE] = _CsvWriter(path, self._columns, lines)
        if self._log.tensorboard:
            last = max((int(line["step"]) for line in lines), default=0)
            with self._guarded("TensorBoard"):
                self._copies["TensorBoard"] = _TensorBoardWriter(self._run_dir, last)

    def _restore_deleted(self, when: str) -> None:
        """Make the run's directory and metrics.jsonl anew if they were deleted, and warn once."""
        self._looked_at = time.monotonic()
        if (self._run_dir / METRICS_FILE).exists():
            return
        record, self._record = self._record, open_metrics(self._run_dir)
        record.close()
        for name in self._copies.keys() & {CSV_FILE, "TensorBoard"}:
            with self._guarded(name):
                self._copies.pop(name).close(succeeded=False)
        self._open_copies([])
        if not self._told:
            self._told = True
            self._warn(
                f"the run directory {self._run_dir}, or {METRICS_FILE} in it, was deleted or moved "
                f"while the job runs: it is made anew, and what it held{when} is no longer there"
            )

    @contextmanager
    def _guarded(self, name: str, when: str = "") -> Iterator[None]:
        """Drop a copy whose block raises, with a warning."""
        try:
            yield
        except Exception as error:  # of other people's code and servers
            self._copies.pop(name, None)
            self._warn(
                f"{name} gets no more metrics: {type(error).__name__}{when}: "
                f"{str(error).rstrip('.')}. Training continues, and metrics.jsonl has every step"
            )


class _CsvWriter:
    """metrics.csv: one row for each line of metrics.jsonl, with the same text for each number.

    A value that a line lacks, and one that is not finite, is an empty cell. A new name, such as a
    metric of the task, adds a column at the end: the file is then written anew.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], lines: Sequence[Mapping[str, Any]]
    ) -> None:
        self._path = path
        self._columns = _columns([*columns], lines)
        self._rewrite([flatten(line) for line in lines])

    def write(self, values: Mapping[str, Any]) -> None:
        if new := [name for name in values if name not in self._columns]:
            self._file.close()
            with self._path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite([*rows, values])
            return
        row, end = _csv_text(self._columns, [values]), self._file.tell()
        try:
            if self._file.write(row) < len(row):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with self._file, suppress(OSError):
                self._file.truncate(end)  # a part of a number would look like another number
            raise

    def close(self, *, succeeded: bool) -> None:
        self._file.close()

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        header = dict(zip(self._columns, self._columns, strict=True))
        write_whole(self._path, _csv_text(self._columns, [header, *rows]))
        self._file = self._path.open("ab", buffering=0)  # a row is one write


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

    Each step is on disk before `write` returns. TensorBoard drops what an earlier job wrote of
    steps after `last` (purge_step).
    """

    def __init__(self, run_dir: Path, last: int) -> None:
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        made = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = made(
            str(run_dir / TENSORBOARD_FOLDER), purge_step=last + 1, flush_secs=_NEVER_S
        )
        if text := _read_config(run_dir):
            code = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown
            self._writer.add_text(CONFIG_FILE, code, last)
        self._writer.flush()

    def write(self, values: Mapping[str, Any]) -> None:
        # One event a step takes a fifth of the time of SummaryWriter.add_scalar for each number.
        scalars = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._writer.file_writer.add_summary(self._summary(value=scalars), int(values["step"]))
        self._writer.flush()

    def close(self, *, succeeded: bool) -> None:
        self._writer.close()


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

    def write(self, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=int(values["step"]))

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


def _read_config(run_dir: Path) -> str:
    """Return the text of a run's config.toml, empty if there is none."""
    path = run_dir / CONFIG_FILE
    return path.read_text(encoding="utf-8") if path.exists() else ""
