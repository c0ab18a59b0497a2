"""What a person sees of a run: progress as a line or a frame, and tables.

Text from outside (hosts, metrics' names, directories) is shown as it is: never read as markup, and
unable to send escape sequences to the terminal.
"""

import math
import os
import statistics
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from mntrain.metrics import units
from mntrain.metrics.step import PHASES, StepRecord
from mntrain.rank_info import Place

_PHASE_STYLES = dict(zip(PHASES, ("blue", "cyan", "green", "yellow", "magenta"), strict=True))
_ROWS = 16  # of the table of places
_WIDTH = 100  # of a frame: bars of a wider terminal would only be longer
_MEMORY = {
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
    """A console on stdout. Open MPI gives ranks a terminal, of no size if it has none itself."""
    try:
        sizeless = os.get_terminal_size(sys.stdout.fileno()).columns == 0
    except OSError:  # no terminal, or not a file
        sizeless = False
    return Console(force_terminal=False if sizeless else None)


class ProgressPanel:
    """The steps so far, as a line or a frame, with figures over the last steps that hardly jump.

    `line` and `frame` need a step to show.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.recent: deque[StepRecord] = deque(maxlen=10)
        self._losses: deque[float] = deque(maxlen=40)
        self._later_steps, self._later_s = 0, 0.0
        self.unit = "tokens"

    def add(self, record: StepRecord) -> None:
        """Take in a further step."""
        if self.recent:
            self._later_steps += 1
            self._later_s += record.step_s
        # tokens_per_s counts what the loss is a mean over; as many as samples, then it is samples.
        counted = record.tokens_per_s * record.step_s
        self.unit = "samples" if math.isclose(counted, record.samples, rel_tol=1e-3) else "tokens"
        self.recent.append(record)
        self._losses.append(record.loss)

    def _mean_s(self) -> float:
        return statistics.fmean(record.step_s for record in self.recent)

    def _speed(self) -> str:
        counted = sum(record.tokens_per_s * record.step_s for record in self.recent)
        seconds = self._mean_s()
        per_s = counted / len(self.recent) / seconds if seconds else 0.0
        return f"{units.count(per_s)} {self.unit}/s"

    def _left(self) -> str:
        # The first step warms up, unlike those to come.
        step_s = self._later_s / self._later_steps if self._later_steps else self._mean_s()
        return units.clock((self.steps - self.recent[-1].step) * step_s)

    def _shares(self) -> dict[str, float]:
        """Phase -> its share of the recent steps' time; the rest is "other"."""
        total = self._mean_s() or 1.0
        shares = {
            phase: statistics.fmean(getattr(record, phase) for record in self.recent) / total
            for phase in PHASES
        }
        return shares | {"other": max(0.0, 1 - sum(shares.values()))}

    def line(self) -> str:
        """The last step, for a log."""
        last = self.recent[-1]
        return (
            f"step {last.step:>{len(str(self.steps))}}/{self.steps}  loss {units.number(last.loss)}"
            f"  lr {last.lr:.1e}  {_pairs(*_norms(last)[:1])}  {self._speed()}"
            f"  {units.short_time(self._mean_s())}/step  left {self._left()}"
        )

    def frame(self, width: int) -> Group:
        """The steps so far, for a terminal: five lines of at most `width` or 100 columns."""
        width = min(width, _WIDTH)
        last = self.recent[-1]
        count = f"step {last.step:>{len(str(self.steps))}}/{self.steps}  "
        left = f"  left {self._left()}"
        done = last.step / self.steps
        parts = [(done, "green" if done == 1 else "default"), (1 - done, "bright_black")]
        bar = _bar(parts, width - len(count) - len(left))
        metrics = [(_printable(name), f"{value:.4g}") for name, value in last.metrics.items()]
        losses = Text.assemble(("loss", "dim"), f" {units.number(last.loss)}  ")
        losses.append(_sparkline(self._losses) + "  ").append(_pairs(*metrics))
        speed = f"{self._speed()}  {units.short_time(self._mean_s())}/step  "
        rates = _pairs(("lr", f"{last.lr:.1e}"), *_norms(last))
        shares = [
            (name, share, _PHASE_STYLES.get(name, "bright_black"))
            for name, share in self._shares().items()
        ]
        lines = [
            Text(count).append(bar).append(left),
            losses,
            Text(speed).append(rates),
            _bar([(share, style) for _, share, style in shares], width),
            Text("  ").join(
                Text.assemble((name.removeprefix("reduce_"), style), f" {share:.0%}")
                for name, share, style in shares
            ),
        ]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)


def place_table(places: Sequence[Place], encoding: str) -> Table:
    """What runs where. `places` is by rank; of many only some have a row."""
    table = _table(("node", "right"), ("rank", "right"), ("local rank", "right"))
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
    """How a run of `steps` steps ended; `unit` is what its speed counts."""
    skipped = f", {summary['skipped_steps']} skipped" if summary["skipped_steps"] else ""
    facts = {
        "steps": f"{summary['steps']} of {steps}{skipped}",
        "final loss": units.number(summary["final_loss"]),
        "eval loss": evaluation(summary["eval_loss"], summary["eval_metrics"]),
        "wall time": units.clock(summary["wall_s"]),
        f"{unit}/s": f"{units.count(summary['tokens_per_s'])} on average",
    }
    if summary["model_flops_per_s"]:
        facts["computing"] = utilisation(summary)
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(f" {name}", "dim"), plain(value, encoding))
    return table


