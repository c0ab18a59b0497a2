"""What is worth timing, and what follows from the times. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, log2, sqrt
from statistics import median, quantiles

from mntrain.comm import algorithms as registry
from mntrain.comm.algorithm_table import (
    CHUNK_BYTES,
    AlgorithmChoice,
    AlgorithmTable,
)
from mntrain.comm.chunk_plan import Chunk
from mntrain.comm.topology import Topology

ITEM = 4  # bytes of an element: fp32 is timed
PIECES = (CHUNK_BYTES, CHUNK_BYTES // 4, CHUNK_BYTES * 4)
SIZES = (32 << 10, 1 << 20)  # below the size of a bucket
MOST_BYTES = 32 << 20  # larger tensors only take longer
APART = 4  # sizes closer than this tell the same
MOST_FLAT = 64  # ranks; more need so many connections that these alone take too long
NOISE = 0.1
Samples = Mapping[AlgorithmChoice, Sequence[float]]  # seconds of an all-reduce


@dataclass(frozen=True)
class Findings:
    """What was timed. `samples` are by size in bytes, ascending.

    `speed`, in bytes/s: what the link carries each way at once, or on one node what a rank copies
    in memory while all do; None if it was not measured.
    """

    samples: Mapping[int, Samples]
    speed: float | None


def algorithms(topology: Topology) -> tuple[str, ...]:
    """Those that differ on these nodes, lanes first. On one node leader is lanes with one hand."""
    names = ["lanes"]
    if len(topology.nodes) > 1 and topology.smallest_node > 1:
        names.append("leader")
    if len(topology.nodes) < topology.size <= MOST_FLAT:
        names.append("flat")
    return tuple(names)


def pieces(algorithm: str, topology: Topology, nbytes: int) -> list[AlgorithmChoice]:
    """An algorithm in pieces of every length that cuts so many bytes otherwise, default first."""
    scheme = registry.load(algorithm).plan(topology, 0)
    plans: dict[tuple[Chunk, ...], AlgorithmChoice] = {}
    for piece_bytes in PIECES:
        plan = scheme.all_reduce(max(1, nbytes // ITEM), ITEM, piece_bytes)
        plans.setdefault(plan, AlgorithmChoice(algorithm, piece_bytes))
    return list(plans.values())


def sizes(bucket_bytes: int) -> tuple[int, ...]:
    """The sizes to time, ascending, where buckets are of so many bytes."""
    largest = max(ITEM, min(bucket_bytes, MOST_BYTES))
    return (*(nbytes for nbytes in SIZES if nbytes * APART <= largest), largest)


def affordable(nbytes: int, done: int, seconds: float, left: float) -> int | None:
    """The largest size up to `nbytes`, halved as often as needed, whose timing `left` allows.

    `done` bytes take so many `seconds`, and more take more in proportion, or if these are few, for
    which latency counts, by the root of it. None if there is no such size that is worth timing.
    """
    power = 1.0 if done >= SIZES[-1] // APART else 0.5
    while nbytes >= APART * done:
        if seconds * (nbytes / done) ** power <= left:
            return nbytes
        nbytes //= 2
    return None


def medians(samples: Samples) -> dict[AlgorithmChoice, float]:
    """What each takes."""
    return {choice: median(took) for choice, took in samples.items()}


def best(samples: Samples) -> AlgorithmChoice:
    """The fastest; among those that only noise parts from it, the first in a fixed order.

    The order: lanes, leader, flat; of one algorithm the default piece, then the nearest to it. So
    the choice stays the same from run to run, if it makes no difference. Noise is 10%, or as much
    as the samples show.
    """
    times = medians(samples)
    fastest = min(times, key=lambda choice: times[choice])
    most = times[fastest] * (1 + max(NOISE, _doubt(samples[fastest])))
    tied = [choice for choice in times if times[choice] / (1 + _doubt(samples[choice])) <= most]
    return min(tied, key=_order)


def table(bucket_bytes: int, found: Sequence[tuple[int, AlgorithmChoice]]) -> AlgorithmTable:
    """What was best at the sizes that were timed, for every size between and beyond them.

    Where one ends and the next begins depends on the sizes that should have been timed, not on
    those that there was time for.
    """
    marks = sizes(bucket_bytes)
    steps: list[tuple[int, AlgorithmChoice]] = []
    for index, (_, choice) in enumerate(found):
        last = index + 1 == len(found)
        most = marks[-1] if last else isqrt(marks[index] * marks[index + 1])
        if steps and steps[-1][1] == choice:
            steps.pop()
        steps.append((most, choice))
    return AlgorithmTable(tuple(steps))


def line(topology: Topology, findings: Findings) -> str:
    """What was chosen for the largest tensors, and how good it is, in words.

    "lanes, 1 MiB pieces: 1.9x flat at 25 MiB; 97% of the measured link".
    """
    nbytes, samples = list(findings.samples.items())[-1]
    choice = best(samples)
    seconds = median(samples[choice])
    rival = "lanes" if choice.algorithm == "flat" else "flat"
    said, told = [], 0
    for at, there in reversed(list(findings.samples.items())):
        if theirs := _fastest(rival, there):
            ratio = theirs / (seconds if at == nbytes else _fastest(choice.algorithm, there))
            said.append(f"{ratio:.{1 if ratio < 9.95 else 0}f}x {rival} at {_size(at)}")
            told = at
            break
    if findings.speed is not None:
        share = needed(topology) * nbytes / findings.speed / seconds
        what = "a memcpy" if len(topology.nodes) == 1 else "the measured link"
        said.append(f"{share:.0%} of {what}" + f" at {_size(nbytes)}" * (told != nbytes))
    return f"{choice}: {'; '.join(said)}" if said else str(choice)


def needed(topology: Topology) -> float:
    """How much of a tensor an all-reduce moves at least: 1 is all of it.

    What some node must send; on one node, what a rank that has all of the sum must have written.
    """
    nodes = len(topology.nodes)
    return 2 * (nodes - 1) / nodes if nodes > 1 else 1.0


def _order(choice: AlgorithmChoice) -> tuple[int, float]:
    distance = abs(log2(choice.chunk_bytes / CHUNK_BYTES))
    return ("lanes", "leader", "flat").index(choice.algorithm), distance


def _doubt(took: Sequence[float]) -> float:
    """How far off the median may be, in parts of it, to judge by its samples."""
    if len(took) == 1:
        return 0.5
    low, middle, high = quantiles(took, n=4, method="inclusive")
    return (high - low) / middle / sqrt(len(took)) * 2


def _fastest(algorithm: str, samples: Samples) -> float:
    """The time of the fastest of an algorithm's choices; 0 where it was not timed."""
    times = medians(samples)
    return min((times[choice] for choice in times if choice.algorithm == algorithm), default=0.0)


def _size(nbytes: int) -> str:
    """25 MiB, 1.562 MiB, 32 KiB, 100 B."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
