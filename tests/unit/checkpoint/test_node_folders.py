"""Slices that are left, and the ranks that send them."""

from contextlib import contextmanager
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from mntrain.checkpoint.format import FILES, ChecksummedRange
from mntrain.checkpoint.node_folders import Held, NodeFolders, PlacedRange, assign_senders
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


def test_ranks_meet_between_rounds_of_what_they_send(tmp_path):
    events = []

    @contextmanager
    def agreement():
        yield
        events.append("met")

    def send(name, sizes, ranges, node, folder):
        events.extend((node, folder.name, place.start) for of in ranges.values() for place in of)
        return ""

    parts = [PlacedRange(FILES[0], ChecksummedRange(start, 1, 0)) for start in range(700)]
    topology = SimpleNamespace(nodes=[[0], [1], [2]], node=lambda rank: rank)
    folders = object.__new__(NodeFolders)
    folders._world = SimpleNamespace(rank=1, size=3, topology=topology, agreement=agreement)
    folders.own, folders.left, folders.leader = tmp_path / "own", [tmp_path / "left"], False
    folders.copies = SimpleNamespace(send=send)
    manifest = SimpleNamespace(checksums={name: [] for name in FILES})
    sends = [{1: range(100)}, {0: range(300), 2: range(300)}, {0: range(700)}]
    folders._send("step", manifest, parts, {0: 0}, sends)
    own = [(2, "left", 0), *((2, "own", n) for n in range(1, 300))]
    own += [(0, "left", 0), *((0, "own", n) for n in range(1, 300))]
    assert [event for event in events if event != "met"] == own  # each once
    rounds = " ".join(str(event) if event == "met" else "." for event in events).split("met")
    assert [one.count(".") for one in rounds] == [0, 170, 170, 170, 90, 0, 0, 0]  # of the longest
