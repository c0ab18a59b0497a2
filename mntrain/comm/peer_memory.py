"""The private memory of a node's other ranks, from and to which the kernel copies.

A tensor that a script brings lies in the memory of its process alone. Where the kernel allows it,
one copy takes a part of it to this rank, or writes to it: half of what a message within the node
takes. Linux lets a process do so with those of the same user; where Yama restricts it to children
(`ptrace_scope` 1, as on Ubuntu), each rank allows it to what its launcher has started.

Sources: process_vm_readv(2); PR_SET_PTRACER(2const); Jin et al., "LiMIC: Support for
High-Performance MPI Intra-Node Communication on Linux Cluster", ICPP 2005.
"""

import ctypes
import errno
import os
import secrets
import time

import numpy as np
import torch
from torch import Tensor

from mntrain.comm.mpi import Communicator

ENDED_S = 5.0  # that a rank waits for the end that its launcher gives it
_TOKEN_BYTES = 16
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
_read = getattr(_libc, "process_vm_readv", None)
_write = getattr(_libc, "process_vm_writev", None)
for _function in filter(None, (_read, _write)):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = [
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_ulong) * 2,
        ctypes.c_ulong,
    ]


class PeerTensor:
    """A flat tensor in the private memory of another process of this node.

    Calls raise OSError if the process has ended, after some seconds: a launcher ends the other
    ranks before, and names the one that ended first.
    """

    def __init__(self, pid: int, address: int, numel: int, dtype: torch.dtype) -> None:
        self._pid, self._address, self._numel, self._dtype = pid, address, numel, dtype

    def __len__(self) -> int:
        """Return the number of elements."""
        return self._numel

    def __getitem__(self, span: slice) -> "PeerTensor":
        """Return a part of the tensor."""
        low, high, _ = span.indices(self._numel)
        address = self._address + low * self._dtype.itemsize
        return PeerTensor(self._pid, address, max(0, high - low), self._dtype)

    def split(self, length: int) -> "list[PeerTensor]":
        """Return parts of a length, the last of which may be shorter, as `Tensor.split` does."""
        return [self[low : low + length] for low in range(0, max(1, self._numel), length)]

    def copy_(self, source: Tensor) -> None:
        """Overwrite the tensor with one of this process, of the same length and dtype."""
        self._transfer(_write, source)

    def read(self, target: Tensor) -> Tensor:
        """Overwrite a tensor of this process with this one, and return it."""
        self._transfer(_read, target)
        return target

    def _transfer(self, function: "ctypes._NamedFuncPointer | None", own: Tensor) -> None:
        assert function is not None
        assert own.is_contiguous()
        assert (len(own), own.dtype) == (self._numel, self._dtype)
        _copy(function, self._pid, own.data_ptr(), self._address, own.nbytes)


def _copy(
    function: "ctypes._NamedFuncPointer", pid: int, here: int, there: int, nbytes: int
) -> None:
    """Let the kernel copy between two addresses, of this process and of another one."""
    done = 0
    while done < nbytes:  # the kernel copies at most 2 GiB at a time
        vectors = (ctypes.c_size_t * 4)(here + done, nbytes - done, there + done, nbytes - done)
        start = ctypes.addressof(vectors)
        copied = function(pid, start, 1, start + 2 * ctypes.sizeof(ctypes.c_size_t), 1, 0)
        if copied <= 0:
            number = ctypes.get_errno()
            if number == errno.ESRCH:
                time.sleep(ENDED_S)
            text = f"process {pid} of this node, which runs a rank: {os.strerror(number)}"
            raise OSError(number, text)
        done += copied


def reached(node: Communicator) -> list[int]:
    """Return the processes of a node's ranks, by local rank, if all reach each other's memory.

    Else an empty list, and on a node of one rank. Collective over the node group.
    """
    if node.size == 1:
        return []
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)  # an error without Yama
    token = np.frombuffer(bytearray(secrets.token_bytes(_TOKEN_BYTES)), np.uint8)
    offers = node.gather((os.getpid(), token.ctypes.data, token.tobytes()))
    reach_all = all(_reaches(*offer) for offer in offers)
    return [pid for pid, _, _ in offers] if all(node.gather(reach_all)) else []


def _reaches(pid: int, address: int, token: bytes) -> bool:
    """Return whether a process has these bytes at this address, and can be read and written.

    They are written again as they are. A sandbox may refuse one of both alone.
    """
    if _read is None or _write is None:
        return False
    there = PeerTensor(pid, address, _TOKEN_BYTES, torch.uint8)
    found = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8, device="cpu")
    try:
        if bytes(there.read(found).numpy()) != token:
            return False
        there.copy_(found)
    except OSError:
        return False
    return True
