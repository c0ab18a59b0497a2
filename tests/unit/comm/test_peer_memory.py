"""Copies from and to the memory of another process."""

import os
import subprocess
import sys

import pytest
import torch

from mntrain.comm import peer_memory
from mntrain.comm.peer_memory import PeerTensor

# A process with 1,000 numbers, whose address it prints; it prints their sum for each line of input.
OTHER = """
import sys, torch
from mntrain.comm import peer_memory
peer_memory._libc.prctl(peer_memory._PR_SET_PTRACER, int(sys.argv[1]), 0, 0, 0)
numbers = torch.arange(1000, dtype=torch.int32)
print(numbers.data_ptr(), flush=True)
for line in sys.stdin:
    print(int(numbers.sum()), flush=True)
"""


@pytest.fixture
def other():
    words = [sys.executable, "-c", OTHER, str(os.getpid())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:
        address = int(process.stdout.readline())
        peer = PeerTensor(process.pid, address, 1000, torch.int32)
        try:
            peer.read(torch.zeros(1000, dtype=torch.int32))
        except PermissionError:
            process.kill()
            pytest.skip("the kernel lets no process copy from another's memory")
        yield process, peer
        process.kill()


def total(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_parts_are_read_and_written_where_they_lie(other):
    process, peer = other
    assert len(peer) == 1000
    assert peer.read(torch.zeros(1000, dtype=torch.int32)).tolist() == list(range(1000))
    part = peer[990:1200]
    assert len(part) == 10
    assert part[2:4].read(torch.zeros(2, dtype=torch.int32)).tolist() == [992, 993]
    lengths = [len(each) for each in peer.split(300)]
    assert lengths == [300, 300, 300, 100]
    assert peer.split(300)[3].read(torch.zeros(100, dtype=torch.int32))[0] == 900
    part.copy_(torch.zeros(10, dtype=torch.int32))
    assert [len(each) for each in peer[5:5].split(300)] == [0]  # as of a tensor
    peer[5:5].copy_(torch.zeros(0, dtype=torch.int32))
    assert total(process) == 990 * 989 // 2


def test_a_long_copy_that_the_kernel_divides_is_whole(other, monkeypatch):
    _, peer = other

    def divided(pid, *rest):
        """Copy 100 bytes at most, as the kernel does 2 GiB."""
        for vector in (rest[0], rest[2]):
            length = peer_memory.ctypes.c_size_t.from_address(vector + 8)
            length.value = min(length.value, 100)
        return original(pid, *rest)

    original = peer_memory._read
    monkeypatch.setattr(peer_memory, "_read", divided)
    assert peer.read(torch.zeros(1000, dtype=torch.int32)).tolist() == list(range(1000))


def test_a_process_that_has_ended_is_an_error(other, monkeypatch):
    process, peer = other
    monkeypatch.setattr(peer_memory, "ENDED_S", 0.0)
    process.kill()
    process.wait()
    with pytest.raises(OSError, match=f"process {process.pid} of this node, which runs a rank"):
        peer.read(torch.zeros(1000, dtype=torch.int32))
    assert not peer_memory._reaches(process.pid, 0, b"0" * 16)


def test_other_bytes_than_those_offered_are_out_of_reach(other):
    process, peer = other
    address, there = peer._address, bytes(torch.arange(4, dtype=torch.int32).numpy())
    assert peer_memory._reaches(process.pid, address, there)
    assert not peer_memory._reaches(process.pid, address + 4, there)
