from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.comm.links import matchings
from mntrain.comm.topology import Topology

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)
TOPOLOGIES = st.builds(
    Topology.from_hosts, HOSTS, st.one_of(st.none(), st.integers(min_value=1, max_value=5))
)


@pytest.mark.parametrize(
    ("hosts", "ranks_per_node", "nodes", "words"),
    [
        ("aabb", None, ((0, 1), (2, 3)), "4 ranks on 2 nodes of 2"),
        ("aaab", None, ((0, 1, 2), (3,)), "4 ranks on 2 nodes of 3+1"),
        ("ababab", None, ((0, 2, 4), (1, 3, 5)), "6 ranks on 2 nodes of 3"),
        ("baab", None, ((0, 3), (1, 2)), "4 ranks on 2 nodes of 2"),
        ("a", None, ((0,),), "1 rank on 1 node of 1"),
        ("aaaaa", 2, ((0, 1), (2, 3), (4,)), "5 ranks on 3 nodes of 2+2+1"),
        ("aaaa", 1, ((0,), (1,), (2,), (3,)), "4 ranks on 4 nodes of 1"),
        ("aaaa", 7, ((0, 1, 2, 3),), "4 ranks on 1 node of 4"),
        ("aaabb", 2, ((0, 1), (2,), (3, 4)), "5 ranks on 3 nodes of 2+1+2"),
        ("ababab", 2, ((0, 2), (1, 3), (4,), (5,)), "6 ranks on 4 nodes of 2+2+1+1"),
    ],
    ids=str,
)
def test_hosts_become_nodes_that_say_what_they_are(hosts, ranks_per_node, nodes, words):
    topology = Topology.from_hosts(hosts, ranks_per_node)
    assert (topology.nodes, str(topology)) == (nodes, words)


@given(TOPOLOGIES)
def test_a_cross_group_has_one_rank_of_each_node_that_is_large_enough(topology):
    for rank in range(topology.size):
        group = topology.cross_group(rank)
        local = topology.local_rank(rank)
        assert rank in group
        assert {topology.local_rank(member) for member in group} == {local}
        nodes = [topology.node(member) for member in group]
        assert nodes == [i for i, node in enumerate(topology.nodes) if len(node) > local]


def test_the_documented_slots_and_groups():
    topology = Topology.from_hosts("aabb")
    assert topology.owners == (0, 2, 1, 3)
    assert topology.slots == (0, 2, 1, 3)
    assert Topology.from_hosts("aaaaabb").owners == (0, 2, 4, 5, 1, 3, 6)
    unequal = Topology.from_hosts("aaabbc")
    assert [unequal.cross_group(rank) for rank in (0, 4, 2)] == [(0, 3, 5), (1, 4), (2,)]


@given(TOPOLOGIES)
def test_slots_order_the_ranks_by_lane_then_by_node_then_by_local_rank(topology):
    ranks, lanes = range(topology.size), topology.smallest_node
    assert sorted(topology.owners) == sorted(topology.slots) == list(ranks)
    assert [topology.slots[topology.owners[slot]] for slot in ranks] == list(ranks)
    keys = [
        (topology.local_rank(rank) % lanes, topology.node(rank), topology.local_rank(rank))
        for rank in topology.owners
    ]
    assert keys == sorted(keys)
    for rank in ranks:
        lane, slot = topology.local_rank(rank) % lanes, topology.slots[rank]
        assert topology.lane_slots[lane] <= slot < topology.lane_slots[lane + 1]
    assert topology.lane_slots[-1] == topology.size


@pytest.mark.parametrize("count", range(9))
def test_matchings_have_each_pair_once_and_no_member_twice(count):
    found = list(matchings(range(count)))
    pairs = [tuple(sorted(pair)) for pairs in found for pair in pairs]
    assert sorted(pairs) == list(combinations(range(count), 2))
    assert len(found) <= max(count, 0)
    for together in found:
        members = [member for pair in together for member in pair]
        assert len(members) == len(set(members))
