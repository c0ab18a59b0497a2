"""Access to the tensors of a node's ranks, for the rank that owns a lane.

In shared memory the owner reads and writes its peers' tensors, and they have nothing to do. Where
a tensor lies outside of shared memory, its data travel as messages. Ranks of the node are given by
local rank; `dtype` is that of all tensors.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from mntrain.comm.buffers import BufferView, as_bytes
from mntrain.comm.chunk_plan import HierarchyPlan, Span
from mntrain.comm.collective_call import CommContext
from mntrain.comm.mpi import Requests
from mntrain.comm.pending import Steps

BLOCK_BYTES = 256 << 10  # what is summed and published while it is in the cache


class SharedMemoryAccess:
    """Access to tensors in shared memory. Its steps never wait: all ranks have entered."""

    def __init__(
        self, context: CommContext, plan: HierarchyPlan, tensors: Sequence[Tensor]
    ) -> None:
        self._add_tensors, self._traffic = context.add, context.comm.traffic
        self._tensors, self._local_rank = tensors, plan.local_rank
        self.dtype = tensors[0].dtype
        self._bytes = as_bytes(tensors[plan.local_rank])
        self._views: dict[Span, Sequence[Tensor]] = {}

    def buffer(self, span: Span) -> BufferView:
        """Return a view of a span of this rank's tensor."""
        low, high = span
        size = self.dtype.itemsize
        return BufferView(self._of(span)[self._local_rank], self._bytes[low * size : high * size])

    def reduce(self, span: Span, to: Collection[int]) -> Steps[None]:
        """Leave the sum over the node in the spans of this rank and of the ranks `to`."""
        yield from ()
        if len(self._tensors) == 1:
            return
        addends = self._of(span)
        if not to:
            self._add(addends, to)
        else:
            block = BLOCK_BYTES // self.dtype.itemsize
            for blocks in zip(*(view.split(block) for view in addends), strict=True):
                self._add(blocks, to)
        self._count(span, len(self._tensors) - 1 + len(to))

    def fetch(self, span: Span, source: int) -> Steps[None]:
        """Read the span from the source's memory."""
        yield from ()
        views = self._of(span)
        views[self._local_rank].copy_(views[source])
        self._count(span, 1)

    def publish(self, span: Span, to: Collection[int]) -> Steps[None]:
        """Write the span to the memory of the ranks `to`."""
        yield from ()
        views = self._of(span)
        for local_rank in to:
            views[local_rank].copy_(views[self._local_rank])
        self._count(span, len(to))

    def _add(self, addends: Sequence[Tensor], to: Collection[int]) -> None:
        total = addends[self._local_rank]
        self._add_tensors(addends, total)
        for local_rank in to:
            addends[local_rank].copy_(total)

    def _of(self, span: Span) -> Sequence[Tensor]:
        """Return a span of every rank's tensor."""
        views = self._views.get(span)
        if views is None:
            low, high = span
            views = self._views[span] = [tensor[low:high] for tensor in self._tensors]
        return views

    def _count(self, span: Span, times: int) -> None:
        self._traffic.bytes["node"] += times * (span[1] - span[0]) * self.dtype.itemsize


class MessageAccess:
    """Access by messages; the other ranks run the steps of `hierarchical.NodeMember`."""

    def __init__(self, context: CommContext, plan: HierarchyPlan, tensor: Tensor, tag: int) -> None:
        self._context, self._comm = context, context.comm
        self._tensor, self._tag, self.dtype = tensor, tag, tensor.dtype
        self._members, self._local_rank = plan.members, plan.local_rank

    def buffer(self, span: Span) -> BufferView:
        """Return a view of a span of this rank's tensor."""
        view = self._tensor[slice(*span)]
        return BufferView(view, as_bytes(view))

    def reduce(self, span: Span, to: Collection[int]) -> Steps[None]:
        """Receive the other ranks' spans, sum them, and send the sum to the ranks `to`."""
        total, local_rank = self.buffer(span).tensor, self._local_rank
        others = [member for local, member in enumerate(self._members) if local != local_rank]
        with self._context.buffers.lease() as lease:
            received = [lease.buffer(len(total), self.dtype) for _ in others]
            receives = [
                self._comm.receive(member, buffer.bytes, self._tag)
                for member, buffer in zip(others, received, strict=True)
            ]
            yield Requests.of(*receives).test
            addends = [buffer.tensor for buffer in received]
            addends.insert(local_rank, total)
            self._context.add(addends, total)
            yield from self._context.fence()
        yield from self.publish(span, to)

    def fetch(self, span: Span, source: int) -> Steps[None]:
        """Receive the span from its source."""
        yield self._comm.receive(self._members[source], self.buffer(span).bytes, self._tag).test

    def publish(self, span: Span, to: Collection[int]) -> Steps[None]:
        """Send the span to the ranks `to`."""
        data = self.buffer(span).bytes
        sends = [self._comm.send(self._members[local], data, self._tag) for local in to]
        yield Requests.of(*sends).test
