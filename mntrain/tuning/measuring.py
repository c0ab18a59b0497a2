"""Timing all-reduces on the world as it is, within a time limit.

Every method is collective, and all ranks decide alike what is timed next: they go by what all have
gathered, and by rank 0's clock.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from mntrain.comm import link_speed
from mntrain.comm.algorithm_table import AlgorithmChoice, AlgorithmTable
from mntrain.comm.collectives import WorldCollectives
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator
from mntrain.comm.topology import Topology
from mntrain.tuning import choosing
from mntrain.tuning.choosing import Findings

T = TypeVar("T")

SECONDS = 1.8  # for all of it
SMALL_SHARE = 0.15  # of them, for each size but the largest
ROUNDS = 7
BURST_S = 5e-3  # what is shorter is done several times in a row,
BURST = 16  # at most so many
# Slower than the best by this factor: no more of it, after one round and after several.
OUT_AT_ONCE, OUT = 3.0, 1.5
# What the goes at one size are at least: a warm-up and two rounds.
LEAST_GOES = 3
PROBE_S = 0.2
LINK_MIB = 6  # that the probe of a link sends at least
COPIES = 6  # of the tensor that the probe of memory makes at least, in times of an all-reduce


class Measuring:
    """Finds out what `Findings` say.

    `comm` is over the ranks of `topology`, and these collectives go over it; `progress` is their
    communication thread; `device` is where tensors lie.
    """

    def __init__(
        self,
        collectives: WorldCollectives,
        comm: Communicator,
        topology: Topology,
        progress: ProgressEngine,
        device: torch.device,
    ) -> None:
        self._collectives, self._comm, self._topology = collectives, comm, topology
        self._progress, self._device = progress, device
        self._start = time.perf_counter()
        self._passed = 0.0  # seconds since then, on rank 0
        self._samples: dict[int, dict[AlgorithmChoice, list[float]]] = {}
        self._speed: float | None = None

    def run(self, bucket_bytes: int) -> Findings:
        """Time what is worth it for buckets of so many bytes, from small to large."""
        with _no_garbage_collection():
            self._time_sizes(bucket_bytes)
            self._probe_memory(list(self._samples)[-1])
        return Findings(self._samples, self._speed)

    def _time_sizes(self, bucket_bytes: int) -> None:
        marks = choosing.sizes(bucket_bytes)
        names = choosing.algorithms(self._topology)
        for index, mark in enumerate(marks):
            largest = index + 1 == len(marks)
            nbytes = mark
            if self._samples:
                done = list(self._samples)[-1]
                if largest:
                    self._probe_link(done)
                affordable = self._affordable(mark, done, names)
                if affordable != mark:
                    names = self._promising(names, done)
                    affordable = self._affordable(mark, done, names)
                if affordable is None:
                    break
                nbytes = affordable
            self._time_size(nbytes, names, self._left if largest else SMALL_SHARE * SECONDS)

    @property
    def _left(self) -> float:
        return SECONDS - self._passed

    def _promising(self, names: Sequence[str], nbytes: int) -> tuple[str, ...]:
        """Algorithms that were not far behind at a size large enough to tell."""
        if nbytes < choosing.SIZES[-1]:
            return tuple(names)
        times = choosing.medians(self._samples[nbytes])
        most = OUT_AT_ONCE * min(times[AlgorithmChoice(name)] for name in names)
        return tuple(name for name in names if times[AlgorithmChoice(name)] <= most)

    def _affordable(self, nbytes: int, done: int, names: Sequence[str]) -> int | None:
        """At which size there is time for these algorithms, and for the best in other pieces."""
        times = choosing.medians(self._samples[done])
        defaults = [times[AlgorithmChoice(name)] for name in names]
        least_s = LEAST_GOES * (sum(defaults) + len(choosing.PIECES) * min(defaults))
        return choosing.affordable(nbytes, done, least_s, self._left)

    def _time_size(self, nbytes: int, names: Sequence[str], seconds: float) -> None:
        """Time algorithms against each other, then the best one in pieces of other lengths."""
        first = not self._samples
        self._samples[nbytes] = {}
        end = self._passed + seconds
        numel = max(1, nbytes // choosing.ITEM)
        tensor = self._collectives.allocate(numel, torch.float32, self._device)
        defaults = [AlgorithmChoice(name) for name in names]
        if first:
            self._go(defaults, tensor, [1] * len(defaults))  # connections are made
        self._compare(defaults, tensor, nbytes, end)
        found = choosing.best(self._samples[nbytes])
        variants = choosing.pieces(found.algorithm, self._topology, nbytes)
        expected_s = LEAST_GOES * len(variants) * choosing.medians(self._samples[nbytes])[found]
        if len(variants) > 1 and self._passed + expected_s <= end:
            self._compare(variants, tensor, nbytes, end)

    def _compare(
        self, choices: Sequence[AlgorithmChoice], tensor: Tensor, nbytes: int, end: float
    ) -> None:
        """Time choices in turn, so that noise falls on all, until rank 0's clock says `end`."""
        once = self._go(choices, tensor, [1] * len(choices))
        often = {
            choice: max(1, min(BURST, int(BURST_S / took)))
            for choice, took in zip(choices, once, strict=True)
        }
        samples = self._samples[nbytes]
        running = list(choices)
        for number in range(ROUNDS):
            before = self._passed
            took = self._go(running, tensor, [often[choice] for choice in running])
            for choice, seconds in zip(running, took, strict=True):
                samples.setdefault(choice, []).append(seconds)
            lowest = min(min(samples[choice]) for choice in running)
            most = (OUT if number else OUT_AT_ONCE) * lowest
            running = [choice for choice in running if min(samples[choice]) <= most]
            if 2 * self._passed - before > end or len(choices) > len(running) == 1:
                break

    def _go(
        self, choices: Sequence[AlgorithmChoice], tensor: Tensor, often: Sequence[int]
    ) -> list[float]:
        """All-reduce by each choice so often in a row: the seconds of one, on the slowest rank."""
        mine = []
        for choice, count in zip(choices, often, strict=True):
            collectives = self._collectives.replace(table=AlgorithmTable(((0, choice),)))
            self._gather(None)
            start = time.perf_counter()
            for _ in range(count):
                collectives.all_reduce(tensor).wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            mine.append((time.perf_counter() - start) / count)
        by_rank = self._agreed(mine)
        return [max(took) for took in zip(*by_rank, strict=True)]

    def _probe_link(self, nbytes: int) -> None:
        """Find out what the link between nodes carries, unless that takes too long."""
        seconds = min(choosing.medians(self._samples[nbytes]).values())
        least = LINK_MIB * (1 << 20) / choosing.needed(self._topology) / nbytes * seconds
        if len(self._topology.nodes) > 1 and least <= PROBE_S:
            self._speed = self._on_thread(
                lambda: link_speed.link_speed(self._comm, self._topology, PROBE_S)
            )
            self._agreed(None)

    def _probe_memory(self, nbytes: int) -> None:
        """On one node: find out how fast its ranks copy, unless that takes too long."""
        seconds = min(choosing.medians(self._samples[nbytes]).values())
        large = nbytes >= choosing.SIZES[-1]
        if len(self._topology.nodes) == 1 and large and COPIES * seconds <= PROBE_S:
            self._gather(None)  # all at once
            self._speed = min(self._agreed(link_speed.copy_speed(nbytes, PROBE_S / 4)))

    def _agreed(self, mine: T) -> list[T]:
        """Everyone's, by rank. Looks at rank 0's clock, too."""
        everyone = self._gather((mine, time.perf_counter() - self._start))
        self._passed = everyone[0][1]
        return [theirs for theirs, _ in everyone]

    def _gather(self, mine: T) -> list[T]:
        return self._on_thread(lambda: self._comm.gather_objects(mine))

    def _on_thread(self, function: Callable[[], T]) -> T:
        return self._progress.call(function).wait()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for garbage: with torch loaded that takes longer than a go."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
