"""Advice for a training job from the results of a benchmark run."""

from collections.abc import Mapping, Sequence
from typing import Any

from mntrain.bench.bench_options import ALGORITHMS, size_label
from mntrain.bench.results import BenchCase
from mntrain.config import CommConfig
from mntrain.metrics.registry import short_time
from zero.layout import MIB

_PARAMETERS = 100_000_000  # of the example
_SIMILAR = 1.05  # algorithms whose times differ by less are about equally fast
# Gradients are rounded on the way if their bytes take this many times as long on the link as in
# memory.
_LINK_BOUND = 4.0


def advice(facts: Mapping[str, Any], cases: Sequence[BenchCase]) -> str:
    """Return which options suit this cluster, and what a step costs; "" without evidence.

    The evidence is the all-reduce of the largest size, at least 1 MiB: that is how large buckets of
    gradients are. Smaller ones measure latency.
    """
    timed = [
        case
        for case in cases
        if case.timed and case.verb == "all_reduce" and case.algorithm in ALGORITHMS
    ]
    largest = max((case.size_bytes for case in timed), default=0)
    if largest < MIB:
        return ""
    rivals = sorted(
        (case for case in timed if case.size_bytes == largest), key=lambda case: case.median_s
    )
    best = rivals[0]
    similar = [case.algorithm for case in rivals if case.median_s < _SIMILAR * best.median_s]
    choice = (
        f"At {size_label(largest)}, {' and '.join(similar)} "
        + ("are the fastest algorithms" if len(similar) > 1 else "is the fastest algorithm")
        + f" of all_reduce measured here: --comm.algorithm {_choice(similar)}. "
        if len(rivals) > 1
        else ""
    )
    nbytes = 4 * _PARAMETERS
    step_s = best.median_s / largest * nbytes
    cost = (
        f"Per step, the gradients of {_PARAMETERS // 10**6} million fp32 parameters "
        f"({nbytes // 10**6} MB) take about {short_time(step_s)} by {best.algorithm}, part of "
        "which is hidden behind backward"
    )
    return f"{choice}{cost}{_wire_advice(facts, best, step_s)}."


def _choice(fastest: Sequence[str]) -> str:
    """Return the default algorithm if it is among the fastest, and says so; else the fastest."""
    default = CommConfig().algorithm
    return f"{default}, the default" if default in fastest else fastest[0]


def _wire_advice(facts: Mapping[str, Any], best: BenchCase, step_s: float) -> str:
    """Return the advice to send less between nodes, if the link is what takes the time.

    int8 has a quarter of the bytes. A step that computes for less than that hides none of it, so
    rare exchanges are what is left.
    """
    copy_s = best.size_bytes / facts["copy"][-1]["bytes_per_s"]
    if not facts["link_bytes_per_s"] or best.dtype != "fp32" or best.limit_s < _LINK_BOUND * copy_s:
        return ""
    return (
        f"; --comm.wire-dtype bf16 sends half the bytes between nodes, and takes about "
        f"{short_time(step_s / 2)}, and --comm.compress int8 {short_time(step_s / 4)}; where a "
        "step computes for less than that, --sync.mode sparseloco --sync.every 20 exchanges "
        "parameters rarely instead"
    )
