"""Registry of reported metrics: each is declared once, as a field of `StepRecord`.

The declaration says in which unit a metric is, how it is reduced over ranks, and where it is shown.
metrics.jsonl, the display, the summary and any exporter take it from there. A new metric needs two
edits: a field here, and its value in `mntrain/train/trainer.py`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from mntrain.metrics import units

Reduction = Literal["mean", "sum", "max", "same", "master"]
"""Over all ranks: the mean weighted by items, the sum, the maximum; or no reduction, because the
value is the same on every rank, or because it is the master's own."""

Row = Literal["line", "losses", "rates", "phases", "evaluation"]
"""A line of the log; a row of the live panel (losses, rates or phases); the line printed after an
evaluation."""


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
        Metric("mean", format=units.number, rows=("line", "losses"), summary="final_loss"),
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
    tokens_per_s: Annotated[float, Metric("master", "items/s", format=units.count)]
    """Items that the loss is a mean over (tokens or samples), a second."""
    step_s: Annotated[float, Metric("master", "s", format=units.short_time)]
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
            format=units.number,
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
