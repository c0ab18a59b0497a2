"""Timing one candidate after the other, so that none has it better than another."""

import random
import time
from typing import Any

from mntrain.bench.candidates import Candidate
from mntrain.comm.mpi import pause

NAP_S = 2e-4


def sample(comm: Any, candidate: Candidate) -> tuple[float, bool]:
    """Do it once: the seconds that it took on this rank, and whether the result is right.

    Collective over the mpi4py communicator `comm`. The clock starts when all are prepared, and
    nobody checks before all are done: neither takes the core from who is still at work.
    """
    candidate.prepare()
    rendezvous(comm)
    start = time.perf_counter()
    candidate.run()
    took = time.perf_counter() - start
    rendezvous(comm)
    return took, candidate.right()


def in_turns(count: int, turn: int) -> list[int]:
    """In which order so many candidates go in a turn: one of its own, the same on all ranks.

    Who goes after another finds the caches as that one has left them.
    """
    return random.Random(turn).sample(range(count), count)


def rendezvous(comm: Any) -> None:
    """Wait for all ranks of an mpi4py communicator, and leave at the same time. Collective.

    Those who come early sleep, or they would slow down who still works. Then all meet once more,
    awake; they yield the core, which whoever is to leave may need.
    """
    for nap_s in (NAP_S, 0.0):
        everyone = comm.Ibarrier()
        while not everyone.Test():
            pause(nap_s)
