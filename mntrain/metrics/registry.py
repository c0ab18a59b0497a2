"""Registry of reported metrics, formats of their values, and the stopwatch of a step.

Each metric is declared once, as a field of `StepRecord`: its unit, how it is reduced over ranks,
and where it is shown. metrics.jsonl, the display, the summary and any exporter take it from there.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

from mntrain.comm.world_collectives import WorldCollectives
from mntrain.recorder.events import Recorder

Reduction = Literal["mean", "sum", "max", "same", "master", "each"]
"""Reduction over ranks: the mean weighted by items, the sum, the maximum; or none, because the
value is the same on every rank, because it is the master's own, or because each rank has its own,
by its number."""

Row = Literal["line", "phases", "evaluation"]
"""Place on the display: the line of a step, its shares of time, the line of an evaluation."""

_loss_text = "{:#.5g}".format


def count_text(value: float) -> str:
    """Format a count or a rate: 0.5, 12.3, 12,345."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def short_time(seconds: float) -> str:
    """Format a time below a minute: 21.3 us, 12.3 ms, 0.42 s."""
    if seconds >= 0.0995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


@dataclass(frozen=True)
class Metric:
    """Declaration of a reported metric."""

    reduction: Reduction
    unit: str = ""
    label: str = ""  # on the display; by default the field's name
    format: Callable[[Any], str] = "{:.4g}".format
    named: bool = False  # the value is a mapping, each item of which is shown by its own name
    row: Row | None = None
    summary: str = ""  # key of the last step's value in summary.json; "": not in the summary


_PHASE = Metric("master", "s", row="phases")
_OF_EACH = Metric("each", "s", named=True)
WARMUP_STEPS = 3  # in which caches fill and compilation runs: no rate is computed from them
T = TypeVar("T")


