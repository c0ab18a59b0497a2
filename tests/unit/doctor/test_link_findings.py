"""The judgement of measured links."""

from mntrain.comm.links import LinkSpeed
from mntrain.doctor.link_findings import BETWEEN, WITHIN, judge, slowest_node

HOSTS = ["n1", "n1", "n2", "n3"]


def links(*speeds):
    pairs = [(0, 2), (0, 3), (2, 3)]
    return [LinkSpeed(*pair, 50.0, speed) for pair, speed in zip(pairs, speeds, strict=False)]


def test_one_slow_node_is_named_with_the_slowest_pair():
    found = judge(links(1000.0, 90.0, 100.0), HOSTS, BETWEEN)
    assert found.status == "warn"
    assert "the slowest of 3 pairs between nodes is n1 and n3: 50 us, 90 MB/s" in found.text
    assert "the slowest node is n3; the fastest pair is n1 and n2: 50 us, 1000 MB/s" in found.text
    assert "srun --exclude=n3" in found.fix
    assert slowest_node(links(1000.0, 90.0, 100.0)) == 3


def test_links_that_are_alike_pass():
    assert judge(links(100.0, 90.0, 80.0), HOSTS, BETWEEN).status == "pass"


def test_of_two_nodes_none_is_slower():
    found = judge(links(1.0), HOSTS, BETWEEN)
    assert found.status == "pass"
    assert "slowest node" not in found.text
    assert slowest_node(links(1.0)) is None


def test_ranks_of_a_node_are_named_by_number():
    found = judge([LinkSpeed(0, 1, 5.0, 900.0)], HOSTS, WITHIN)
    assert found.text == "the slowest of 1 pair within nodes is n1 (ranks 0 and 1): 5 us, 900 MB/s"


def test_no_pairs_pass():
    assert judge([], HOSTS, WITHIN).status == "pass"
