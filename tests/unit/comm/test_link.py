"""The link between nodes, the lengths of chunks that follow from it, and its measurement."""

import pytest
from network import Link as SimulatedLink
from network import NetworkModel
from simulated_ranks import SimulatedRanks

from mntrain.comm.algorithms import load
from mntrain.comm.chunk_plan import AT_ONCE_BYTES
from mntrain.comm.link import Link
from mntrain.comm.links import measure_link
from mntrain.comm.ticket import AlgorithmChoice
from mntrain.comm.topology import Topology

KIB, MIB = 1 << 10, 1 << 20
SLOW, MIDDLE, FAST = map(Link.of, ("1gbit,50us", "100gbit,5us", "400gbit,2us"))


def lengths_of(nodes, link, nbytes=25 * MIB, per_node=1, narrowed=1, **choice):
    """Return the lengths of the chunks of one of these nodes."""
    ranks = iter(range(nodes * per_node))
    topology = Topology(tuple(tuple(next(ranks) for _ in range(per_node)) for _ in range(nodes)))
    plan = load("lanes").plan(topology, 0)
    return plan.lengths(nbytes, AlgorithmChoice("lanes", link=link, **choice), narrowed)


def test_words_are_a_rate_and_a_latency():
    for text, latency_s, bytes_per_s in [
        ("100gbit,5us", 5e-6, 12.5e9),
        ("250mbit,0.5ms", 0.5e-3, 31.25e6),
        ("0.1Gbit,2ms", 2e-3, 12.5e6),
    ]:
        found = Link.of(text)
        assert found.latency_s == pytest.approx(latency_s)
        assert found.bytes_per_s == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "100gbit", "5us,100gbit", "100gbit,5", "0gbit,5us", "1gbit,0us", "-1gbit,5us"]
)
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="must be a rate and a latency, such as 100gbit,5us"):
        Link.of(text)


@pytest.mark.parametrize(
    ("nodes", "link", "most", "least"),
    [
        (2, SLOW, MIB, 0),
        (3, SLOW, 192 * KIB, 0),
        (64, SLOW, 256 * KIB, 0),
        (2, MIDDLE, MIB, 0),
        (4, MIDDLE, 256 * KIB, 128 * KIB),
        (16, MIDDLE, 256 * KIB, 256 * KIB),
        (31, MIDDLE, 31 * 64 * KIB, MIB),
        (2, FAST, MIB, 0),
        (4, FAST, 256 * KIB, 256 * KIB),
        (16, FAST, MIB, 512 * KIB),
        (1024, FAST, 2 * MIB, MIB),
        # Where a message takes 20 us of two CPUs, as in Python.
        (2, Link(45e-6, 12.5e9), MIB, 256 * KIB),
        (4, Link(42e-6, 50e9), 4 * MIB, 4 * MIB),
    ],
)
def test_the_lengths_of_chunks_of_25_mib_suit_the_link(nodes, link, most, least):
    found = lengths_of(nodes, link)
    assert (found.most, found.link_least) == (most, least)
    assert 2 <= found.in_flight <= 64


def test_lanes_share_a_link():
    assert lengths_of(4, FAST, per_node=4).link_least == 0
    assert lengths_of(16, FAST, per_node=4).link_least == 128 * KIB


def test_without_a_link_a_long_lane_alone_has_longer_chunks():
    assert lengths_of(4, None).most == MIB
    assert lengths_of(4, None, nbytes=20 * MIB).most == 512 * KIB
    assert lengths_of(4, None, per_node=2).most == 512 * KIB
    assert lengths_of(4, None, concurrent=True).most == 512 * KIB
    assert lengths_of(1, FAST).link_least == 0


def test_messages_between_several_nodes_are_short_enough_to_be_sent_at_once():
    for nodes, parts in ((3, 3), (4, 4), (16, 4), (7, 7)):
        assert lengths_of(nodes, SLOW).at_once
        assert lengths_of(nodes, SLOW).most == parts * AT_ONCE_BYTES
        assert lengths_of(nodes, SLOW, narrowed=2).most == min(2 * parts * AT_ONCE_BYTES, MIB)
    assert not lengths_of(2, SLOW).at_once


def test_with_other_tensors_in_flight_messages_are_sent_at_once_on_a_fast_link_alone():
    assert not lengths_of(4, SLOW, concurrent=True).at_once
    assert lengths_of(4, FAST, per_node=4, concurrent=True).most == 4 * AT_ONCE_BYTES


def test_a_little_noise_rarely_changes_lengths():
    noisy = [Link(MIDDLE.latency_s * by, MIDDLE.bytes_per_s) for by in (0.8, 0.95, 1.05, 1.3)]
    assert {lengths_of(4, link) for link in noisy} == {lengths_of(4, MIDDLE)}


@pytest.mark.parametrize("nodes", [[1, 1], [2, 1, 2], [1] * 5])
@pytest.mark.parametrize("link", [SLOW, MIDDLE, FAST])
def test_it_is_measured_alike_on_all_ranks(nodes, link):
    between = SimulatedLink(link.latency_s, link.bytes_per_s)
    ranks = SimulatedRanks(nodes, network=NetworkModel(between=between))

    def program(rank):
        begun_s = rank.ranks.time.local_now()
        measure = lambda: measure_link(rank.comm, rank.topology)  # noqa: E731 - for the engine
        return rank.engine.call(measure).wait(), rank.ranks.time.local_now() - begun_s

    found, seconds = zip(*ranks.run(program), strict=True)
    assert len(set(found)) == 1
    assert found[0].latency_s == pytest.approx(link.latency_s, rel=0.5)
    assert found[0].bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.5)
    assert max(seconds) < 0.1
    assert not ranks.job.unreceived()


def test_one_node_has_no_link():
    ranks = SimulatedRanks([3])
    assert ranks.run(lambda rank: measure_link(rank.comm, rank.topology)) == [None] * 3
