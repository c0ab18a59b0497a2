"""Slices that are left, the ranks that send them, and the nodes that keep copies."""

import os
import tempfile
import zlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mntrain.checkpoint.format import FILES, ChecksummedRange, Manifest
from mntrain.checkpoint.node_folders import Held, PlacedRange, _sound, assign_senders, keep_parts
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
    lacking, messages = assign_senders(parts, held, nodes)
    gone = [
        part
        for part, writer in enumerate(writers)
        if {node_of[writer], partners[node_of[writer]]} <= lost
    ]
    assert lacking == gone
    sent = [number for message in messages for number in message.numbers]
    assert len(sent) == len(set(sent))  # each once
    on = {number: [held[rank].own for rank in node] for number, node in enumerate(nodes)}
    for message in messages:
        files = {parts[number].file for number in message.numbers}
        assert len(files) == 1
        low, high = message.numbers[0], message.numbers[-1]
        assert message.numbers == list(range(low, high + 1))
        for number in message.numbers:
            assert number in held[message.root].own
            assert message.readers == {n for n in on if not any(number in own for own in on[n])}
    for number in range(len(parts)):
        everywhere = all(any(number in own for own in on[node]) for node in on)
        assert (number in sent) == (not everywhere and number not in gone)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30), st.integers(1, 6))
def test_nodes_keep_equal_parts_of_a_whole_step_each_also_on_its_partner(lengths, count):
    partners = partner_nodes([""] * count)
    checksums = {name: [] for name in FILES}
    for number, length in enumerate(lengths):
        places = checksums[FILES[number % len(FILES)]]
        start = sum(place.length for place in places)
        data = bytes([number + 1]) * length
        places.append(ChecksummedRange(start, length, zlib.crc32(data)))
    content = {
        name: b"".join(
            bytes([1 + number]) * lengths[number]
            for number in range(FILES.index(name), len(lengths), len(FILES))
        )
        for name in FILES
    }
    manifest = Manifest(1, {}, 0, 0, None, checksums=checksums)
    held = []
    for node in range(count):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, data in content.items():
                (folder / file).write_bytes(data)
            kept = {node, *(n for n in range(count) if partners[n] == node)}
            keep_parts(folder, manifest, kept, count)
            assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
            found = {file: (folder / file).read_bytes() for file in FILES}
        held.append(set())
        for file, places in checksums.items():
            assert len(found[file]) == len(content[file])
            for place in places:
                data = found[file][place.start :][: place.length]
                if zlib.crc32(data) == place.checksum:
                    held[-1].add((file, place.start))
                else:
                    assert not any(data)  # a hole
        kept_bytes = sum(len(data) - data.count(0) for data in found.values())
        assert kept_bytes <= len(kept) * (sum(lengths) / count + max(lengths))
    everything = {(file, place.start) for file, places in checksums.items() for place in places}
    for lost in range(count):
        if count > 1:
            assert set().union(*(held[n] for n in range(count) if n != lost)) == everything
        else:
            assert held[lost] == everything


def test_a_range_of_zeros_is_there_if_its_file_has_a_hole_in_its_place(tmp_path):
    zeros, other = (zlib.crc32(data) for data in (bytes(5000), b"\1" * 5000))
    parts = [
        PlacedRange(FILES[0], ChecksummedRange(start, 5000, checksum))
        for start, checksum in ((0, zeros), (5000, other), (10000, zeros), (15000, zeros))
    ]
    (tmp_path / FILES[0]).touch()
    os.truncate(tmp_path / FILES[0], 15000)
    assert list(_sound(tmp_path, parts, range(4))) == [0, 2]  # the file ends before the last
    with (tmp_path / FILES[0]).open("r+b") as file:
        file.write(b"\1" * 10000)
    assert list(_sound(tmp_path, parts, range(4))) == [1, 2]


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12))
def test_partners_are_in_other_racks_unless_one_has_more_than_half_of_the_nodes(racks):
    partners = partner_nodes(racks)
    assert sorted(partners) == list(range(len(racks)))
    assert all(partner != node for node, partner in enumerate(partners))
    if max(map(racks.count, racks)) <= len(racks) // 2:
        assert all(racks[partner] != racks[node] for node, partner in enumerate(partners))


def test_partners_are_half_the_job_away_where_racks_are_unknown():
    assert partner_nodes([""] * 4) == [2, 3, 0, 1]
    assert partner_nodes([""] * 5) == [2, 3, 4, 0, 1]