def utilisation(summary: Mapping[str, Any]) -> str:
    """What the model computed a second, and the share of the GPUs' peak where that is known."""
    text = units.count(summary["model_flops_per_s"])
    number, prefix = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    told = f"{number} {prefix}FLOP/s of the model"
    if summary["utilisation"] is None:
        return told
    return f"{told}, {summary['utilisation']:.0%} of the dense {summary['computes_in']} peak"


def memory_table(memory: Mapping[str, Mapping[str, int]]) -> Table:
    """What ranks were expected to need and what they took, from `stats.memory_by_role`.

    A role that takes nothing on any rank, and was not expected to, has no row.
    """
    table = _table(
        ("memory of a rank", "left"),
        ("expected", "right"),
        ("least", "right"),
        ("median", "right"),
        ("most", "right"),
        ("on rank", "right"),
    )
    for role, name in _MEMORY.items():
        sizes = memory[role]
        expected = units.size(sizes["expected"]) if "expected" in sizes else ""
        if sizes["most"] or sizes.get("expected"):
            spread = (units.size(sizes[key]) for key in ("least", "median", "most"))
            table.add_row(name, expected, *spread, str(sizes["peak_rank"]))
    return table


def traffic_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    """What all ranks sent, by level."""
    table = _table(("sent", "left"), ("messages", "right"), ("bytes", "right"))
    for name, level in (("within nodes", "node"), ("between nodes", "cross")):
        messages, sent = (
            sum(rank[f"{level}_{what}"] for rank in ranks) for what in ("messages", "bytes")
        )
        table.add_row(name, units.count(messages), units.size(sent))
    return table


def overlap(ranks: Sequence[Mapping[str, Any]]) -> str:
    """How long communication was under way on the median rank, and how long a rank waited."""
    busy = statistics.median(rank["communication_s"] for rank in ranks)
    waited = statistics.median(rank["exposed_s"] for rank in ranks)
    share = f" ({waited / busy:.0%})" if busy else ""
    return f"communication under way {busy:.1f} s, of which exposed {waited:.1f} s{share}"


def evaluation(loss: float | None, metrics: Mapping[str, float] | None) -> str:
    """An evaluation's loss and further means, whose names stay as they came."""
    return "  ".join([units.number(loss), *(f"{k} {v:.4g}" for k, v in (metrics or {}).items())])


def plain(text: str, encoding: str, style: str = "") -> Text:
    """Text from outside, without what would control the terminal or cannot be encoded."""
    return Text(_printable(text).encode(encoding, "replace").decode(encoding), style)


def _norms(record: StepRecord) -> list[tuple[str, str]]:
    """What became of a step's gradient, in pairs of a name and a value."""
    if record.grad_norm is None or record.clip_coef is None:
        return [("skipped", "gradient not finite")]
    return [("norm", f"{record.grad_norm:.2g}"), ("clip", f"{record.clip_coef:.2f}")]


def _pairs(*pairs: tuple[str, str]) -> Text:
    """Names, dim, and values."""
    return Text("  ").join(Text.assemble((name, "dim"), f" {value}") for name, value in pairs)


def _sparkline(values: Iterable[float]) -> str:
    """Values as blocks between their least and largest, x for what is not finite."""
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    blocks = "▁▂▃▄▅▆▇█"
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        blocks[round((value - low) * scale)] if math.isfinite(value) else "x" for value in values
    )


def _bar(parts: Iterable[tuple[float, str]], width: int) -> Text:
    """A bar of `width` columns, of parts with a share and a style each; shares add up to 1."""
    bar, drawn, ended = Text(), 0, 0.0
    for share, style in parts:
        ended += share
        end = min(max(0, width), round(ended * width))
        bar.append("━" * (end - drawn), style)
        drawn = end
    return bar


def _table(*columns: tuple[str, JustifyMethod]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _place_rows(places: Sequence[Place]) -> list[tuple[str, ...]]:
    """A row a rank; of many ranks one a node; of many nodes only the first ones and the last."""
    nodes: dict[int, list[Place]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    if len(places) <= _ROWS:
        return [_place_row([place], _device(place)) for node in nodes.values() for place in node]
    rows = []
    for node in nodes.values():
        devices = Counter(_kind(place) for place in node)
        counted = ", ".join(f"{count} {device}" for device, count in devices.items())
        rows.append(_place_row(node, counted))
    if len(rows) > _ROWS:
        left_out = ("...", "", "", f"{len(rows) - _ROWS + 1} more nodes", "", "")
        rows[_ROWS - 2 : -1] = [left_out]
    return rows


def _device(place: Place) -> str:
    """A rank's device: on a GPU with its model, and the beginning of its UUID."""
    return " ".join(filter(None, [place.device, _model(place), place.gpu[:8]]))


def _kind(place: Place) -> str:
    return _model(place) or place.device.partition(":")[0]


def _model(place: Place) -> str:
    return place.model.removeprefix("NVIDIA ")


def _place_row(ranks: Sequence[Place], device: str) -> tuple[str, ...]:
    """The row of ranks on one node."""
    return (
        str(ranks[0].node),
        _ranges(place.rank for place in ranks),
        _ranges(place.local_rank for place in ranks),
        ranks[0].host,
        device,
        _ranges(place.threads for place in ranks),
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in short: "0-7", or "0-3, 8-11"; of many ranges only the first and the last."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join([texts[0], "...", texts[-1]] if len(texts) > 3 else texts)


def _printable(text: str) -> str:
    """Text without control characters, which could send escape sequences to the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