@dataclass(frozen=True)
class StepRecord:
    """One training step, and one line of metrics.jsonl.

    A skipped step updated nothing and has no norms.
    """

    step: Annotated[int, Metric("same")]
    """Number of the step, 1 for the first."""
    loss: Annotated[float, Metric("mean", format=_loss_text, row="line", summary="final_loss")]
    """Mean over the items (samples or tokens) of the step."""
    metrics: Annotated[dict[str, float], Metric("mean", named=True, row="line")]
    """The task's further means, from `Loss.metrics`."""
    lr: Annotated[float, Metric("same", format="{:.1e}".format, row="line")]
    grad_norm: Annotated[
        float | None, Metric("same", label="norm", format="{:.2g}".format, row="line")
    ]
    """Norm of the mean gradient before clipping."""
    clip_coef: Annotated[float | None, Metric("same")]
    clipped_norm: Annotated[float | None, Metric("same")]
    """Norm of the gradient after clipping."""
    samples: Annotated[int, Metric("same", "samples")]
    tokens_per_s: Annotated[float, Metric("master", "items/s", format=count_text)]
    """Items that the loss is a mean over (tokens or samples), a second."""
    step_s: Annotated[float, Metric("master", "s", format=short_time)]
    """Time from the load of the batch to the end of the update, without evaluations and saves."""
    data: Annotated[float, _PHASE]
    forward: Annotated[float, _PHASE]
    backward: Annotated[float, _PHASE]
    reduce_wait: Annotated[float, Metric("master", "s", "wait", row="phases")]
    optimizer: Annotated[float, _PHASE]
    communication: Annotated[float, Metric("master", "s")]
    """Time in which a collective was in progress."""
    exposed: Annotated[float, Metric("master", "s")]
    """The part of it in which the master waited: communication that did not overlap."""
    skipped: Annotated[bool, Metric("same")] = False
    eval_loss: Annotated[
        float | None,
        Metric("mean", "", "eval loss", _loss_text, row="evaluation", summary="eval_loss"),
    ] = None
    """Loss of an evaluation after this step."""
    eval_metrics: Annotated[
        dict[str, float] | None,
        Metric("mean", named=True, row="evaluation", summary="eval_metrics"),
    ] = None

    slow_ranks: Annotated[dict[str, float] | None, Metric("same", named=True)] = None
    """Ratio by "rank/phase" of the time of a slow rank for a sample to that of the others."""
    rank_step_s: Annotated[dict[str, float] | None, _OF_EACH] = None
    """Time of the step before, in metrics.jsonl, with --log.per-rank."""
    rank_data: Annotated[dict[str, float] | None, _OF_EACH] = None
    rank_forward: Annotated[dict[str, float] | None, _OF_EACH] = None
    rank_backward: Annotated[dict[str, float] | None, _OF_EACH] = None
    rank_reduce_wait: Annotated[dict[str, float] | None, _OF_EACH] = None
    rank_exposed: Annotated[dict[str, float] | None, _OF_EACH] = None
    rank_memory: Annotated[dict[str, float] | None, Metric("each", "bytes", named=True)] = None
    """Memory allocated on the GPU, or resident on the host, at the end of that step."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object, without absent values."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def pairs(self, row: Row) -> list[tuple[str, str]]:
        """Return the labels and formatted values that a row shows, without absent values."""
        pairs = []
        for name, metric in METRICS.items():
            value = getattr(self, name)
            if metric.row == row and value is not None:
                named = value if metric.named else {metric.label: value}
                pairs += [(label, metric.format(item)) for label, item in named.items()]
        return pairs


METRICS: dict[str, Metric] = {
    name: replace(hint.__metadata__[0], label=hint.__metadata__[0].label or name)
    for name, hint in get_type_hints(StepRecord, include_extras=True).items()
}
"""Metrics by name, in the order in which they are shown."""

PER_RANK = tuple(name for name, metric in METRICS.items() if metric.reduction == "each")
PHASES = tuple(name for name, metric in METRICS.items() if metric.row == "phases")


class StepTimer:
    """Stopwatch of one step, from construction on. All times are seconds of wall-clock time.

    `recorder`, if given, gets the phases of step number `step`.
    """

    def __init__(
        self, collectives: WorldCollectives, recorder: Recorder | None = None, step: int = 0
    ) -> None:
        self._recorder, self._step = recorder, step
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._start = time.perf_counter()
        self._collectives = collectives
        self._busy_s, self._waited_s = collectives.busy_s, collectives.waited_s

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        start = time.perf_counter()
        with self._recorder.phase(phase, self._step) if self._recorder else nullcontext():
            try:
                yield
            finally:
                self._phases[phase] += time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count time that was spent inside one phase for another."""
        self._phases[source] -= seconds
        self._phases[target] += seconds

    def times(self) -> dict[str, float]:
        """Return the times since the step began, by field of `StepRecord`."""
        busy_s = self._collectives.busy_s - self._busy_s
        return {
            "step_s": time.perf_counter() - self._start,
            "communication": busy_s,
            "exposed": min(self._collectives.waited_s - self._waited_s, busy_s),
            **self._phases,
        }


def of_this_rank(times: Mapping[str, float], memory: int) -> dict[str, float]:
    """Return this rank's values of the metrics of each rank, from its times and its memory."""
    own = {**times, "memory": float(memory)}
    return {name: own[n] for name in PER_RANK if (n := name.removeprefix("rank_")) in own}


class RecentSteps(Generic[T]):
    """A value for each of the last `most` steps; those of the warm-up, until the first other one.

    `values` is empty before the first step.
    """

    def __init__(self, most: int) -> None:
        self._steps = 0
        self.values: deque[T] = deque(maxlen=most)

    @property
    def warm(self) -> bool:
        """True if the values are of steps after the warm-up."""
        return self._steps > WARMUP_STEPS

    def add(self, value: T) -> None:
        """Add the value of the next step."""
        self._steps += 1
        if self._steps == WARMUP_STEPS + 1:
            self.values.clear()
        self.values.append(value)
