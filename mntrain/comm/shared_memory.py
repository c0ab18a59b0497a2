"""Memory shared by the ranks of a node, and flags in it.

A segment is one anonymous file (memfd) per rank, mapped by all ranks of the node: each rank owns
its part and accesses the others' parts. Compared with a window of MPI_Win_allocate_shared:

- the memory lives as long as any tensor in it, even after the world is closed;
- a killed job leaves nothing behind, since the file has no name;
- it does not count against /dev/shm, which is 64 MB in many containers; and where memory is short,
  the allocation fails, instead of a signal at the first access.

Forked children have private copies of it (`mntrain.comm.forked`).

Sources: memfd_create(2); Hashmi et al., "Designing Efficient Shared Address Space Reduction
Collectives for Multi-/Many-cores", IPDPS 2018, for summing straight from the peers' memory.
"""

import os
import secrets
import threading
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mntrain.comm.forked import PrivateCopies
from mntrain.comm.mpi import Communicator
from mntrain.comm.peer_memory import PeerTensor, reached

TOKEN_BYTES = 16  # at the end of a segment, to identify it

DEPTH = 8  # collectives that a rank may have entered and not left
_LINE = 8  # int64 in a cache line, so that ranks do not write to the same line
_ENTERED, _LEFT, _LOCATIONS = 0, _LINE, 2 * _LINE
_DIGESTS = _LOCATIONS + 2 * DEPTH
_WORDS = _DIGESTS + DEPTH
_WORDS += -_WORDS % _LINE
_UNREACHABLE, _PRIVATE = -1, -2  # in place of a segment's number; private: of an address

# Of a tensor in shared memory: the number of its segment, and its first byte there.
SegmentOffset = tuple[int, int]


@dataclass(frozen=True)
class SharedSegment:
    """The result of one `allocate`."""

    address: int  # of this rank's own part
    nbytes: int
    own: StorageWeakRef  # this rank's part: expired once no tensor of this rank uses it
    parts: dict[int, Tensor]  # by local rank: the others', as bytes


class NodeSharedMemory:
    """The shared memory of one node group. `why_not` is the reason if there is none, else empty.

    `pids` are the ranks' processes, by local rank, if ranks reach each other's memory outside of
    it, else empty. Construction and `allocate` are collective over the node group; all else is
    local.
    """

    def __init__(self, node: Communicator) -> None:
        self._node = node
        self._segments: dict[int, SharedSegment] = {}
        self._count = 0
        self.why_not = ""
        self.pids = reached(node)
        if node.size > 1:
            self._copies = PrivateCopies()
            self.allocate(TOKEN_BYTES)  # a trial

    def among(self, node: Communicator, local_ranks: Sequence[int]) -> "NodeSharedMemory":
        """Return memory of some of the ranks, which `node` has in this order. Local."""
        other = copy(self)
        other._node, other._segments, other._count = node, {}, 0
        other.pids = [self.pids[local] for local in local_ranks] if self.pids else []
        return other

    def allocate(self, nbytes: int) -> Tensor:
        """Return a flat tensor of zero bytes that the node's ranks can access. Collective.

        If it fails on any of them, all ranks use private memory, and `why_not` is set.
        """
        if self._node.size == 1 or self.why_not or not nbytes:
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        dead = [index for index, segment in self._segments.items() if segment.own.expired()]
        token = secrets.token_bytes(TOKEN_BYTES)
        file, own, problem = _create(nbytes, token)
        try:
            offers = self._node.gather((os.getpid(), file, token, problem, dead))
            self._forget([offer[-1] for offer in offers])
            parts, problem = self._attach(offers, nbytes)
            problems = [text for text in self._node.gather(problem) if text]
        finally:
            if file >= 0:
                os.close(file)
        if problems or own is None:
            self.why_not = problems[0]
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        weak = StorageWeakRef(own.untyped_storage())
        self._segments[self._count] = SharedSegment(own.data_ptr(), nbytes, weak, parts)
        self._count += 1
        self._copies.add(own)
        return own

    def locate(self, tensor: Tensor) -> SegmentOffset | None:
        """Return the location of a flat host tensor; None if it is not in this memory."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        for index, segment in self._segments.items():
            start = address - segment.address
            if start >= 0 and start + nbytes <= segment.nbytes and not segment.own.expired():
                return index, start
        return None

    def view(
        self, local_rank: int, location: SegmentOffset, numel: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a tensor in another rank's part, at the location that rank has published."""
        segment, start = location
        part = self._segments[segment].parts[local_rank]
        return part[start : start + numel * dtype.itemsize].view(dtype)

    def _forget(self, dead: list[list[int]]) -> None:
        """Drop the parts whose owners, by local rank, no longer use them."""
        for local_rank, indices in enumerate(dead):
            for index in indices:
                if index in self._segments:
                    self._segments[index].parts.pop(local_rank, None)
        gone = [index for index, s in self._segments.items() if s.own.expired() and not s.parts]
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
        if os.stat(path).st_size == length:
            everything = torch.from_file(path, shared=True, size=length, dtype=torch.uint8)
            if bytes(everything[nbytes:].numpy()) == token:
                return everything[:nbytes]
    except RuntimeError as error:
        raise OSError(str(error)) from None
    raise OSError(f"{path} is another process's")


