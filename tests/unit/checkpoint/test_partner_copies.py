"""The partners of nodes, and copies that fail on their way, of a node that is its own partner."""

import errno
import socket
import threading
import time
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.checkpoint import partner_copies
from mntrain.checkpoint.format import FILES, ChecksummedRange
from mntrain.checkpoint.partner_copies import PartnerCopies, partner_nodes

NBYTES = 32 << 20  # more than sockets keep


@pytest.fixture
def copies(tmp_path):
    world = SimpleNamespace(
        rank=0,
        hosts=["a", "b"],
        topology=SimpleNamespace(nodes=[[0], [1]], node=lambda rank: rank),
        settings=SimpleNamespace(port_range=None),
        gather=lambda value: [value, value],
        agreement=nullcontext,
    )
    made = PartnerCopies(world, tmp_path)
    yield made
    made.close()


def sent(copies, folder):
    """Return what the sending of a large file returns, within a time."""
    (folder / "step").mkdir()
    for name in FILES:
        (folder / "step" / name).write_bytes(bytes(NBYTES))
    ranges = {name: [] for name in FILES}
    ranges[FILES[0]] = [ChecksummedRange(0, NBYTES, zlib.crc32(bytes(NBYTES)))]
    said, sizes = [], dict.fromkeys(FILES, NBYTES)
    thread = threading.Thread(
        target=lambda: said.append(copies.send(Path("step"), sizes, ranges)), daemon=True
    )
    thread.start()
    thread.join(60)
    assert said, "it still waits"
    return said[0]


def test_a_partner_without_room_says_so_to_a_sender_that_is_still_sending(
    copies, tmp_path, monkeypatch
):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(partner_copies, "write_at", full)
    said = "the other node cannot write: [Errno 28] No space left on device"
    assert sent(copies, tmp_path) == said


@pytest.mark.thorough
def test_a_partner_that_never_greets_is_given_up(copies, tmp_path, monkeypatch):
    monkeypatch.setattr(partner_copies, "_GREETING_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        copies._addresses = [silent.getsockname()] * 2
        assert sent(copies, tmp_path) == "the other node does not answer"


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12))
def test_partners_are_in_other_racks_unless_one_has_more_than_half_of_the_nodes(racks):
    partners = partner_nodes(racks)
    assert sorted(partners) == list(range(len(racks)))
    assert all(partner != node for node, partner in enumerate(partners))
    if max(map(racks.count, racks)) <= len(racks) // 2:
        assert all(racks[partner] != racks[node] for node, partner in enumerate(partners))


@pytest.mark.parametrize(
    ("addresses", "partners"),
    [
        # Two racks of unequal sizes, one rack, one node a rack, nodes that are not told.
        (["s.r1.n1", "s.r1.n2", "s.r1.n3", "s.r2.n4", "s.r2.n5", "s.r2.n6"], [3, 4, 5, 0, 1, 2]),
        (["s.r1.n1", "s.r2.n2", "s.r1.n3", "s.r2.n4", "s.r1.n5"], [4, 0, 1, 2, 3]),
        (["s.r1.n1", "s.r1.n2", "s.r1.n3", "s.r1.n4"], [2, 3, 0, 1]),
        (["s.r1.n1", "s.r2.n2", "s.r3.n3"], [1, 2, 0]),
        (["s.r1.n1", None, "s.r1.n3", None], [1, 0, 3, 2]),
        ([None, None, None, None], [2, 3, 0, 1]),
        (["n1", "n2", "n3", "n4"], [2, 3, 0, 1]),  # of a cluster without switches
    ],
)
def test_partners_are_chosen_by_the_racks_that_slurm_tells_of_the_nodes(
    monkeypatch, addresses, partners
):
    racks = []
    for address in addresses:
        monkeypatch.delenv("SLURM_TOPOLOGY_ADDR", raising=False)
        if address:
            monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", address)
        racks.append(partner_copies._rack())
    assert partner_nodes(racks) == partners


@pytest.mark.thorough
@pytest.mark.parametrize(("pieces", "seconds"), [(1, 1000.0), (4, 1.0)])
def test_nobody_waits_after_the_last_piece_of_a_copy(
    copies, tmp_path, monkeypatch, pieces, seconds
):
    monkeypatch.setattr(partner_copies, "_PIECE_BYTES", NBYTES // pieces)
    copies.until = (start := time.monotonic()) + seconds
    assert sent(copies, tmp_path) == ""
    assert time.monotonic() - start >= 0.7 * seconds * (pieces > 1)
