"""Registry of reported metrics, and formats of their values.

Each metric is declared once, as a field of `StepRecord`: its unit, how it is reduced over ranks,
and where it is shown. metrics.jsonl, the display, the summary and any exporter take it from there.
A new metric needs two edits: a field here, and its value in `mntrain/train/trainer.py`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

Reduction = Literal["mean", "sum", "max", "same", "master"]
"""Over all ranks: the mean weighted by items, the sum, the maximum; or no reduction, because the
value is the same on every rank, or because it is the master's own."""

Row = Literal["line", "losses", "rates", "phases", "evaluation"]
"""A line of the log; a row of the live panel (losses, rates or phases); the line printed after an
evaluation."""


def loss_text(value: float) -> str:
    """Format a loss: 2.4312, 1.200e-05, nan."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.3e}"


def count_text(value: float) -> str:
    """Format a number in powers of 1000: 812, 12.3k, 1.20M."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P"))


def size_text(value: float) -> str:
    """Format bytes in powers of 1024: 512 B, 1.50 GiB."""
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """Format three digits and a unit; whole numbers below the first unit stay whole."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    whole = isinstance(value, int) or abs(value) >= 99.95
    return f"{value:.{0 if whole else 1 if abs(value) >= 9.995 else 2}f}{units[power]}"


def short_time(seconds: float) -> str:
    """Format a time below a minute: 21.3 us, 12.3 ms, 0.42 s."""
    if seconds >= 0.0995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


def clock_text(seconds: float) -> str:
    """Format hours, if any, minutes and seconds: 1:07, 12:01:07."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


@dataclass(frozen=True)
class Metric:
    """Declaration of a reported metric."""

    reduction: Reduction
    unit: str = ""
    label: str = ""  # on the display; by default the field's name
    format: Callable[[Any], str] = "{:.4g}".format  # an empty text hides the metric
    named: bool = False  # the value is a mapping, each item of which is shown by its own name
    rows: tuple[Row, ...] = ()
    summary: str = ""  # key of the last step's value in summary.json; "": not in the summary


_PHASE = Metric("master", "s", rows=("phases",))


@dataclass(frozen=True)
class StepRecord:
    """One training step, as a line of metrics.jsonl has it.

    A skipped step updated nothing and has no norms.
    """

    step: Annotated[int, Metric("same")]
    """1 for the first."""
    loss: Annotated[
        float,
        Metric("mean", format=loss_text, rows=("line", "losses"), summary="final_loss"),
    ]
    """Mean over the items (samples or tokens) of the step."""
    lr: Annotated[float, Metric("same", format="{:.1e}".format, rows=("line", "rates"))]
    grad_norm: Annotated[
        float | None,
        Metric("same", label="norm", format="{:.2g}".format, rows=("line", "rates")),
    ]
    """Norm of the mean gradient before clipping."""
    clip_coef: Annotated[
        float | None, Metric("same", label="clip", format="{:.2f}".format, rows=("rates",))
    ]
    clipped_norm: Annotated[float | None, Metric("same")]
    """Norm of the gradient after clipping."""
    samples: Annotated[int, Metric("same", "samples")]
    tokens_per_s: Annotated[float, Metric("master", "items/s", format=count_text)]
    """Items that the loss is a mean over (tokens or samples), a second."""
    step_s: Annotated[float, Metric("master", "s", format=short_time)]
    """From the end of the previous step to the end of this one."""
    data: Annotated[float, _PHASE]
    forward: Annotated[float, _PHASE]
    backward: Annotated[float, _PHASE]
    reduce_wait: Annotated[float, Metric("master", "s", "wait", rows=("phases",))]
    optimizer: Annotated[float, _PHASE]
    communication: Annotated[float, Metric("master", "s")]
    """Time in which a collective was in progress."""
    exposed: Annotated[float, Metric("master", "s")]
    """Time in which the master waited for a collective: communication that did not overlap."""
    metrics: Annotated[dict[str, float], Metric("mean", named=True, rows=("losses",))]
    """The task's further means, from `Loss.metrics`."""
    skipped: Annotated[
        bool,
        Metric(
            "same", format=lambda skipped: "gradient not finite" * skipped, rows=("line", "rates")
        ),
    ] = False
    eval_loss: Annotated[
        float | None,
        Metric(
            "mean",
            label="eval loss",
            format=loss_text,
            rows=("evaluation",),
            summary="eval_loss",
        ),
    ] = None
    """Of an evaluation after this step."""
    eval_metrics: Annotated[
        dict[str, float] | None,
        Metric("mean", named=True, rows=("evaluation",), summary="eval_metrics"),
    ] = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object, without absent values."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def pairs(self, row: Row) -> list[tuple[str, str]]:
        """Return the labels and formatted values that a row shows, without absent values."""
        pairs = []
        for name, metric in METRICS.items():
            value = getattr(self, name)
            if row not in metric.rows or value is None:
                continue
            named = value if metric.named else {metric.label: value}
            pairs += [(label, metric.format(item)) for label, item in named.items()]
        return [(label, text) for label, text in pairs if text]


METRICS: dict[str, Metric] = {
    name: replace(hint.__metadata__[0], label=hint.__metadata__[0].label or name)
    for name, hint in get_type_hints(StepRecord, include_extras=True).items()
}
"""Metrics by name, in the order in which they are shown."""

PHASES = tuple(name for name, metric in METRICS.items() if "phases" in metric.rows)
