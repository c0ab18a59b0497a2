"""Progress and tables for a person: a line for a log, a panel for a terminal, rich tables.

Text from outside (hosts, names of metrics, directories) is shown literally: it is not read as
markup and cannot send escape sequences to the terminal.
"""

import math
import os
import statistics
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mntrain.metrics.registry import (
    METRICS,
    PHASES,
    StepRecord,
    clock_text,
    count_text,
    short_time,
    size_text,
)
from mntrain.rank_info import Place

_PHASE_STYLES = dict(zip(PHASES, ("blue", "cyan", "green", "yellow", "magenta"), strict=True))
_MAX_PLACE_ROWS = 16
_MAX_WIDTH = 100  # columns of a frame
_MEMORY_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "buckets": "working buckets",
    "master": "master weights",
    "state": "optimizer state",
    "total": "total of these",
    "process_peak": "process peak",
    "device_peak": "GPU peak",
    "device_now": "GPU at the end",
    "reserved_peak": "GPU reserved, peak",
    "reserved_now": "GPU reserved, end",
    "pinned": "pinned host memory",
}


def stdout() -> Console:
    """Return a console on stdout, which is a terminal only if it has a size.

    Open MPI gives ranks a pseudo-terminal, of no size if mpirun has no terminal itself.
    """
    try:
        sizeless = os.get_terminal_size(sys.stdout.fileno()).columns == 0
    except OSError:  # no terminal, or not a file
        sizeless = False
    return Console(force_terminal=False if sizeless else None)


class ProgressPanel:
    """The steps so far, as a line or a frame, with figures smoothed over recent steps.

    `line` and `frame` need at least one step.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.unit = "tokens"
        self.recent: deque[StepRecord] = deque(maxlen=10)
        self._losses: deque[float] = deque(maxlen=40)
        # Of the steps after the first one, which is a warm-up.
        self._timed_steps, self._timed_s = 0, 0.0

    def add(self, record: StepRecord) -> None:
        """Add the next step."""
        # tokens_per_s counts the items that the loss is a mean over: samples, if as many as those.
        items = record.tokens_per_s * record.step_s
        self.unit = "samples" if math.isclose(items, record.samples, rel_tol=1e-3) else "tokens"
        if self.recent:
            self._timed_steps += 1
            self._timed_s += record.step_s
        self.recent.append(record)
        self._losses.append(record.loss)

    def line(self) -> str:
        """Return the last step as a line for a log."""
        pairs = [f"{label} {text}" for label, text in self.recent[-1].pairs("line")]
        return "  ".join([self._count(), *pairs, *self._speed(), f"left {self._left()}"])

    def frame(self, width: int) -> Group:
        """Return the steps so far for a terminal: five lines of at most `width` or 100 columns."""
        width = min(width, _MAX_WIDTH)
        last = self.recent[-1]
        count, left = f"{self._count()}  ", f"  left {self._left()}"
        done = last.step / self.steps
        bar = [(done, "green" if done == 1 else "default"), (1 - done, "bright_black")]
        loss, *metrics = last.pairs("losses")
        shares = self._shares()
        lines = [
            Text(count).append(_bar(bar, width - len(count) - len(left))).append(left),
            _row(_pair(*loss), _sparkline(self._losses), *(_pair(*metric) for metric in metrics)),
            _row(*self._speed(), *(_pair(*pair) for pair in last.pairs("rates"))),
            _bar([(share, style) for _, share, style in shares], width),
            _row(*(_pair(label, f"{share:.0%}", style) for label, share, style in shares)),
        ]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _count(self) -> str:
        return f"step {self.recent[-1].step:>{len(str(self.steps))}}/{self.steps}"

    def _mean_s(self) -> float:
        return statistics.fmean(record.step_s for record in self.recent)

    def _speed(self) -> tuple[str, str]:
        items = statistics.fmean(record.tokens_per_s * record.step_s for record in self.recent)
        seconds = self._mean_s()
        speed = items / seconds if seconds else 0.0
        return f"{count_text(speed)} {self.unit}/s", f"{short_time(seconds)}/step"

    def _left(self) -> str:
        step_s = self._timed_s / self._timed_steps if self._timed_steps else self._mean_s()
        return clock_text((self.steps - self.recent[-1].step) * step_s)

    def _shares(self) -> list[tuple[str, float, str]]:
        """Return label, share of the recent steps' time and style of each phase and of the rest."""
        total = self._mean_s() or 1.0
        shares = []
        for phase, style in _PHASE_STYLES.items():
            seconds = statistics.fmean(getattr(record, phase) for record in self.recent)
            shares.append((METRICS[phase].label, seconds / total, style))
        other = max(0.0, 1 - sum(share for _, share, _ in shares))
        return [*shares, ("other", other, "bright_black")]


def place_table(places: Sequence[Place], encoding: str) -> Table:
    """Return the table of hosts and devices; `places` is by rank. Of many, only some have a row."""
    table = _table("node", "rank", "local rank", left=0)
    table.add_column("host", overflow="ellipsis")  # gives way where the terminal is narrow
    table.add_column("device", no_wrap=True)
    table.add_column("threads", justify="right")
    for row in _place_rows(places):
        cells = [plain(cell, encoding) for cell in row]
        for cell in cells:
            cell.no_wrap = True
        table.add_row(*cells)
    return table


def result_table(summary: Mapping[str, Any], steps: int, unit: str, encoding: str) -> Table:
    """Return the result of a run of `steps` steps; `unit` is "tokens" or "samples"."""
    skipped = f", {summary['skipped_steps']} skipped" if summary["skipped_steps"] else ""
    facts = {
        "steps": f"{summary['steps']} of {steps}{skipped}",
        **_summarized(summary),
        "wall time": clock_text(summary["wall_s"]),
        f"{unit}/s": f"{count_text(summary['tokens_per_s'])} on average",
    }
    if summary["model_flops_per_s"]:
        facts["computing"] = _model_flops(summary)
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(f" {name}", "dim"), plain(value, encoding))
    return table


