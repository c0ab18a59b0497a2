"""Slices that are left, and the ranks that send them."""

from hypothesis import given
from hypothesis import strategies as st

from mntrain.checkpoint.format import FILES, ChecksummedRange
from mntrain.checkpoint.node_folders import Held, PlacedRange, assign_senders
from mntrain.checkpoint.partner_copies import partner_nodes


@st.composite
def inventories(draw):
    """Nodes of ranks, the ranges of a step by the rank that wrote them, and the lost nodes."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    ranks = iter(range(sum(sizes)))
    nodes = [[next(ranks) for _ in range(size)] for size in sizes]
    writers = draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=20))
    lost = draw(st.sets(st.integers(0, len(nodes) - 1)))
    return nodes, writers, lost


@given(inventories(), st.lists(st.sampled_from(["", "a", "b"]), min_size=6, max_size=6))
def test_a_step_is_whole_if_and_only_if_no_partners_are_lost_that_wrote_it(inventory, racks):
    nodes, writers, lost = inventory
    partners = partner_nodes(racks[: len(nodes)])
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    per_file = -(-len(writers) // 2)
    parts = [
        PlacedRange(FILES[number // per_file], ChecksummedRange(number % per_file * 9, 9, 0))
        for number in range(len(writers))
    ]
    # Each node looks through its own folder by turns of its ranks.
    held = [Held(frozenset(), {}) for _ in node_of]
    for number, node in enumerate(nodes):
        on_node = [
            part
            for part, writer in enumerate(writers)
            if number not in lost and number in (node_of[writer], partners[node_of[writer]])
        ]
        for turn, rank in enumerate(node):
            own = frozenset(part for part in on_node if part % len(node) == turn)
            held[rank] = Held(own, {})
    lacking, sends = assign_senders(parts, held, nodes)
    gone = [
        part
        for part, writer in enumerate(writers)
        if {node_of[writer], partners[node_of[writer]]} <= lost
    ]
    assert lacking == gone
    given = [(number, node) for of in sends for node, some in of.items() for number in some]
    has = [set().union(*(held[rank].own for rank in node)) for node in nodes]
    for number in range(len(parts)):
        readers = [node for node, own in enumerate(has) if number not in own]
        expected = [] if number in gone else readers
        assert sorted(node for part, node in given if part == number) == expected  # each once
    for rank, of in enumerate(sends):
        assert held[rank].own.issuperset(number for some in of.values() for number in some)
