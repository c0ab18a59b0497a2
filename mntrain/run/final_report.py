"""The lines of the final report, of a job or an own loop, by its summary. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.filesize import decimal

from mntrain.metrics.registry import METRICS, count_text, short_time

_LABELS = {
    "buckets": "working buckets",
    "master": "master weights",
    "state": "optimizer state",
    "hook": "communication hook",
    "exchange": "sync schedule",
    "total": "total of these",
    "communication": "message buffers",
    "pinned": "pinned host memory",
}  # of the roles of memory that are not called by their name


def final_lines(
    summary: Mapping[str, Any], steps: int | None = None, items: str = "items"
) -> list[str]:
    """Return the result, memory and traffic of a job or an own loop for the final report.

    `steps` is the number of a run's last step, and `items` names what losses count.
    """
    lines = [f"{name:<14}  {text}" for name, text in _facts(summary, steps, items)]
    if summary["ranks"]:
        lines.append("")
        lines += _aligned(_memory_rows(summary["memory"]))
        lines.append("")
        for where, level in (("within nodes", "node"), ("between nodes", "cross")):
            messages, sent = (summary["traffic"][f"{level}_{of}"] for of in ("messages", "bytes"))
            lines.append(f"sent {where:<15}{count_text(messages)} messages, {decimal(sent)}")
        lines.append(_compression_text(summary))
        busy, waited = summary["communication_s"], summary["exposed_s"]
        lines.append(f"communication {busy:.1f} s, of which exposed {waited:.1f} s")
        lines += _checks_lines(summary)
    return [*lines, *([str(summary["run_dir"])] if "run_dir" in summary else [])]


def _facts(summary: Mapping[str, Any], steps: int | None, items: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the report's first part; what is not known is left out."""
    of = f" of {steps}" if steps else ""
    skipped = f", {summary['skipped_steps']} skipped" if summary.get("skipped_steps") else ""
    yield "steps", f"{summary['steps']}{of}{skipped}"
    for metric in METRICS.values():
        value = summary.get(metric.summary) if metric.summary else None
        if value is not None:
            named = value if metric.named else {metric.summary.replace("_", " "): value}
            for name, item in named.items():
                yield name, metric.format(item)
    world = summary["world"]
    transport = f", transport {world['transport']}" if world["transport"] else ""
    yield "ranks", f"{world['topology']}, {world['algorithm']}, {world['library']}{transport}"
    if summary["stage"] is not None:
        yield "sharding", _sharding_text(summary)
    yield "wall time", str(timedelta(seconds=round(summary["wall_s"])))
    if "tokens_per_s" in summary:
        rate, in_step = (count_text(summary[n]) for n in ("tokens_per_s", "step_tokens_per_s"))
        yield f"{items}/s", f"{rate}; in a step, without evaluation and saves, {in_step}"
    if summary["samples_per_s"] and items != "samples":
        yield "samples/s", count_text(summary["samples_per_s"])
    if flops := summary.get("model_flops_per_s"):
        share, dtype = summary["utilisation"], summary["computes_in"]
        of_peak = f", {share:.0%} of the dense {dtype} peak" if share else ""
        yield "computing", f"{flops / 1e12:.3g} TFLOP/s of the model{of_peak}"


def _sharding_text(summary: Mapping[str, Any]) -> str:
    """Return how a job was sharded, and what its messages were narrowed to."""
    by = f", by {_words(summary['partition'])}" if summary["stage"] else ""
    parts = [f"stage {_words(summary['stage'])}{by}"]
    parts += [summary["precision"]] if "precision" in summary else []
    parts += [
        f"{what} {_words(summary[name])}"
        for name, what, usual in (
            ("wire_dtype", "gradients travel in", "fp32"),
            ("gather_dtype", "parameters travel in", "fp32"),
            ("compress", "compressed by", "none"),
            ("sync", "exchanges by", "every-step"),
        )
        if summary[name] != usual
    ]
    return ", ".join(parts)


def _words(value: Any) -> str:
    """Return a value, or those of several optimizers."""
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def _compression_text(summary: Mapping[str, Any]) -> str:
    before, sent, ratio = (
        summary["compression"][k] for k in ("before_bytes", "sent_bytes", "ratio")
    )
    if ratio is None:
        return "compression off: no message between nodes was compressed"
    return (
        f"compression between nodes: {decimal(sent)} sent in place of {decimal(before)}, "
        f"a ratio of {ratio:.3g}"
    )


def _checks_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return what comparing the weights has cost; nothing if they were not compared."""
    number, seconds = summary["checks"]["weights"], summary["checks"]["seconds"]
    if not number:
        return []
    times, share = "once" if number == 1 else f"{number} times", seconds / summary["wall_s"]
    return [f"weights compared {times}, in {short_time(seconds)}, {share:.2%} of the wall time"]


def _memory_rows(memory: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of a table of memory, with its head."""
    sharded = any(sizes.get("saved") for sizes in memory.values())
    head = ("memory of a rank", "least", "most", "rank", "predicted")
    rows: list[tuple[str, ...]] = [(*head, *(("stage 0", "saved") if sharded else ()))]
    for role, sizes in memory.items():
        if not sizes["most"] and not sizes.get("stage_0"):
            continue
        label = _LABELS.get(role, role.replace("_", " "))
        row = [label, decimal(sizes["least"]), decimal(sizes["most"]), str(sizes["peak_rank"])]
        if "predicted" in sizes:
            row.append(_size(sizes["predicted"]))
            row += [_size(sizes["stage_0"]), _saved_text(sizes)] if sharded else []
        rows.append(tuple(row))
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines, whose columns are two spaces apart. The first has most.

    The first column begins at the left, and others end at the right.
    """
    full = [[*row, *[""] * (len(rows[0]) - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    lines = []
    for name, *cells in full:
        ends = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"{name:<{widths[0]}}", *ends]).rstrip())
    return lines


def _size(nbytes: int | None) -> str:
    return "?" if nbytes is None else decimal(nbytes)


def _saved_text(sizes: Mapping[str, Any]) -> str:
    """Return the bytes and the percentage saved against stage 0; "" for none."""
    if not (saved := sizes["saved"]):
        return ""
    return f"{decimal(saved)}, {sizes['saved_share']:.0%}" if saved > 0 else f"-{decimal(-saved)}"