class SharedFlags:
    """Flags of a node's ranks: which collectives they have entered and left. One rank's view.

    Every rank has a block in shared memory, to which only it writes:

        entered    the number of collectives that it has entered, and for each of the last DEPTH
        location   where its tensor lies in shared memory, or that it is out of reach
        digest     what it calls
        left       the number of collectives in which it has no work left

    A rank accesses its peers' tensors after all have entered with the same digest, and owns its own
    tensor again after all have left. Collectives are numbered 0, 1, 2, ... on all ranks alike, and
    entered and left in that order; at most DEPTH are entered and not left. `rank` and `size` are
    those of the node group. Construction is collective over it.
    """

    def __init__(self, memory: NodeSharedMemory, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        block = memory.allocate(8 * _WORDS)
        self._entered = self._left = 0
        # By collective: private memory to which others may write, kept also after an error here.
        self._lent: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        self._lock.acquire()
        location = memory.locate(block)
        self._shared = location is not None
        self._words = {rank: block.view(torch.int64).numpy()}
        self._peers: list[int] = []
        if location is not None:
            self._peers = sorted(set(range(size)) - {rank})
            views = {
                local: memory.view(local, location, _WORDS, torch.int64) for local in self._peers
            }
            self._words |= {local: view.numpy() for local, view in views.items()}

    def enter(self, tensor: Tensor, digest: int = 0, *, reachable: bool = True) -> int:
        """Enter the next collective with a flat tensor, and return the collective's number.

        One on a device is not `reachable` for other processes.
        """
        number = self._entered
        location = self._memory.locate(tensor) if reachable else None
        if location is None and reachable and self._memory.pids:
            location = _PRIVATE, tensor.data_ptr()
            self._lent[number] = tensor
        words, word = self._words[self._rank], _LOCATIONS + 2 * (number % DEPTH)
        words[word : word + 2] = location or (_UNREACHABLE, 0)
        words[_DIGESTS + number % DEPTH] = digest
        self._memory_fence()
        self._entered += 1
        words[_ENTERED] = self._entered
        return number

    def all_entered(self, number: int) -> bool:
        """Return whether all ranks of the node have entered a collective, with the same digest.

        Once true, always. If digests differ, it never is.
        """
        if not self._all_beyond(_ENTERED, number):
            return False
        word = _DIGESTS + number % DEPTH
        digest = self._words[self._rank][word]
        return all(self._words[local][word] == digest for local in self._peers)

    def leave(self) -> None:
        """Leave the oldest collective that was entered and not left."""
        self._memory_fence()
        self._left += 1
        self._words[self._rank][_LEFT] = self._left

    def all_left(self, number: int) -> bool:
        """Return whether all ranks of the node have left a collective. Once true, always."""
        if not self._all_beyond(_LEFT, number):
            return False
        self._lent.pop(number, None)
        return True

    def tensors(self, number: int, own: Tensor) -> list[Tensor | PeerTensor] | None:
        """Return every rank's tensor, by local rank, after all have entered; None if out of reach.

        They are views of the ranks' memory, or `PeerTensor`s; this rank's is `own`.
        """
        if self._size == 1:
            return [own]
        if not self._shared:
            return None
        word = _LOCATIONS + 2 * (number % DEPTH)
        tensors: list[Tensor | PeerTensor] = []
        for local in range(self._size):
            segment, start = self._words[local][word : word + 2].tolist()
            if segment == _UNREACHABLE:
                return None
            if local == self._rank:
                tensors.append(own)
            elif segment == _PRIVATE:
                pid = self._memory.pids[local]
                tensors.append(PeerTensor(pid, start, own.numel(), own.dtype))
            else:
                view = self._memory.view(local, (segment, start), own.numel(), own.dtype)
                tensors.append(view)
        return tensors

    def _all_beyond(self, word: int, number: int) -> bool:
        if any(self._words[local][word] <= number for local in self._peers):
            return False
        self._memory_fence()
        return True

    def _memory_fence(self) -> None:
        """Order memory accesses: none passes this point, so that data precede their flag.

        Releasing a lock and acquiring it, in this order, is a full barrier.
        """
        self._lock.release()
        self._lock.acquire()
