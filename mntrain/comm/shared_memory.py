"""Memory that the ranks of a node share: each has parts of its own, and reads and writes others'.

A segment is a file without a name (memfd) of every rank, mapped by all ranks of the node. Compared
with a window of MPI_Win_allocate_shared:

- the memory lives as long as any tensor in it, also when the world is gone;
- nothing stays behind when a job is killed, for there is no name;
- it does not count as /dev/shm, of which containers give 64 MB; and if there is not enough, that is
  an error here and now, not a signal at the first touch.

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

TOKEN_BYTES = 16  # at the end of a segment: it tells whose it is


class SegmentOffset(NamedTuple):
    """Where a tensor lies in shared memory: its segment, and the first byte there."""

    segment: int
    start: int


@dataclass(frozen=True)
class SharedSegment:
    """What one `allocate` made."""

    address: int  # of this rank's own part
    nbytes: int
    own: StorageWeakRef  # this rank's part, which its tensors keep
    parts: dict[int, Tensor]  # by local rank: the others', as bytes

    @property
    def dead(self) -> bool:
        """Whether no tensor of this rank lies in its part any more."""
        return bool(self.own.expired())


class NodeSharedMemory:
    """The shared memory of one node group. `why_not` says why there is none, where there is none.

    `allocate` and construction are collective over the node group; all else is local.
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
        """A flat tensor of zeros, as bytes, that the node's ranks can reach. Collective.

        Where any of them cannot have it, all take memory of their own, and `why_not` says why.
        """
        if self._node.size == 1 or self.why_not or not nbytes:
            return torch.zeros(nbytes, dtype=torch.uint8)
        dead = [index for index, segment in self._segments.items() if segment.dead]
        token = secrets.token_bytes(TOKEN_BYTES)
        file, mine, problem = _create(nbytes, token)
        try:
            offers = self._node.gather_objects((os.getpid(), file, token, problem, dead))
            self._forget([offer[-1] for offer in offers])
            parts, problem = self._attach(offers, nbytes)
            problems = [said for said in self._node.gather_objects(problem) if said]
        finally:
            if file >= 0:
                os.close(file)
        if problems or mine is None:
            self.why_not = problems[0]
            return torch.zeros(nbytes, dtype=torch.uint8)
        own = StorageWeakRef(mine.untyped_storage())
        self._segments[self._count] = SharedSegment(mine.data_ptr(), nbytes, own, parts)
        self._count += 1
        return mine

    def _forget(self, dead: list[list[int]]) -> None:
        """Drop the parts that their owners, by local rank, will name no more."""
        for local_rank, indices in enumerate(dead):
            for index in indices:
                if index in self._segments:
                    self._segments[index].parts.pop(local_rank, None)
        gone = [index for index, s in self._segments.items() if s.dead and not s.parts]
        for index in gone:
            del self._segments[index]

    def _attach(self, offers: list[Any], nbytes: int) -> tuple[dict[int, Tensor], str]:
        """The others' parts, by local rank, and why one cannot be had."""
        parts: dict[int, Tensor] = {}
        for local_rank, (pid, file, token, problem, _) in enumerate(offers):
            if problem:
                return {}, problem
            if local_rank == self._node.rank:
                continue
            try:
                parts[local_rank] = _map(f"/proc/{pid}/fd/{file}", nbytes, token)
            except OSError as error:
                return {}, f"rank {self._node.rank} of the node cannot reach another's: {error}"
        return parts, ""

    def locate(self, tensor: Tensor) -> SegmentOffset | None:
        """Where a flat host tensor lies, if it lies in this memory."""
        address = tensor.data_ptr()
        nbytes = tensor.numel() * tensor.element_size()
        for index, segment in self._segments.items():
            start = address - segment.address
            if start >= 0 and start + nbytes <= segment.nbytes and not segment.dead:
                return SegmentOffset(index, start)
        return None

    def view(self, local_rank: int, place: SegmentOffset, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor in the part of another rank of the node, which said where it lies."""
        part = self._segments[place.segment].parts[local_rank]
        return part[place.start : place.start + numel * dtype.itemsize].view(dtype)

    @property
    def own_bytes(self) -> int:
        """Bytes of this rank's living parts."""
        return sum(s.nbytes for s in self._segments.values() if not s.dead)


def _create(nbytes: int, token: bytes) -> tuple[int, Tensor | None, str]:
    """A new file in memory, open, and all of it as a tensor; or why there is none."""
    if not hasattr(os, "memfd_create"):
        return -1, None, "this system has no files in memory (memfd_create)"
    file = -1
    try:
        file = os.memfd_create("mntrain", os.MFD_CLOEXEC)
        os.posix_fallocate(file, 0, nbytes + TOKEN_BYTES)
        os.pwrite(file, token, nbytes)
        return file, _map(f"/proc/self/fd/{file}", nbytes, token), ""
    except OSError as error:
        if file >= 0:
            os.close(file)
        return -1, None, f"{nbytes} bytes of memory to share cannot be had: {error}"


def _map(path: str, nbytes: int, token: bytes) -> Tensor:
    """A file in memory as a tensor of bytes. OSError where it is not the one with the token."""
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