def _model_flops(summary: Mapping[str, Any]) -> str:
    """Return a summary's model FLOP/s, and their share of the peak if it is known, as a text."""
    text = count_text(summary["model_flops_per_s"])
    number, prefix = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    flops = f"{number} {prefix}FLOP/s of the model"
    if summary["utilisation"] is None:
        return flops
    return f"{flops}, {summary['utilisation']:.0%} of the dense {summary['computes_in']} peak"


def _summarized(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the metrics in the summary, formatted; named values go on the line before them."""
    lines: dict[str, str] = {}
    for metric in METRICS.values():
        if not metric.summary:
            continue
        value = summary[metric.summary]
        if metric.named:
            previous = next(reversed(lines))
            for name, item in (value or {}).items():
                lines[previous] += f"  {name} {metric.format(item)}"
        else:
            lines[metric.summary.replace("_", " ")] = "-" if value is None else metric.format(value)
    return lines


def memory_table(memory: Mapping[str, Mapping[str, int]]) -> Table:
    """Return the table of predicted and measured memory, from `step.memory_by_role`.

    A role that is zero on every rank, measured and predicted, has no row.
    """
    table = _table("memory of a rank", "expected", "least", "median", "most", "on rank")
    for role, label in _MEMORY_LABELS.items():
        sizes = memory[role]
        expected = size_text(sizes["expected"]) if "expected" in sizes else ""
        if sizes["most"] or sizes.get("expected"):
            spread = (size_text(sizes[key]) for key in ("least", "median", "most"))
            table.add_row(label, expected, *spread, str(sizes["peak_rank"]))
    return table


def traffic_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of messages and bytes that all ranks sent, by level."""
    table = _table("sent", "messages", "bytes")
    for label, level in (("within nodes", "node"), ("between nodes", "cross")):
        messages = sum(rank[f"{level}_messages"] for rank in ranks)
        sent = sum(rank[f"{level}_bytes"] for rank in ranks)
        table.add_row(label, count_text(messages), size_text(sent))
    return table


def overlap(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return the median rank's time in communication, and its time waiting for it, as a text."""
    busy = statistics.median(rank["communication_s"] for rank in ranks)
    waited = statistics.median(rank["exposed_s"] for rank in ranks)
    share = f" ({waited / busy:.0%})" if busy else ""
    return f"communication under way {busy:.1f} s, of which exposed {waited:.1f} s{share}"


def plain(text: str, encoding: str, style: str = "") -> Text:
    """Return text from outside without control characters and what cannot be encoded."""
    printable = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return Text(printable.encode(encoding, "replace").decode(encoding), style)


def _row(*parts: str | Text) -> Text:
    return Text("  ").join(Text(part) if isinstance(part, str) else part for part in parts)


def _pair(label: str, text: str, style: str = "dim") -> Text:
    return plain(label, "utf-8", style).append(f" {text}", "default")


def _sparkline(values: Iterable[float]) -> str:
    """Draw values as blocks between their minimum and maximum, those that are not finite as x."""
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    blocks = "▁▂▃▄▅▆▇█"
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        blocks[round((value - low) * scale)] if math.isfinite(value) else "x" for value in values
    )


def _bar(parts: Iterable[tuple[float, str]], width: int) -> Text:
    """Draw a bar of `width` columns, of parts with a share and a style; shares add up to 1."""
    bar, drawn, total = Text(), 0, 0.0
    for share, style in parts:
        total += share
        end = min(max(0, width), round(total * width))
        bar.append("━" * (end - drawn), style)
        drawn = end
    return bar


def _table(*names: str, left: int = 1) -> Table:
    """Return a table without rows; the first `left` columns are flush left, the others right."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table


def _place_rows(places: Sequence[Place]) -> list[tuple[str, ...]]:
    """Return a row a rank, or a row a node; of many nodes, only the first ones and the last."""
    nodes: dict[int, list[Place]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    if len(places) <= _MAX_PLACE_ROWS:
        return [_place_row([place], _device(place)) for node in nodes.values() for place in node]
    rows = []
    for node in nodes.values():
        kinds = Counter(_model(place) or place.device.partition(":")[0] for place in node)
        rows.append(_place_row(node, ", ".join(f"{n} {kind}" for kind, n in kinds.items())))
    if len(rows) > _MAX_PLACE_ROWS:
        omitted = ("...", "", "", f"{len(rows) - _MAX_PLACE_ROWS + 1} more nodes", "", "")
        rows[_MAX_PLACE_ROWS - 2 : -1] = [omitted]
    return rows


def _device(place: Place) -> str:
    """Return a rank's device: of a GPU with its model and the beginning of its UUID."""
    return " ".join(filter(None, [place.device, _model(place), place.gpu[:8]]))


def _model(place: Place) -> str:
    return place.model.removeprefix("NVIDIA ")


def _place_row(ranks: Sequence[Place], device: str) -> tuple[str, ...]:
    """Return the row of ranks on one node."""
    return (
        str(ranks[0].node),
        _ranges(place.rank for place in ranks),
        _ranges(place.local_rank for place in ranks),
        ranks[0].host,
        device,
        _ranges(place.threads for place in ranks),
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Format whole numbers as "0-7" or "0-3, 8-11"; of many ranges, the first and the last."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join([texts[0], "...", texts[-1]] if len(texts) > 3 else texts)
