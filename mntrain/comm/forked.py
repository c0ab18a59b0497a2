"""Forked children of a rank, such as data-loader workers: private memory, and no part in MPI.

A child inherits the memory that the ranks of a node share, and what it wrote there would change its
parent's parameters and gradients. Therefore:

    before a fork    the parent takes a snapshot of its part of the shared memory
    in the child     the snapshot takes the place of that part, at the same addresses

So a child has the values of the time of the fork and changes only its own, as in ordinary memory.
Successive children share one snapshot, until the parent's memory changes. A private mapping of the
parent's file would need no copy, but show the child what the parent writes after the fork.

A child also inherits what extension modules have registered for the end of the interpreter, such as
mpi4py the end of MPI, which would wait for the other ranks over its parent's connections.

Sources: fork(2), mremap(2), dladdr(3); `call_ll_exitfuncs` in CPython's Python/pylifecycle.c.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Of Linux; the interpreter's mmap has neither these flags nor mappings at a given address.
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MAP_FIXED = 1, 2, 16
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)


def call_in_child(method: Callable[[], object]) -> None:
    """Call a bound method in every later forked child, for as long as its object lives. Local."""
    weak = WeakMethod(method)

    def call() -> None:
        if (alive := weak()) is not None:
            alive()

    os.register_at_fork(after_in_child=call)


@dataclass
class _SharedPart:
    """A rank's own part of a segment of shared memory."""

    storage: StorageWeakRef
    address: int  # of a page
    nbytes: int
    snapshot: int = 0  # address of a private mapping of the same length; 0: there is none


class PrivateCopies:
    """Replaces parts of shared memory by private copies in forked children. Local; Linux only.

    The interpreter keeps it until the process ends, since tensors may outlive their world.
    """

    def __init__(self) -> None:
        self._parts: list[_SharedPart] = []
        self._storages: list[Any] = []  # of the parts, alive while a fork is in progress
        self._lock = threading.Lock()  # held during a fork
        os.register_at_fork(
            before=self._take_snapshots,
            after_in_parent=self._end_fork,
            after_in_child=self._use_snapshots,
        )

    def add(self, tensor: Tensor) -> None:
        """Give later children a copy of the whole storage of a tensor, which begins at a page."""
        storage = tensor.untyped_storage()
        part = _SharedPart(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())
        with self._lock:
            self._parts.append(part)

    def _take_snapshots(self) -> None:
        self._lock.acquire()
        alive = []
        for part in self._parts:
            storage = torch.UntypedStorage._new_with_weak_ptr(part.storage.cdata)
            if storage is None:
                _unmap(part.snapshot, part.nbytes)
                continue
            alive.append(part)
            self._storages.append(storage)
            part.snapshot = part.snapshot or _map(part.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            if part.snapshot:
                _update(part.snapshot, part.address, part.nbytes)
        self._parts = alive

    def _end_fork(self) -> None:
        self._storages.clear()
        self._lock.release()

    def _use_snapshots(self) -> None:
        for part in self._parts:
            if not (part.snapshot and _move(part.snapshot, part.address, part.nbytes)):
                # Without memory for a copy, the child ends when it uses the tensor.
                _map(part.nbytes, _NO_ACCESS, at=part.address)
        self._parts.clear()
        self._end_fork()


def _map(nbytes: int, protection: int, at: int = 0) -> int:
    """Map private memory, at a new address or in place of what is `at`; return 0 if it fails."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_FIXED if at else 0)
    _libc.mmap.restype = ctypes.c_void_p
    address = _libc.mmap(
        ctypes.c_void_p(at), ctypes.c_size_t(nbytes), protection, flags, -1, ctypes.c_long(0)
    )
    return 0 if address == ctypes.c_void_p(-1).value else int(address)


def _unmap(address: int, nbytes: int) -> None:
    if address:
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _move(source: int, target: int, nbytes: int) -> bool:
    """Move a mapping in place of another one; return whether it succeeded."""
    _libc.mremap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(nbytes)
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    moved = _libc.mremap(ctypes.c_void_p(source), size, size, flags, ctypes.c_void_p(target))
    return bool(moved == target)


def _update(target: int, source: int, nbytes: int) -> None:
    """Copy memory, unless it is equal: children keep on sharing what is not written."""
    size = ctypes.c_size_t(nbytes)
    if _libc.memcmp(ctypes.c_void_p(target), ctypes.c_void_p(source), size):
        ctypes.memmove(target, source, nbytes)
