"""Memory shared by the ranks of a node: each rank owns parts of it and accesses the others' parts.

A segment is one anonymous file (memfd) per rank, mapped by all ranks of the node. Compared with a
window of MPI_Win_allocate_shared:

- the memory lives as long as any tensor in it, even after the world is closed;
- a killed job leaves nothing behind, since the file has no name;
- it does not count against /dev/shm, which is 64 MB in many containers; and where memory is short,
  the allocation fails, instead of a signal at the first access.

Sources: memfd_create(2); Hashmi et al., "Designing Efficient Shared Address Space Reduction
Collectives for Multi-/Many-cores", IPDPS 2018, for summing straight from the peers' memory.
"""

import os
import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mntrain.comm.mpi import Communicator

TOKEN_BYTES = 16  # at the end of a segment, to identify it


class SegmentOffset(NamedTuple):
    """The location of a tensor in shared memory: its segment and its first byte there."""

    segment: int
    start: int


@dataclass(frozen=True)
class SharedSegment:
    """The result of one `allocate`."""

    address: int  # of this rank's own part
    nbytes: int
    own: StorageWeakRef  # this rank's part, which its tensors keep alive
    parts: dict[int, Tensor]  # by local rank: the others', as bytes

    @property
    def dead(self) -> bool:
        """Whether no tensor of this rank uses its part any more."""
        return bool(self.own.expired())


class NodeSharedMemory:
    """The shared memory of one node group. `why_not` is the reason if there is none, else empty.

    Construction and `allocate` are collective over the node group; all else is local.
    """

    def __init__(self, node: Communicator) -> None:
        self._node = node
        self._segments: dict[int, SharedSegment] = {}
        self._count = 0
        self.why_not = ""
        if node.size > 1:
            trial = self.allocate(TOKEN_BYTES)
            del trial

    def allocate(self, nbytes: int) -> Tensor:
        """Return a flat tensor of zero bytes that the node's ranks can access. Collective.

        If it fails on any of them, all ranks use private memory, and `why_not` is set.
        """
        if self._node.size == 1 or self.why_not or not nbytes:
            return torch.zeros(nbytes, dtype=torch.uint8)
        dead = [index for index, segment in self._segments.items() if segment.dead]
        token = secrets.token_bytes(TOKEN_BYTES)
        file, own, problem = _create(nbytes, token)
        try:
            offers = self._node.gather_objects((os.getpid(), file, token, problem, dead))
            self._forget([offer[-1] for offer in offers])
            parts, problem = self._attach(offers, nbytes)
            problems = [text for text in self._node.gather_objects(problem) if text]
        finally:
            if file >= 0:
                os.close(file)
        if problems or own is None:
            self.why_not = problems[0]
            return torch.zeros(nbytes, dtype=torch.uint8)
        weak = StorageWeakRef(own.untyped_storage())
        self._segments[self._count] = SharedSegment(own.data_ptr(), nbytes, weak, parts)
        self._count += 1
        return own

    def _forget(self, dead: list[list[int]]) -> None:
        """Drop the parts whose owners, by local rank, no longer use them."""
        for local_rank, indices in enumerate(dead):
            for index in indices:
                if index in self._segments:
                    self._segments[index].parts.pop(local_rank, None)
        gone = [index for index, s in self._segments.items() if s.dead and not s.parts]
        for index in gone:
            del self._segments[index]

    def _attach(self, offers: list[Any], nbytes: int) -> tuple[dict[int, Tensor], str]:
        """Return the other ranks' parts, by local rank, and the reason if one is inaccessible."""
        parts: dict[int, Tensor] = {}
        for local_rank, (pid, file, token, problem, _) in enumerate(offers):
            if problem:
                return {}, problem
            if local_rank == self._node.rank:
                continue
            try:
                parts[local_rank] = _map(f"/proc/{pid}/fd/{file}", nbytes, token)
            except OSError as error:
                return {}, f"local rank {self._node.rank} cannot map a peer's memory: {error}"
        return parts, ""

    def locate(self, tensor: Tensor) -> SegmentOffset | None:
        """Return the location of a flat host tensor; None if it is not in this memory."""
        address = tensor.data_ptr()
        nbytes = tensor.numel() * tensor.element_size()
        for index, segment in self._segments.items():
            start = address - segment.address
            if start >= 0 and start + nbytes <= segment.nbytes and not segment.dead:
                return SegmentOffset(index, start)
        return None

    def view(
        self, local_rank: int, location: SegmentOffset, numel: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a tensor in another rank's part, at the location that rank has published."""
        part = self._segments[location.segment].parts[local_rank]
        return part[location.start : location.start + numel * dtype.itemsize].view(dtype)

    @property
    def own_bytes(self) -> int:
        """Bytes of this rank's parts that are in use."""
        return sum(s.nbytes for s in self._segments.values() if not s.dead)


def _create(nbytes: int, token: bytes) -> tuple[int, Tensor | None, str]:
    """Return a new open file in memory, its content as a tensor, and the reason if it failed."""
    if not hasattr(os, "memfd_create"):
        return -1, None, "this system has no memfd_create"
    file = -1
    try:
        file = os.memfd_create("mntrain", os.MFD_CLOEXEC)
        os.posix_fallocate(file, 0, nbytes + TOKEN_BYTES)
        os.pwrite(file, token, nbytes)
        return file, _map(f"/proc/self/fd/{file}", nbytes, token), ""
    except OSError as error:
        if file >= 0:
            os.close(file)
        return -1, None, f"{nbytes} bytes of shared memory cannot be allocated: {error}"


def _map(path: str, nbytes: int, token: bytes) -> Tensor:
    """Return a file in memory as a tensor of bytes. Raises OSError unless it ends in the token."""
    length = nbytes + TOKEN_BYTES
    try:
        if os.stat(path).st_size != length:
            raise OSError(f"{path} is another process's")
        everything = torch.from_file(path, shared=True, size=length, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from None
    if bytes(everything[nbytes:].numpy()) != token:
        raise OSError(f"{path} is another process's")
    return everything[:nbytes]
