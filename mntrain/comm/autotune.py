"""Choice of the all-reduce algorithm for `auto`: time each one briefly on the world as it is.

Up to three sizes are timed, the largest of them that of a bucket. Where the largest size would take
too long, it is halved until it does not. `lanes` is kept unless another algorithm is faster by more
than `MARGIN`, so that the choice stays the same from run to run. Rank 0 owns the clock and the
cache; every rank gets its result.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from mntrain._version import __version__
from mntrain.comm import tuning_cache
from mntrain.comm.algorithm_table import AlgorithmChoice, AlgorithmTable
from mntrain.comm.algorithms import candidates
from mntrain.comm.collectives import WorldCollectives
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator
from mntrain.comm.topology import Topology
from mntrain.comm.tuning_cache import Tuning

T = TypeVar("T")

DEFAULT, BASELINE = "lanes", "flat"
SMALL_SIZES = (32 << 10, 1 << 20)  # bytes, timed below the size of a bucket
MAX_BYTES = 32 << 20  # larger tensors only take longer
BUDGET_S = 0.8  # for all repetitions after the first size's warm-up
REPETITIONS = 5  # of each algorithm at each size, if the budget allows
MIN_ROUNDS = 2  # a warm-up and one repetition
MARGIN = 1.1  # an algorithm must be this much faster than the default to replace it

Times = dict[str, float]  # seconds of an all-reduce by algorithm


def untuned() -> Tuning:
    """Return the tuning of a job that times nothing: `lanes` for every size."""
    return Tuning(AlgorithmTable.always(DEFAULT), f"{DEFAULT}: not tuned")


class Autotuner:
    """Times all-reduces on the ranks of `comm`, of tensors on `device`.

    `make_collectives` makes collectives over a communicator, on the communication thread. The tuner
    uses collectives and a communicator of its own: it leaves no memory and no counted traffic.
    """

    def __init__(
        self,
        make_collectives: Callable[[Communicator], WorldCollectives],
        comm: Communicator,
        topology: Topology,
        progress: ProgressEngine,
        device: torch.device,
    ) -> None:
        self._make, self._comm, self._topology = make_collectives, comm, topology
        self._progress, self._device = progress, device

    def tune(self, bucket_bytes: int, facts: Sequence[str]) -> Tuning:
        """Return the tuning for buckets of `bucket_bytes`, cached or measured. Collective.

        `facts` are strings of this rank that the result depends on, such as its host and its MPI
        library. The result is the same on all ranks. A measurement takes about a second.
        """
        affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count()
        key = tuning_cache.key_of(
            {
                "ranks": self._gather((*facts, cores, self._device.type)),
                "nodes": self._topology.nodes,
                "bucket_bytes": bucket_bytes,
                "algorithms": candidates(),
                "versions": [__version__, torch.__version__],
            }
        )
        master = self._comm.rank == 0
        cached = self._gather(tuning_cache.find(key) if master else None)[0]
        if cached is not None:
            line = f"{cached.tuning.line} (measured {cached.measured:%Y-%m-%d})"
            return Tuning(cached.tuning.table, line)
        measured = self.measure(bucket_bytes)
        tuning = Tuning(make_table(bucket_bytes, measured), explain(measured))
        if master:
            tuning_cache.store(key, tuning)
        return tuning

    def measure(self, bucket_bytes: int) -> dict[int, Times]:
        """Time every candidate at each size, in bytes, ascending. Collective.

        Each time is that of the slowest rank. The result is the same on all ranks.
        """
        comm = self._run(lambda: self._comm.split(0, self._comm.rank, "tuning"))
        collectives = self._run(lambda: self._make(comm))
        times: dict[int, Times] = {}
        start, elapsed = time.perf_counter(), 0.0
        for size in sizes(bucket_bytes):
            affordable = affordable_size(size, times, BUDGET_S - elapsed)
            if affordable is None:
                break
            deadline = start + (BUDGET_S if size > SMALL_SIZES[-1] else BUDGET_S / 3)
            times[affordable], elapsed = self._time_size(collectives, affordable, start, deadline)
        self._run(comm.free)
        return times

    def _time_size(
        self, collectives: WorldCollectives, nbytes: int, start: float, deadline: float
    ) -> tuple[Times, float]:
        """Time each candidate in turn, so that noise falls on all; the first round warms up.

        Return the medians, and the seconds since `start` on rank 0's clock.
        """
        tensor = collectives.allocate(max(1, nbytes // 4), torch.float32, self._device)
        rounds: list[list[float]] = []
        while len(rounds) <= REPETITIONS:
            local = [
                self._time_once(collectives.replace(table=AlgorithmTable.always(name)), tensor)
                for name in candidates()
            ]
            now = time.perf_counter()
            by_rank = self._gather((local, now - start, now > deadline))
            rounds.append(
                [max(column) for column in zip(*(row[0] for row in by_rank), strict=True)]
            )
            _, elapsed, late = by_rank[0]
            if late and len(rounds) >= MIN_ROUNDS:
                break
        medians = [median(column) for column in zip(*rounds[1:], strict=True)]
        return dict(zip(candidates(), medians, strict=True)), elapsed

    def _time_once(self, collectives: WorldCollectives, tensor: Tensor) -> float:
        self._gather(None)
        start = time.perf_counter()
        collectives.all_reduce(tensor).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    def _gather(self, value: T) -> list[T]:
        return self._run(lambda: self._comm.gather_objects(value))

    def _run(self, function: Callable[[], T]) -> T:
        return self._progress.call(function).wait()


def sizes(bucket_bytes: int) -> tuple[int, ...]:
    """Return the sizes to time, in bytes, ascending, for buckets of `bucket_bytes`."""
    largest = max(4, min(bucket_bytes, MAX_BYTES))
    return (*(size for size in SMALL_SIZES if 4 * size <= largest), largest)


def affordable_size(nbytes: int, times: Mapping[int, Times], left_s: float) -> int | None:
    """Return the largest of `nbytes`, a half of it, and so on that `left_s` suffices to time.

    The time is extrapolated from the largest size timed so far, in proportion to bytes. Return None
    if no size worth timing is left.
    """
    if not times:
        return nbytes
    timed, seconds = list(times.items())[-1]
    while nbytes >= 2 * timed:
        if MIN_ROUNDS * sum(seconds.values()) * nbytes / timed <= left_s:
            return nbytes
        nbytes //= 2
    return None


def choose(times: Times) -> str:
    """Return the fastest algorithm, or the default unless that is slower by more than `MARGIN`."""
    fastest = min(times, key=lambda name: times[name])
    return fastest if times[fastest] * MARGIN < times[DEFAULT] else DEFAULT


def make_table(bucket_bytes: int, measured: Mapping[int, Times]) -> AlgorithmTable:
    """Return the table that uses, for any size, the choice at the nearest timed size.

    The limits between choices are the geometric means of the sizes that were to be timed.
    """
    planned = sizes(bucket_bytes)
    steps: list[tuple[int, AlgorithmChoice]] = []
    for index, times in enumerate(measured.values()):
        last = index + 1 == len(measured)
        limit = planned[-1] if last else isqrt(planned[index] * planned[index + 1])
        choice = AlgorithmChoice(choose(times))
        if steps and steps[-1][1] == choice:
            steps.pop()
        steps.append((limit, choice))
    return AlgorithmTable(tuple(steps))


def explain(measured: Mapping[int, Times]) -> str:
    """Return the choice for the largest size and its advantage: "lanes: 1.9x flat at 25 MiB"."""
    nbytes, times = list(measured.items())[-1]
    choice = choose(times)
    other = BASELINE if choice == DEFAULT else DEFAULT
    if other not in times:
        return choice
    ratio = times[other] / times[choice]
    return (
        f"{choice}: {ratio:.{1 if ratio < 9.95 else 0}f}x {other} at {nbytes / (1 << 20):.3g} MiB"
    )
