"""Copies from and to the memory of another process."""

import errno
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


@pytest.mark.thorough
def test_memory_of_another_process_is_read_and_written_while_it_lives(monkeypatch):
    words = [sys.executable, "-c", OTHER, str(os.getpid())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    numbers = torch.zeros(1000, dtype=torch.int32)
    with subprocess.Popen(words, text=True, **pipes) as process:
        try:
            peer = PeerTensor(process.pid, int(process.stdout.readline()), 1000, torch.int32)
            try:
                assert peer.read(numbers).tolist() == list(range(1000))
            except PermissionError:
                pytest.skip("the kernel lets no process copy from another's memory")
            check_parts(peer, numbers)
            process.stdin.write("\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) == 990 * 989 // 2  # it sees what was written
            with monkeypatch.context() as patch:
                patch.setattr(peer_memory, "_read", divided)
                assert peer.read(numbers.zero_())[:990].tolist() == list(range(990))
            # Other bytes than those offered are out of reach.
            there = bytes(torch.arange(4, dtype=torch.int32).numpy())
            assert peer_memory._reaches(process.pid, peer._address, there)
            assert not peer_memory._reaches(process.pid, peer._address + 4, there)
            for refused in ("_read", "_write"):  # by a sandbox, which may let the other pass
                for way in (None, refuse):
                    with monkeypatch.context() as patch:
                        patch.setattr(peer_memory, refused, way)
                        assert not peer_memory._reaches(process.pid, peer._address, there)
        finally:
            process.kill()
        process.wait()
        monkeypatch.setattr(peer_memory, "ENDED_S", 0.0)
        with pytest.raises(OSError, match=f"process {process.pid} of this node, which runs a rank"):
            peer.read(numbers)
        assert not peer_memory._reaches(process.pid, peer._address, there)


def refuse(*_):
    peer_memory.ctypes.set_errno(errno.EPERM)
    return -1


def check_parts(peer, numbers):
    """Read parts, and overwrite the last ten numbers with zeros."""
    part = peer[990:1200]
    assert (len(peer), len(part)) == (1000, 10)
    assert part[2:4].read(numbers[:2]).tolist() == [992, 993]
    assert [len(each) for each in peer.split(300)] == [300, 300, 300, 100]
    assert peer.split(300)[3].read(numbers[:100])[0] == 900
    part.copy_(torch.zeros(10, dtype=torch.int32))
    assert [len(each) for each in peer[5:5].split(300)] == [0]  # as of a tensor
    peer[5:5].copy_(torch.zeros(0, dtype=torch.int32))


def divided(pid, *rest, original=peer_memory._read):
    """Copy 100 bytes at most, as the kernel does 2 GiB."""
    for vector in (rest[0], rest[2]):
        length = peer_memory.ctypes.c_size_t.from_address(vector + 8)
        length.value = min(length.value, 100)
    return original(pid, *rest)
