"""Copies that fail on their way, of a node that is its own partner."""

import errno
import socket
import threading
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mntrain.checkpoint import partner_copies
from mntrain.checkpoint.format import FILES, ChecksummedRange
from mntrain.checkpoint.partner_copies import PartnerCopies

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
    made = PartnerCopies(world, SimpleNamespace(own=tmp_path, leader=True))
    yield made
    made.close()


def sent(copies, folder):
    """What the sending of a large file returns, within a time."""
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
    said = "the partner cannot write: [Errno 28] No space left on device"
    assert sent(copies, tmp_path) == said


def test_a_partner_that_never_greets_is_given_up(copies, tmp_path, monkeypatch):
    monkeypatch.setattr(partner_copies, "_GREETING_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        copies._address = silent.getsockname()
        assert sent(copies, tmp_path) == "the partner does not answer"
