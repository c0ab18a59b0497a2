"""The measurement: candidates take turns, so that noise affects all of them alike."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mntrain.bench.bench_options import BenchOptions
from mntrain.bench.candidates import NATIVE, Candidate, LibraryCandidate, MpiCandidate, Pattern
from mntrain.bench.limits import HardwareLimits
from mntrain.bench.results import BenchCase
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.comm.collectives import WorldCollectives
from mntrain.comm.mpi import pause
from mntrain.world import World

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
SMALL_BYTES = 1 << 20  # smaller tensors are measured SMALL_FACTOR times as often
SMALL_FACTOR = 4
NAP_S = 2e-4

Sample = tuple[float, bool]  # seconds on this rank, and whether its result is correct


def measure(
    world: World, comm: Any, options: BenchOptions, limits: HardwareLimits, start: float
) -> Iterator[list[BenchCase]]:
    """Yield the cases of each collective at each size, from the smallest size to the largest.

    Collective; all ranks yield the same. `comm` is an mpi4py communicator over the same ranks,
    used for nothing else. `options.seconds` count from `start`, on rank 0's `time.perf_counter`:
    each collective and size gets an equal part of them for its repetitions, and is skipped if it
    would start later. The smallest size is never skipped.
    """
    dtype = DTYPES[options.dtype]
    pattern = Pattern(world.rank, world.size, dtype, world.device)
    native_pattern = Pattern(world.rank, world.size, torch.float32, torch.device("cpu"))
    budget_s = options.seconds / (len(options.sizes) * len(options.verbs))
    for nbytes in options.sizes:
        tensor = world.collectives.allocate(nbytes // dtype.itemsize, dtype, world.device)
        first = nbytes == options.sizes[0]
        rounds = options.repeats * (SMALL_FACTOR if nbytes < SMALL_BYTES else 1)
        for verb in options.verbs:
            cases = [
                BenchCase(verb, name, nbytes, options.dtype, limits.seconds(verb, nbytes))
                for name in options.algorithms
            ]
            cases.append(replace(cases[0], algorithm=NATIVE[verb], dtype="fp32"))
            if first or comm.bcast(time.perf_counter() - start < options.seconds):
                candidates: list[Candidate] = [
                    LibraryCandidate(case.algorithm, verb, _by(world, case), tensor, pattern)
                    for case in cases[:-1]
                ]
                candidates.append(MpiCandidate(verb, comm, nbytes, native_pattern))
                # The first size also opens connections: warm up twice.
                samples = take_turns(comm, candidates, rounds, budget_s, warm_up=1 + first)
                cases = [_with(case, found) for case, found in zip(cases, samples, strict=True)]
            yield cases


def take_turns(
    comm: Any, candidates: Sequence[Candidate], rounds: int, budget_s: float, *, warm_up: int = 1
) -> list[list[list[Sample]]]:
    """Run each candidate once per round, in random order: samples by candidate, round and rank.

    Collective over the mpi4py communicator `comm`. Makes one round at least, and starts no other
    after `budget_s` seconds. The first `warm_up` rounds are not returned.
    """
    start = time.perf_counter()
    local: list[list[Sample]] = [[] for _ in candidates]
    for number in range(-warm_up, rounds):
        if number > 0 and comm.bcast(time.perf_counter() - start > budget_s):
            break
        for index in turn_order(len(candidates), number):
            result = sample(comm, candidates[index])
            if number >= 0:
                local[index].append(result)
    by_rank = comm.allgather(local)
    return [
        [list(turn) for turn in zip(*(ranks[index] for ranks in by_rank), strict=True)]
        for index in range(len(candidates))
    ]


def sample(comm: Any, candidate: Candidate) -> Sample:
    """Run a candidate once, and return its seconds on this rank and whether it is correct.

    Collective. The clock starts after all ranks are prepared, and no rank verifies its result
    before all have finished, so neither takes CPU time from ranks that still work.
    """
    candidate.prepare()
    rendezvous(comm)
    start = time.perf_counter()
    candidate.run()
    seconds = time.perf_counter() - start
    rendezvous(comm)
    return seconds, candidate.is_correct()


def turn_order(count: int, turn: int) -> list[int]:
    """Return a random order of `count` candidates for a turn, the same on all ranks.

    A candidate finds the caches as its predecessor left them, so predecessors must vary.
    """
    return random.Random(turn).sample(range(count), count)


def rendezvous(comm: Any) -> None:
    """Wait for all ranks of an mpi4py communicator, and return at the same time on all. Collective.

    Ranks sleep while they wait for the slowest one, which may need the core. A second barrier, in
    which they only yield the core, makes them leave together.
    """
    for nap_s in (NAP_S, 0.0):
        barrier = comm.Ibarrier()
        while not barrier.Test():
            pause(nap_s)


def _by(world: World, case: BenchCase) -> WorldCollectives:
    """Return the world's collectives by the algorithm of a case, at any size."""
    return world.collectives.replace(choice=AlgorithmChoice(case.algorithm))


def _with(case: BenchCase, samples: Sequence[Sequence[Sample]]) -> BenchCase:
    """Return the case with the samples of all rounds and ranks."""
    wrong = {rank for turn in samples for rank, (_, correct) in enumerate(turn) if not correct}
    times = tuple(max(seconds for seconds, _ in turn) for turn in samples)
    return replace(case, times_s=times, wrong_ranks=tuple(sorted(wrong)))
