"""Small collectives in messages between pairs of ranks, which differ from others by their tag.

MPI's own collectives have no tags: if ranks called different ones, their data would be mixed.
Among few ranks each sends to all others; among many, the number of messages of a rank grows with
the logarithm of their number.

Source: Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
Message-Passing Systems", IEEE TPDS 1997, for the all-gather.
"""

import pickle
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mntrain.comm.engine import Steps
from mntrain.comm.mpi import Communicator, Requests

if TYPE_CHECKING:
    from mntrain.comm.mpi import Bytes

T = TypeVar("T")
DIRECT_RANKS = 8  # up to so many ranks, each sends to all others


def all_gather(
    comm: Communicator, rows: "Bytes", tag: int, *, counted: bool = True, ratio: float = 1
) -> Steps[None]:
    """Gather equal rows of bytes; this rank's is in place already. Collective."""
    size, rank = comm.size, comm.rank
    length = rows.nbytes // size
    if size <= DIRECT_RANKS:
        own = rows[rank * length : (rank + 1) * length]
        peers = [*range(rank + 1, size), *range(rank)]
        yield Requests.of(
            *[comm.receive(p, rows[p * length : (p + 1) * length], tag) for p in reversed(peers)],
            *[comm.send(p, own, tag, counted=counted, ratio=ratio) for p in peers],
        ).test
        return

    def span(first: int, count: int) -> list["Bytes"]:
        """Return rows from `first` on, which continue with row 0 after the last one."""
        low, high = first % size, first % size + count
        ends = [(low, min(high, size)), (0, high - size)]
        return [rows[a * length : b * length] for a, b in ends if a < b]

    here = 1  # rows that have arrived, from this rank's own on
    while here < size:
        count = min(here, size - here)
        source, target = (rank + here) % size, (rank - here) % size
        yield Requests.of(
            *[comm.receive(source, part, tag) for part in span(rank + here, count)],
            *[
                comm.send(target, part, tag, counted=counted, ratio=ratio)
                for part in span(rank, count)
            ],
        ).test
        here += count


def broadcast(comm: Communicator, data: "Bytes", root: int, tag: int) -> Steps[None]:
    """Copy the root's bytes to every rank, along a binomial tree if there are many. Collective."""
    size = comm.size
    place = (comm.rank - root) % size
    if size <= DIRECT_RANKS:
        before, after = 0, list(range(1, size)) if place == 0 else []
    else:
        low = place & -place or 1 << (size - 1).bit_length()
        before, after = place - low, [place + (1 << bit) for bit in range(low.bit_length() - 1)]
    if place:
        yield comm.receive((before + root) % size, data, tag).test
    targets = [(to + root) % size for to in reversed(after) if to < size]
    yield Requests.of(*(comm.send(target, data, tag) for target in targets)).test


def barrier(comm: Communicator, tag: int) -> Steps[None]:
    """Wait until every rank has come here. Collective. Not counted as traffic."""
    yield from all_gather(comm, np.zeros(comm.size, np.uint8), tag, counted=False)


def gather_objects(comm: Communicator, value: T, tag: int) -> Steps[list[T]]:
    """Return every rank's picklable object, by rank. Collective. Not counted as traffic."""
    packed = np.frombuffer(pickle.dumps(value), np.uint8)
    lengths = np.zeros(comm.size, np.int64)
    lengths[comm.rank] = len(packed)
    yield from all_gather(comm, lengths.view(np.uint8), tag, counted=False)
    requests, gathered = comm.gather_unequal(packed, lengths.tolist())
    yield requests.test
    ends = np.cumsum(lengths).tolist()
    parts = zip([0, *ends], ends, strict=False)
    return [pickle.loads(memoryview(gathered)[low:high]) for low, high in parts]
