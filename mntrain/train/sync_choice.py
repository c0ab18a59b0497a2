"""Choice of how nodes communicate, from the time of a step's computing and of bytes between nodes.

The first candidate that is nearly free is taken, in the order of exactness:

    every step, gradients as they are         at most 1.10 x computing
    every step, bf16                          at most 1.10 x
    every step, int8                          at most 1.10 x
    streaming, diloco, every 10 steps         at most 1.05 x
    streaming, diloco, every 20, 50, ... steps

If there is none, the fastest is taken. What a candidate adds is the mean over the steps that are
left of the run: the steps of a warm-up cost what every step costs. Nothing here communicates or
measures, and the same numbers give the same choice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mntrain.comm.compression import Compression
from mntrain.sync import StreamingDiLoCo

INTERVALS = (10, 20, 50, 100, 200, 500)  # steps between exchanges
EVERY_STEP_LIMIT, RARE_LIMIT = 1.10, 1.05  # x computing
# The part of a backward behind which gradients are taken to travel. Where no core is idle, sending
# takes time from computing: 10.9 M parameters at 1 Gbit/s took 1.45 x computing
# (docs/results/step-2+2.md), of which this predicts 1.44.
OVERLAP = 0.25
SMALL_COLLECTIVES = 2  # in every step, whatever is exchanged: the loss, its weight, and flags


@dataclass(frozen=True)
class Volumes:
    """Bytes of a whole model that cross nodes, before they are multiplied by the nodes."""

    gradients: int  # in their own dtypes
    bf16: int  # gradients, rounded where they are wider
    int8: int  # codes of all gradients
    gathered: int  # parameters that stages 1 and 2 gather after each update; 0 at stage 0
    exchanged: int  # parameters as they are updated, of an exchange of diloco
    streamed: int  # codes of all parameters, of an exchange of streaming


@dataclass(frozen=True)
class Measurement:
    """Seconds at the start of a job, the same on all ranks."""

    computing_s: float  # forward and backward of a step, on the slowest rank
    backward_s: float  # of one micro-batch
    micro_batches: int  # of a step, on the rank with most
    latency_s: float  # of a small all-reduce
    s_per_byte: float  # that a node sends, in an all-reduce
    codec_s: Mapping[str, float] = field(default_factory=dict)  # of a reduction, by bf16 and int8


@dataclass(frozen=True)
class Situation:
    """The job: its nodes, and what is sharded and sent."""

    nodes: int
    stage: int
    volumes: Volumes
    bucket_bytes: int
    steps: int  # of the run that are left
    warmup: int = 0  # of these, synchronous before rare exchanges
    ranks_per_node: int = 1  # of the node with fewest
    every: int | None = None  # steps between exchanges that the user gave
    excluded: Mapping[str, str] = field(default_factory=dict)  # reasons, by bf16, int8 and rare


@dataclass(frozen=True)
class SyncCandidate:
    """A way in which nodes may communicate, and what a step is expected to take with it."""

    mode: str  # of --sync.mode
    compress: Compression  # of --comm.compress
    every: int | None  # of --sync.every
    sent_bytes: float  # by a node, per step
    wire_s: float  # in which they travel, per step
    exposed_s: float  # of a step, beside computing and what every candidate sends
    expected: float  # time of a step, x computing
    excluded: str = ""  # the reason

    def __str__(self) -> str:
        return name_of(self.mode, self.compress, self.every)


def name_of(mode: str, compress: str, every: int | None) -> str:
    """Return how nodes communicate in words: "diloco every 50 steps"."""
    if every is not None:
        return f"{mode} every {every} step{'s' * (every > 1)}"
    return mode if compress == "none" else f"{mode} with {compress} gradients"


def list_candidates(situation: Situation, measured: Measurement) -> list[SyncCandidate]:
    """Return all candidates, the most exact first. Pure."""
    given = situation.every
    intervals = INTERVALS if given is None else (given,)
    compressions: tuple[Compression, ...] = ("none", "bf16", "int8")
    return [
        *(_every_step(name, situation, measured) for name in compressions),
        *(
            rare(every, situation, measured)
            for every in intervals
            for rare in (_streaming, _diloco)
        ),
    ]


def choose(candidates: Sequence[SyncCandidate], measured: Measurement) -> SyncCandidate:
    """Return the first candidate that is nearly free, or else the fastest. Pure.

    The limits are for what a candidate adds to computing: the small collectives of every step are
    the same with all. The first candidate is never excluded.
    """
    allowed = [candidate for candidate in candidates if not candidate.excluded]
    for candidate in allowed:
        limit = EVERY_STEP_LIMIT if candidate.every is None else RARE_LIMIT
        if candidate.exposed_s <= (limit - 1) * measured.computing_s:
            return candidate
    return min(allowed, key=lambda candidate: candidate.exposed_s)


def explain(choice: SyncCandidate, plain: SyncCandidate, measured: Measurement) -> str:
    """Return the choice and its reason in one sentence; `plain` is every-step in full precision."""
    text = (
        f"{_seconds(measured.computing_s)} of computing a step, {_seconds(plain.wire_s)} for its "
        f"gradients between nodes ({_rate(measured.s_per_byte)}): {choice}, expected "
        f"{choice.expected:.2f} x computing"
    )
    if choice.every is not None:
        text += (
            "; this approximates synchronous training, and its effect on the loss is not measured"
        )
    elif choice.compress != "none":
        text += "; gradients are rounded, and the effect on the loss is not measured"
    return text


def to_table(candidates: Sequence[SyncCandidate], choice: SyncCandidate) -> list[dict[str, Any]]:
    """Return the candidates as rows of summary.json. Pure."""
    return [
        {"name": str(candidate), **asdict(candidate), "chosen": candidate is choice}
        for candidate in candidates
    ]


def _every_step(
    compress: Compression, situation: Situation, measured: Measurement
) -> SyncCandidate:
    """Return the candidate whose gradients cross nodes in every step.

    Stage 2 sends those of every micro-batch. At stage 0, and without codes, an all-reduce sends
    each byte twice. Codes are gathered whole; encoding and decoding count in full.
    """
    nodes, stage, volumes = situation.nodes, situation.stage, situation.volumes
    rounds = measured.micro_batches if stage == 2 else 1
    share = (1 if stage else 2) * (nodes - 1) / nodes
    by_name: dict[str, float] = {
        "none": share * volumes.gradients,
        "bf16": share * volumes.bf16,
        "int8": (nodes - 1) * volumes.int8,
    }
    reduced, gathered = by_name[compress], (nodes - 1) / nodes * volumes.gathered
    messages = _messages(volumes.gradients, situation)
    reduce_s = rounds * (messages * measured.latency_s + reduced * measured.s_per_byte)
    gather_s = gathered * measured.s_per_byte
    if stage:
        gather_s += _messages(volumes.gathered, situation) * measured.latency_s
    hidden_s = min(reduce_s, rounds * OVERLAP * measured.backward_s)
    coding_s = rounds * measured.codec_s.get(compress, 0.0)
    exposed_s = reduce_s - hidden_s + gather_s + coding_s
    return SyncCandidate(
        mode="every-step",
        compress=compress,
        every=None,
        sent_bytes=rounds * reduced + gathered,
        wire_s=reduce_s + gather_s,
        exposed_s=exposed_s,
        expected=_expected(exposed_s, measured),
        excluded=situation.excluded.get(compress, ""),
    )


def _diloco(every: int, situation: Situation, measured: Measurement) -> SyncCandidate:
    """Return the candidate that all-reduces parameters every `every` steps, behind nothing."""
    nodes, nbytes = situation.nodes, situation.volumes.exchanged
    sent = 2 * (nodes - 1) / nodes * nbytes
    exchange_s = _messages(nbytes, situation) * measured.latency_s + sent * measured.s_per_byte
    per_step = (sent / every, exchange_s / every, exchange_s / every)
    reason = _refusal_of_rare(every, situation)
    return _rare("diloco", every, per_step, situation, measured, reason=reason)


def _streaming(every: int, situation: Situation, measured: Measurement) -> SyncCandidate:
    """Return the candidate that gathers codes of the parameters in parts, after `every` steps each.

    A part has its default overlap of steps to travel, a quarter of whose computing hides it; a
    small all-reduce goes with it. Codes take as long as those of int8, and count in full; at stage
    0, each rank of a node encodes and decodes all of them.
    """
    nodes, volumes = situation.nodes, situation.volumes
    fragments, overlap = min(StreamingDiLoCo.fragments, every), StreamingDiLoCo.overlap
    sent = (nodes - 1) * volumes.streamed
    messages = _messages(math.ceil(volumes.exchanged / fragments), situation) + 1
    part_s = messages * measured.latency_s + sent / fragments * measured.s_per_byte
    hidden_s = min(part_s, OVERLAP * overlap * measured.computing_s)
    coding_s = measured.codec_s.get("int8", 0.0)
    if situation.stage == 0:
        coding_s *= situation.ranks_per_node
    exposed_s = (fragments * (part_s - hidden_s) + coding_s) / every
    reason = _refusal_of_rare(every, situation)
    if not reason and every <= overlap:
        reason = f"an exchange travels for {overlap} step, so they need at least {overlap + 1}"
    per_step = (sent / every, fragments * part_s / every, exposed_s)
    return _rare("streaming", every, per_step, situation, measured, reason=reason)


def _rare(
    mode: str,
    every: int,
    per_step: tuple[float, float, float],
    situation: Situation,
    measured: Measurement,
    *,
    reason: str,
) -> SyncCandidate:
    """Return a candidate of rare exchanges, with means over the warm-up and the steps after it.

    `per_step` are the bytes sent, their seconds and the exposed ones of a step after the warm-up.
    """
    warm = _every_step("none", situation, measured)
    in_warmup = (warm.sent_bytes, warm.wire_s, warm.exposed_s)
    part = min(1.0, situation.warmup / max(1, situation.steps))
    sent_bytes, wire_s, exposed_s = (
        part * before + (1 - part) * after
        for before, after in zip(in_warmup, per_step, strict=True)
    )
    return SyncCandidate(
        mode=mode,
        compress="none",
        every=every,
        sent_bytes=sent_bytes,
        wire_s=wire_s,
        exposed_s=exposed_s,
        expected=_expected(exposed_s, measured),
        excluded=reason,
    )


def _refusal_of_rare(every: int, situation: Situation) -> str:
    """Return why nodes cannot exchange after so many steps, or nothing."""
    reason = situation.excluded.get("rare", "")
    steps = max(0, situation.steps - situation.warmup)
    if not reason and situation.every is None and every > steps:
        after = " after the warm-up" if situation.warmup else ""
        reason = f"the run has {steps} steps left{after}"
    return reason


def _expected(exposed_s: float, measured: Measurement) -> float:
    """Return the time of a step, x computing, with the small collectives of every step."""
    step_s = measured.computing_s + exposed_s + SMALL_COLLECTIVES * measured.latency_s
    return step_s / measured.computing_s


def _messages(nbytes: int, situation: Situation) -> int:
    return math.ceil(nbytes / situation.bucket_bytes)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _rate(s_per_byte: float) -> str:
    """Return a speed in words: "100 Mbit/s"."""
    mbit = 8e-6 / s_per_byte
    return f"{mbit / 1e3:.1f} Gbit/s" if mbit >= 1e3 else f"{mbit:.3g} Mbit/s"
