"""Copies of metrics.jsonl for other tools: TensorBoard, Weights & Biases, MLflow, Prometheus.

Each takes the lines of a run, with their steps, and the end of a job. An exception ends a copy
(`mntrain.metrics.writers`).
"""

import io
import os
import re
import secrets
import socket
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

from mntrain.metrics.files import (
    CONFIG_FILE,
    Line,
    append_whole,
    flat_options,
    flatten,
    read_metrics,
    write_whole,
)
from mntrain.metrics.registry import METRICS, Metric
from mntrain.options.config import LogConfig

TENSORBOARD_FOLDER, PROMETHEUS_FILE = "tensorboard", "metrics.prom"
WANDB_ID_FILE, MLFLOW_ID_FILE = ".wandb-id", ".mlflow-id"
_WANDB_S = 40  # to connect, and at the end: an unreachable server must not hold the ranks for long
_MLFLOW_S, _PROMETHEUS_S = 10.0, 1.0  # between two writes
_MLFLOW_MOST = {"metrics": 1000, "params": 100}  # in a request
_MLFLOW_TEXT = 500  # characters of an option
# Of MLflow, unless they are set: an unreachable server ends the copy after 40 s, and its use is not
# reported.
_MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


# By option: the module that it imports, its package, and what pip installs.
_NEEDED = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny", "alembic mlflow-skinny sqlalchemy"),
    "prometheus": ("prometheus_client", "prometheus_client", "prometheus-client"),
    "report": ("matplotlib", "matplotlib", "jinja2 matplotlib"),
}


def _load(option: str) -> Any:
    for name, value in _MLFLOW_ENVIRONMENT.items() if option == "mlflow" else ():
        os.environ.setdefault(name, value)
    return import_module(_NEEDED[option][0])


def expect_installed(log: LogConfig, option: str = "--log.{}") -> None:
    """Raise ValueError if a package that an option needs cannot be imported. Local.

    `option` is how errors write an option of this name.
    """
    for name, (_, package, wheels) in _NEEDED.items():
        if getattr(log, name):
            try:
                _load(name)
            except Exception as error:  # a broken installation raises anything
                why = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
                raise ValueError(
                    f"{option.format(name)} needs the package {package}, which cannot be imported"
                    f"{why}: pip install {wheels}, or leave the option out"
                ) from error


