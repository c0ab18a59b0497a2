"""The collectives that are compared, and their measurement in turns.

Every result is verified bitwise. Contributions and all their partial sums are small integers, which
no dtype rounds.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mntrain.comm import clock
from mntrain.comm.world_collectives import WorldCollectives
from zero.layout import split

_POISON = -9.0  # in no pattern: reveals elements that a collective has not written

Part = tuple[Tensor, int]  # of the whole tensor: flat, and the index of its first element


class Sample(NamedTuple):
    """One run of a candidate on one rank: seconds, those of the CPU in all threads, the verdict."""

    seconds: float
    cpu_s: float
    correct: bool


class Pattern:
    """One rank's contribution to every element, and the sum over all ranks there.

    The contribution of rank r to element i is (i + 13 r) mod 5 - 2, plus i mod 11 on rank 0. The
    former adds up to 0 over any five consecutive ranks. Both repeat after 55 elements. No power of
    two is a multiple of that, so a chunk or shard in the wrong place differs from the right one.
    """

    def __init__(self, rank: int, size: int, like: Tensor) -> None:
        """Make it for all elements of a flat tensor, in its dtype and on its device."""
        index = torch.arange(like.numel(), dtype=torch.int32)
        base = index % 11
        total = base + sum((index + 13 * other) % 5 - 2 for other in range(size % 5))
        contribution = (index + 13 * rank) % 5 - 2 + (base if rank == 0 else 0)
        self.contribution, self.total = contribution.to(like), total.to(like)


def in_part(whole: Tensor, part: Part) -> Tensor:
    """Return the elements of a tensor where a part of its size lies."""
    tensor, start = part
    return whole[start : start + tensor.numel()]


def source_and_target(verb: str, whole: Part, shard: Part, *, is_root: bool) -> tuple[Part, Part]:
    """Return the part that this rank sends, and the part that holds its result."""
    if verb == "reduce_scatter":
        return whole, shard
    if verb == "all_gather":
        return shard, whole
    nothing = whole[0][:0], 0
    return (nothing if verb == "broadcast" and not is_root else whole), whole


@dataclass(frozen=True)
class Candidate:
    """One implementation of one collective on a tensor of one size."""

    name: str
    verb: str
    pattern: Pattern
    run: Callable[[], Any]  # returns when this rank has its result; collective
    source: Part  # sent by this rank; may lie in the memory of the target
    target: Part  # holds this rank's result

    def prepare(self) -> None:
        """Poison the target, write this rank's contribution, and wait for the device. Local."""
        target, _ = self.target
        target.fill_(_POISON)
        sums = self.verb in ("all_reduce", "reduce_scatter")
        content = self.pattern.contribution if sums else self.pattern.total
        self.source[0].copy_(in_part(content, self.source))
        if target.is_cuda:
            torch.cuda.synchronize(target.device)

    def is_correct(self) -> bool:
        """Return whether this rank's result is bitwise correct. Local."""
        return torch.equal(self.target[0], in_part(self.pattern.total, self.target))


def library_candidate(
    name: str, verb: str, collectives: WorldCollectives, tensor: Tensor, pattern: Pattern
) -> Candidate:
    """Return a collective of `WorldCollectives`, in place on a flat tensor. Local."""
    collective = getattr(collectives, verb)

    def run() -> None:
        collective(tensor).wait()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    slot, bounds = collectives.slot(collectives.rank), split(tensor.numel(), collectives.size)
    shard = tensor[bounds[slot] : bounds[slot + 1]], bounds[slot]
    is_root = collectives.rank == 0
    parts = source_and_target(verb, (tensor, 0), shard, is_root=is_root)
    return Candidate(name, verb, pattern, run, *parts)


def take_turns(
    comm: Any, candidates: Sequence[Candidate], turns: int, budget_s: float, *, warm_up: int = 1
) -> list[list[list[Sample]]]:
    """Return samples by candidate, turn and rank; candidates run in random order in a turn.

    Collective over the mpi4py communicator `comm`. Makes at least one turn, and no further one
    that would end after `budget_s` seconds if it took as long as the one before. The first
    `warm_up` turns are not returned.
    """
    start = turn_start = time.perf_counter()
    local: list[list[Sample]] = [[] for _ in candidates]
    for number in range(-warm_up, turns):
        now = time.perf_counter()
        if number > 0 and comm.bcast(2 * now - turn_start - start > budget_s):
            break
        turn_start = now
        for index in turn_order(len(candidates), number):
            candidate = candidates[index]
            candidate.prepare()
            rendezvous(comm)
            began, began_cpu = time.perf_counter(), time.process_time()
            candidate.run()
            times = time.perf_counter() - began, time.process_time() - began_cpu
            rendezvous(comm)  # verification takes CPU time, which other ranks may still need
            if number >= 0:
                local[index].append(Sample(*times, candidate.is_correct()))
    by_rank = comm.allgather(local)
    return [
        [list(turn) for turn in zip(*(ranks[index] for ranks in by_rank), strict=True)]
        for index in range(len(candidates))
    ]


def turn_order(count: int, turn: int) -> list[int]:
    """Return a random order of `count` candidates for a turn, the same on all ranks.

    A candidate finds the caches as its predecessor left them, so predecessors must vary.
    """
    return random.Random(turn).sample(range(count), count)


def rendezvous(comm: Any) -> None:
    """Wait for all ranks of an mpi4py communicator, and return at the same time on all. Collective.

    Ranks sleep in the first barrier, since the slowest one may need the core, and only yield the
    core in the second one, to leave together.
    """
    for nap_s in (2e-4, 0.0):
        barrier = comm.Ibarrier()
        while not barrier.Test():
            clock.pause(nap_s)
