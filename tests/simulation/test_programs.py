"""Random programs of collectives, in random orders of events.

Each ends with the right result on every rank, or with an error on every rank. To search longer:

    SIMULATED_PROGRAMS=1000 python -m pytest -n 0 --timeout 0 --thorough tests/simulation
"""

import random
from dataclasses import dataclass
from functools import partial

from drawn_calls import SPOILS, Call, draw_call, end_calls, run_calls, spoil, start_calls
from hypothesis import example, given
from hypothesis import strategies as st
from network import Link, NetworkModel
from search import searched
from simulated_ranks import SimulatedRanks
from virtual_time import Thread

from mntrain.errors import AgreedError

SIZES = [0, 1, 2, 7, 64, 1000, 4099, 9000]


@dataclass(frozen=True)
class Program:
    """Calls of a number of ranks, by stream, and the job in which they run; all by a seed.

    With `callers` each stream has a thread of its own, or one thread of a rank calls all of them.
    """

    seed: int
    hosts: tuple[int, ...]
    length: int
    streams: int
    private: bool
    threads: bool
    callers: bool
    network: NetworkModel

    def draw(self) -> list[list[Call]]:
        """Return the calls of each stream."""
        common, size = random.Random(self.seed), len(self.hosts)
        return [
            [draw_call(common, size, SIZES) for _ in range(self.length)]
            for _ in range(self.streams)
        ]

    def ranks(self) -> SimulatedRanks:
        return SimulatedRanks(
            seed=self.seed,
            hosts=self.hosts,
            network=self.network,
            private=self.private,
            threads=self.threads,
            switches=0.1 * (self.seed % 4),
        )


networks = st.builds(
    NetworkModel,
    between=st.sampled_from([Link(5e-6, 12.5e9), Link(50e-6, 125e6)]),
    message_s=st.sampled_from([0.0, 1e-6]),
    eager_bytes=st.sampled_from([0, 1 << 10, 64 << 10]),
    late_s=st.sampled_from([0.0, 1e-5, 1e-3]),
)


def programs(most_streams: int) -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        seed=st.integers(0, 1 << 32),
        hosts=st.lists(st.integers(0, 3), min_size=2, max_size=7).map(tuple),
        length=st.integers(1, 6),
        streams=st.integers(1, most_streams),
        private=st.booleans(),
        threads=st.booleans(),
        callers=st.booleans(),
        network=networks,
    )


@searched(15)
@given(programs(most_streams=3))
def test_every_rank_has_every_result(program):
    calls = program.draw()

    def on_rank(rank):
        made = [rank.collectives, *map(rank.collectives.add_stream, "ab"[: len(calls) - 1])]
        order = random.Random(rank.rank + program.seed).sample(range(len(calls)), len(calls))
        # Ranks need not agree about the order between streams.
        if program.callers:
            callers = [
                Thread(partial(run_calls, rank, calls[which], made[which]), "caller")
                for which in order
            ]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
        else:
            started = [start_calls(rank, calls[which], made[which], waits=False) for which in order]
            for pending in started:
                end_calls(rank, pending)

    ranks = program.ranks()
    ranks.run(on_rank)
    assert not ranks.job.unreceived()


# Two calls whose digests are near each other: of 2^22 tags, they have the same ones.
NEAR = Program(
    seed=7873,
    hosts=(0, 2),
    length=2,
    streams=1,
    private=False,
    threads=True,
    callers=True,
    network=NetworkModel(between=Link(50e-6, 125e6), eager_bytes=0, late_s=1e-3),
)


@searched(15)
@given(programs(most_streams=1), st.integers(0, 6), st.sampled_from(SPOILS))
@example(NEAR, 0, "repeats")
def test_a_rank_that_calls_otherwise_is_an_error_on_every_rank(program, odd, kind):
    (calls,) = program.draw()
    odd %= len(program.hosts)
    spoiled = spoil(random.Random(program.seed), calls, kind)

    def on_rank(rank):
        own = spoiled if rank.rank == odd else calls
        for _, work, _ in reversed(start_calls(rank, own, rank.collectives)):
            work.wait()

    found = program.ranks().run(on_rank, errors=True)
    assert all(isinstance(error, AgreedError) for error in found), found
    assert len({str(error) for error in found}) == 1
