"""The measurement: sizes, verbs and candidates in turn, within the seconds that it may take."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor

from mntrain.bench.bench_options import BenchOptions, size_label
from mntrain.bench.candidates import NATIVE, Candidate, LibraryCandidate, MpiCandidate
from mntrain.bench.limits import HardwareLimits, predicted, repeats, weight
from mntrain.bench.pattern import Pattern
from mntrain.bench.printing import short_time
from mntrain.bench.results import BenchCase, BenchResults, SkippedCase, TimedCase, WrongCase
from mntrain.bench.timing import in_turns, sample
from mntrain.comm.algorithm_table import AlgorithmTable
from mntrain.comm.collectives import WorldCollectives
from mntrain.world import World

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

C = TypeVar("C", bound=BenchCase)
Sample = tuple[float, bool]  # seconds on this rank, and whether its result is right


def by(world: World, algorithm: str) -> WorldCollectives:
    """The collectives of a world by one algorithm, whatever the size. Local."""
    return world.collectives.replace(table=AlgorithmTable.always(algorithm))


class Measurement:
    """Measures all cases of a world. Every method is collective, and decides alike on all ranks.

    `comm` is an mpi4py communicator over the same ranks, for this measurement alone. `end` is when
    it should be over, by this rank's `time.perf_counter`. `say` is told of every verb that is done,
    and of what was left out.
    """

    def __init__(
        self,
        world: World,
        comm: Any,
        *,
        options: BenchOptions,
        limits: HardwareLimits,
        end: float,
        say: Callable[[str], None],
    ) -> None:
        self._world, self._comm, self._options = world, comm, options
        self._limits, self._end, self._say = limits, end, say
        self._dtype = DTYPES[options.dtype]
        self._pattern = Pattern(world.rank, world.size, self._dtype, world.device)
        self._native_pattern = Pattern(world.rank, world.size, torch.float32, torch.device("cpu"))
        self._weight_left = sum(map(weight, options.sizes)) * len(options.verbs)
        # What a verb takes, by an algorithm: seconds for once, all in all, and at which size.
        self._seconds: dict[tuple[str, str], tuple[float, int]] = {}
        self.timed: list[TimedCase] = []
        self.skipped: list[SkippedCase] = []
        self.wrong: list[WrongCase] = []

    def run(self) -> None:
        """Measure everything that the time allows, from the smallest size to the largest."""
        for nbytes in self._options.sizes:
            tensor = self._world.collectives.allocate(
                nbytes // self._dtype.itemsize, self._dtype, self._world.device
            )
            for verb in self._options.verbs:
                self._measure(verb, nbytes, tensor)

    def results(self, facts: Mapping[str, Any]) -> BenchResults:
        """What was measured so far. Local."""
        return BenchResults(
            facts, self._limits, tuple(self.timed), tuple(self.skipped), tuple(self.wrong)
        )

    def _measure(self, verb: str, nbytes: int, tensor: Tensor) -> None:
        """Measure one verb at one size: candidates in turn, so that noise falls on all alike."""
        names = [*self._options.algorithms, NATIVE[verb]]
        time_left: float = self._world.gather(self._end - time.perf_counter())[0]
        allowed_s = time_left * weight(nbytes) / (self._weight_left * len(names))
        self._weight_left -= weight(nbytes)
        candidates = [
            self._candidate(name, verb, nbytes, tensor)
            for name in names
            if self._affordable(BenchCase(verb, name, nbytes), allowed_s)
        ]
        counts = self._warm_up(candidates, verb, nbytes, allowed_s)
        mine: list[list[Sample]] = [[] for _ in candidates]
        for turn in range(max(counts, default=0)):
            for index in in_turns(len(candidates), turn):
                if turn < counts[index]:
                    mine[index].append(sample(self._comm, candidates[index]))
        by_rank = self._world.gather(mine)
        for index, candidate in enumerate(candidates):
            case = BenchCase(verb, candidate.name, nbytes)
            self._record(case, [samples[index] for samples in by_rank])
        self._tell(verb, nbytes)

    def _candidate(self, name: str, verb: str, nbytes: int, tensor: Tensor) -> Candidate:
        if name == NATIVE[verb]:
            return MpiCandidate(verb, self._comm, nbytes, self._native_pattern)
        return LibraryCandidate(name, verb, by(self._world, name), tensor, self._pattern)

    def _affordable(self, case: BenchCase, allowed_s: float) -> bool:
        """Whether there is time for a case: to warm up, and for one more. If not, note it down.

        What has not been measured at a smaller size is always tried.
        """
        if (case.verb, case.algorithm) not in self._seconds:
            return True
        once_s, nbytes = self._seconds[case.verb, case.algorithm]
        expected_s = predicted(self._limits, case.verb, once_s, nbytes, case.size_bytes)
        if 2 * expected_s <= allowed_s:
            return True
        skipped = SkippedCase(**asdict(case), predicted_s=2 * expected_s, allowed_s=allowed_s)
        self.skipped.append(skipped)
        return False

    def _warm_up(
        self, candidates: Sequence[Candidate], verb: str, nbytes: int, allowed_s: float
    ) -> list[int]:
        """Do each once, and at the first size, where connections are made, once more.

        Returns how often to measure each.
        """
        took = []
        for candidate in candidates:
            if (verb, candidate.name) not in self._seconds:
                sample(self._comm, candidate)
            start = time.perf_counter()
            sample(self._comm, candidate)
            took.append(time.perf_counter() - start)
        slowest = [max(times) for times in zip(*self._world.gather(took), strict=True)]
        for candidate, once_s in zip(candidates, slowest, strict=True):
            self._seconds[verb, candidate.name] = once_s, nbytes
        return [repeats(once_s, allowed_s, self._options.repeats) for once_s in slowest]

    def _record(self, case: BenchCase, by_rank: Sequence[Sequence[Sample]]) -> None:
        """Note down what all ranks have seen of a case."""
        wrong = tuple(
            rank for rank, samples in enumerate(by_rank) if not all(right for _, right in samples)
        )
        if wrong:
            self.wrong.append(WrongCase(**asdict(case), ranks=wrong))
            return
        times = tuple(max(took for took, _ in turn) for turn in zip(*by_rank, strict=True))
        self.timed.append(
            TimedCase(
                **asdict(case),
                dtype="fp32" if case.algorithm == NATIVE[case.verb] else self._options.dtype,
                limit_s=self._limits.seconds(case.verb, case.size_bytes),
                times_s=times,
            )
        )

    def _tell(self, verb: str, nbytes: int) -> None:
        """Say what became of a verb at a size."""

        def here(cases: Sequence[C]) -> list[C]:
            return [case for case in cases if (case.verb, case.size_bytes) == (verb, nbytes)]

        found = [f"{case.algorithm} {short_time(case.median_s)}" for case in here(self.timed)]
        for what, cases in (("left out for lack of time", self.skipped), ("wrong", self.wrong)):
            names = [case.algorithm for case in here(cases)]
            found += [f"{what}: {' '.join(names)}"] if names else []
        self._say(f"{verb} {size_label(nbytes)}: {', '.join(found)}")
