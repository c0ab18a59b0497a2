"""Random programs in which ranks raise, stop or vanish, or their nodes are lost, at any point.

Each ends with the right results, or with an error that names these ranks, on every other rank.
"""

import random
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from drawn_calls import draw_call, run_calls
from hypothesis import example, given
from hypothesis import strategies as st
from network import NetworkModel
from search import searched
from simulated_watchdog import WatchedWorlds
from test_programs import SIZES, networks
from virtual_time import current

from mntrain.errors import RemoteRankError

LIMITS = {"warn_after": 10.0, "timeout": 30.0}
WAITED_FOR = re.compile(r" waited \d+ s (?:at the exit )?for (ranks? [^;\n]*)")
CUT_OFF = re.compile(r"error: rank \d+ has lost its connections to (ranks .*)")
UNHEARD = re.compile(
    r"error: rank \d+ has waited \d+ s, and (ranks .*) (?:do not answer|cannot be)"
)
LOST = re.compile(r"error: (ranks? .*) (?:is|are) lost: ")


@dataclass(frozen=True)
class Faulty:
    """Calls over the world and over its groups, and what happens to a rank, after how long.

    A rank that raises does so after so many of its calls, and others after `when` seconds.
    """

    seed: int
    hosts: tuple[int, ...]
    groups: tuple[str, ...]
    fault: str
    rank: int
    when: float
    network: NetworkModel

    def on_rank(self, world):
        rng = random.Random(self.seed)
        made = {"world": world.collectives}
        for number, name in enumerate(self.groups):
            if name not in made:
                made[name] = world.group_collectives(name)
            ranks = of_group(world, name)
            one = SimpleNamespace(
                rank=ranks.index(world.rank),
                size=len(ranks),
                collectives=made[name],
                compute=current().time.sleep,
            )
            if self.fault == "raises" and world.rank == self.odd and number == self.after:
                raise OSError("the disk is full")
            # Groups of unequal sizes draw their calls apart from each other.
            own = random.Random(rng.random() + len(ranks))
            run_calls(one, [draw_call(own, len(ranks), SIZES)], made[name])

    @property
    def odd(self):
        return self.rank % len(self.hosts)

    @property
    def after(self):
        return self.rank % len(self.groups)


def of_group(world, name):
    topology, rank = world.topology, world.rank
    if name == "world":
        return range(world.size)
    return topology.node_group(rank) if name == "node" else topology.cross_group(rank)


def ranks_in(text):
    """Return the ranks that a sentence names, such as in "ranks 0 on node0, 2 to 4 on node1"."""
    found = set()
    for first, last in re.findall(
        r"(\d+)(?: to (\d+))?(?=,| on| and|$)", re.sub(r"node\d+", "", text)
    ):
        found |= {*range(int(first), int(last or first) + 1)}
    return found


faulty = st.builds(
    Faulty,
    seed=st.integers(0, 1 << 32),
    hosts=st.lists(st.integers(0, 3), min_size=2, max_size=6).map(tuple),
    groups=st.lists(
        st.sampled_from(["world", "world", "node", "cross"]), min_size=1, max_size=5
    ).map(tuple),
    fault=st.sampled_from(["raises", "stops", "vanishes", "loses node"]),
    rank=st.integers(0, 11),
    when=st.floats(-6, -1.5).map(lambda power: 10**power),
    network=networks,
)


# A rank that fails before others have connected to it: they were not told.
FAILS_AT_ONCE = Faulty(0, (0, 0), ("world",), "raises", 0, 1.0, NetworkModel(eager_bytes=0))
# Both monitors are lost before another rank could reach them: it waited forever.
LOSES_MONITORS = Faulty(
    1, (0, 0, 1, 0, 2, 1), ("node", "world"), "loses node", 0, 1e-6, NetworkModel()
)


@pytest.mark.thorough
@searched(40)
@example(FAILS_AT_ONCE)
@example(LOSES_MONITORS)
@given(faulty)
def test_every_other_rank_ends_with_its_results_or_an_error_that_names_the_rank(program):
    worlds = WatchedWorlds(
        hosts=program.hosts,
        seed=program.seed,
        network=program.network,
        switches=0.1 * (program.seed % 4),
        options=LIMITS,
    )
    odd = {program.odd}
    if program.fault == "loses node":
        odd = {*worlds.topology.node_group(program.odd)}
    if program.fault != "raises":
        worlds.harm(program.fault, [program.odd, *odd - {program.odd}], program.when)
    ends = worlds.run_to_end(program.on_rank)
    others = [end for rank, end in enumerate(ends) if rank not in odd]
    said = [text for _, text in worlds.printed if text.startswith("error: ")]
    for end in others:
        if end.error is not None:
            assert isinstance(end.error, RemoteRankError), end.error
            assert program.fault == "raises"
            assert end.error.rank == program.odd
            assert "OSError: the disk is full" in str(end.error)
    if program.fault == "raises":
        assert isinstance(ends[program.odd].error, OSError)
        assert all(end.finished or end.error for end in others)
        assert not said
    elif not worlds.harmed or (others and all(end.code == 0 for end in others)):
        assert all(end.finished for end in ends)
        assert not said
    else:
        assert said or not others
        for text in said:
            found = (LOST.match(text), CUT_OFF.match(text), UNHEARD.match(text))
            named = ranks_in(next(filter(None, (*found, WAITED_FOR.search(text))))[1])
            assert named
            assert named <= odd, text


def test_no_rank_receives_more_than_4_kib_a_rank_of_the_job_at_the_start():
    """But for the measurement of a link, of which every other node receives a fixed number."""
    options = {"device": "cpu", "link": "100gbit,5us"}
    worlds = WatchedWorlds([2] * 3, seed=2, options=options, facts_of_hosts=True)
    at_start = {}

    def program(world):
        at_start[world.rank] = worlds.job.received[world.rank]

    ends = worlds.run_to_end(program)
    assert all(end.finished for end in ends)
    assert min(at_start.values()) > 500 * worlds.size  # of hosts, at least
    assert max(at_start.values()) <= 4096 * worlds.size
