"""Small collectives in messages between pairs of ranks, which differ from others by their tag.

MPI's own collectives have no tags: if ranks called different ones, their data would be mixed.
Among few ranks each sends to all others; among many, the number of messages of a rank grows with
the logarithm of their number.

Source: Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
Message-Passing Systems", IEEE TPDS 1997, for the all-gather.
"""

import pickle
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.engine import Steps
from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.resources import BufferView, CommContext, TensorAccess, as_bytes
from mntrain.comm.ticket import Ticket

if TYPE_CHECKING:
    from mntrain.comm.mpi import Bytes

T = TypeVar("T")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
DIRECT_RANKS = 8  # up to so many ranks, each sends to all others


def small_collective(
    plan: HierarchyPlan, ticket: Ticket, access: TensorAccess, context: CommContext
) -> Steps[torch.cuda.Event | None]:
    """Run a call on a small host tensor: every rank gathers all tensors and sums them itself.

    Small messages are latency-bound, and this replaces the steps of a chunk: enter, reduce in the
    node, exchange between nodes, add, publish. Sums are made and rounded in the same order, so the
    result has the same bits.
    """
    access.begin()
    if not access.here():
        yield access.here
    call, tensor, comm = ticket.signature, access.host, context.comm
    tag = comm.tag(ticket.digest)
    if call.verb == "broadcast":
        yield from broadcast(comm, as_bytes(tensor), call.root, tag)
        return access.give_back()
    with context.buffers.lease() as take:
        rows = take(tensor.numel(), tensor.dtype, comm.size)
        rows.tensors[comm.rank].copy_(tensor)
        yield from all_gather(comm, rows.bytes, tag, ratio=ticket.ratio)
        if call.verb == "all_gather":
            owners = zip(pairwise(access.bounds), context.topology.owners, strict=True)
            for (low, high), owner in owners:
                tensor[low:high].copy_(rows.tensors[owner][low:high])
        else:  # a reduce-scatter leaves the sums of all shards on every rank
            _add_rows(rows, plan, tensor, call.wire or tensor.dtype, context)
    return access.give_back()


def _add_rows(
    rows: BufferView, plan: HierarchyPlan, total: Tensor, wire: torch.dtype, context: CommContext
) -> None:
    """Leave the sum of the rows in `total`, in the order of the chunks' steps. Overwrites them."""
    nodes = len(plan.nodes.nodes)
    for number, group in enumerate(_groups(plan)):
        addends, target = [rows.tensors[rank] for rank in group], rows.tensors[group[0]]
        if number < nodes or wire == total.dtype:
            context.add(addends, target)
        else:
            context.add([addend.to(wire) for addend in addends], target)
            target.copy_(target.to(wire))
    total.copy_(rows.tensors[plan.nodes.nodes[0][0]])


def _groups(plan: HierarchyPlan) -> Iterator[Sequence[int]]:
    """Yield the ranks whose rows are added up, in this order: those of each node, then hops."""
    yield from plan.nodes.nodes
    first = [node[0] for node in plan.nodes.nodes]
    for width in plan.widths[1:]:
        if len(first) > 1:
            yield from (first[rest::width] for rest in range(width))
            first = first[:width]


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


class _Pickler(pickle.Pickler):
    """Pickles of any dtype, in which a tensor has its own elements, not all of those it views."""

    def reducer_override(self, value: object) -> Any:
        """Return how to make a tensor anew; NotImplemented for what torch pickles so itself."""
        if type(value) is not Tensor or value.layout is not torch.strided or vars(value):
            return NotImplemented
        own, needs = value.detach(), value.requires_grad
        if own.dtype in torch.storage._new_dtypes():  # which only torch.save can write
            return _viewed, (own.view(_INTEGERS[own.element_size()]), own.dtype, needs)
        if own.untyped_storage().nbytes() > own.nbytes:
            return own.clone().requires_grad_(needs).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _viewed(integers: Tensor, dtype: torch.dtype, needs_gradient: bool) -> Tensor:
    return integers.view(dtype).requires_grad_(needs_gradient)


def pack(value: object) -> bytes:
    """Return a pickle of an object as it is now, for `gather_packed`. Raises what pickle raises."""
    stream = BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def gather_objects(comm: Communicator, value: T, tag: int) -> Steps[list[T]]:
    """Return every rank's picklable object, by rank. Collective. Not counted as traffic."""
    return (yield from gather_packed(comm, pack(value), tag))


def gather_packed(comm: Communicator, own: bytes, tag: int) -> Steps[list[Any]]:
    """Return every rank's object, which it has packed, by rank. As `gather_objects`."""
    packed = np.frombuffer(own, np.uint8)
    lengths = np.zeros(comm.size, np.int64)
    lengths[comm.rank] = len(packed)
    yield from all_gather(comm, lengths.view(np.uint8), tag, counted=False)
    requests, gathered = comm.gather_unequal(packed, lengths.tolist())
    yield requests.test
    ends = np.cumsum(lengths).tolist()
    parts = zip([0, *ends], ends, strict=False)
    return [pickle.loads(memoryview(gathered)[low:high]) for low, high in parts]