class _Events:
    """Event files in RUN/tensorboard: a scalar for each number, and config.toml as text.

    An event is one write, without the thread of TensorBoard's own writer, which waits for ever on a
    full disk. TensorBoard drops what an earlier job wrote of steps after the last one of
    metrics.jsonl, as with SummaryWriter's purge_step.
    """

    _numbers = count()  # in the names of this process's files

    def __init__(self, run_dir: Path, log: LogConfig) -> None:
        events = import_module("tensorboard.compat.proto.event_pb2")
        self._event = events.Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._record = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._path = run_dir / TENSORBOARD_FOLDER / f"events.out.tfevents.{name}"
        self._path.parent.mkdir(exist_ok=True)
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

    def __init__(self, run_dir: Path, log: LogConfig) -> None:
        wandb = import_module("wandb")
        path = run_dir / WANDB_ID_FILE
        if not path.exists():
            write_whole(path, secrets.token_hex(8).encode())
        self._run = wandb.init(
            project=log.wandb,
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


class _MlflowRun:
    """A run of MLflow, which the next job of the same run continues.

    Lines are sent together, as far as MLflow lacks their steps: a step that is taken again keeps
    its first values, as options do. A run that starts over is a new one there.
    """

    def __init__(self, run_dir: Path, log: LogConfig) -> None:
        mlflow = _load("mlflow")
        self._entities = import_module("mlflow.entities")
        self._client = client = mlflow.MlflowClient()
        path = run_dir / MLFLOW_ID_FILE
        if not path.exists():
            if client.get_experiment_by_name(log.mlflow) is None:
                with suppress(mlflow.MlflowException):  # another job has made it meanwhile
                    client.create_experiment(log.mlflow)
            found = client.get_experiment_by_name(log.mlflow)
            made = client.create_run(found.experiment_id, run_name=run_dir.resolve().name)
            write_whole(path, made.info.run_id.encode())
        self._id = path.read_text().strip()
        client.update_run(self._id, status="RUNNING")
        known = client.get_run(self._id).data.params
        options = flat_options(tomllib.loads(_read_config(run_dir)))
        param = self._entities.Param
        new = [param(n, text[:_MLFLOW_TEXT]) for n, text in options.items() if n not in known]
        self._send("params", new)
        sent = client.get_metric_history(self._id, "step_s")
        self._last = max((metric.step for metric in sent), default=0)
        self._waiting: list[Any] = []  # metrics that were not sent yet
        self._sent_at = 0.0
        for line in read_metrics(run_dir):
            self._add(line)

    def write(self, line: Line) -> None:
        self._add(line)
        if time.monotonic() >= self._sent_at + _MLFLOW_S:
            self._flush()

    def close(self, *, succeeded: bool) -> None:
        self._flush()
        self._client.set_terminated(self._id, "FINISHED" if succeeded else "FAILED")

    def _add(self, line: Line) -> None:
        step, now = int(line["step"]), time.time_ns() // 1_000_000
        if step > self._last:
            self._waiting += [
                self._entities.Metric(re.sub(r"[^\w\-. /]", "_", name), float(value), now, step)
                for name, value in flatten(line).items()
                if name != "step" and isinstance(value, int | float)
            ]

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._send("metrics", waiting)
        self._sent_at = time.monotonic()

    def _send(self, kind: str, values: list[Any]) -> None:
        most = _MLFLOW_MOST[kind]
        for start in range(0, len(values), most):
            self._client.log_batch(self._id, **{kind: values[start : start + most]})


class _PrometheusFile:
    """metrics.prom: the last value of each metric, as node_exporter's textfile collector reads it.

    It is replaced as a whole, at most once a second. Evaluations stay until the next one.
    """

    def __init__(self, run_dir: Path, log: LogConfig) -> None:
        self._client = import_module("prometheus_client")
        self._path, self._run = run_dir / PROMETHEUS_FILE, run_dir.resolve().name
        self._values: dict[str, Any] = {}
        self._written_at = 0.0

    def write(self, line: Line) -> None:
        kept = {name: v for name, v in self._values.items() if name.startswith("eval_")}
        self._values = {**kept, **line}
        if time.monotonic() >= self._written_at + _PROMETHEUS_S:
            self._replace()

    def close(self, *, succeeded: bool) -> None:
        """Write the last line."""
        self._replace()

    def _replace(self) -> None:
        registry = self._client.CollectorRegistry()
        for name, value in self._values.items():
            declared = METRICS.get(name, Metric("mean"))
            label = "rank" if declared.reduction == "each" else "name"
            labels = ["run", label] if isinstance(value, Mapping) else ["run"]
            shown = _prometheus_name(name, declared.unit)
            gauge = self._client.Gauge(shown, f"{name} of metrics.jsonl", labels, registry=registry)
            for inner, number in (value if isinstance(value, Mapping) else {"": value}).items():
                if isinstance(number, Real):
                    gauge.labels(self._run, *([inner] if len(labels) > 1 else [])).set(number)
        write_whole(self._path, self._client.generate_latest(registry))
        self._written_at = time.monotonic()


Copy: TypeAlias = _Events | _WandbRun | _MlflowRun | _PrometheusFile
# By option: the name of the tool, and its copy.
COPIES: dict[str, tuple[str, Callable[[Path, LogConfig], Copy]]] = {
    "tensorboard": ("TensorBoard", _Events),
    "wandb": ("W&B", _WandbRun),
    "mlflow": ("MLflow", _MlflowRun),
    "prometheus": ("Prometheus", _PrometheusFile),
}


def _prometheus_name(name: str, unit: str) -> str:
    """Return a metric's name as Prometheus has it, which ends with the unit in full."""
    if unit == "s":
        name = f"{name.removesuffix('_s')}_seconds"
    elif unit == "bytes":
        name = f"{name}_bytes"
    return "mntrain_" + re.sub(r"\W", "_", re.sub("_per_s$", "_per_second", name))


def _read_config(run_dir: Path) -> str:
    path = run_dir / CONFIG_FILE
    return path.read_text(encoding="utf-8") if path.exists() else ""
