"""Small tensors: everyone gets everything, in one call of MPI, and adds it all.

Of little, steps cost more than bytes: to enter, to add in the node, to exchange, to add, to hand
out. One collective of MPI's own takes their place.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mntrain.comm.buffers import BufferRows, Lease
from mntrain.comm.collective_call import CollectiveCall, CollectiveContext
from mntrain.comm.intranode import Steps
from mntrain.comm.reduction import as_bytes
from mntrain.comm.staging import TensorAccess
from zero.collectives import Work
from zero.kernels import sum_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of all ranks' tensors together: what one rank receives. Above it a link's bytes count.
SMALL_BYTES = 64 << 10


class SmallCollective:
    """A verb on a small flat tensor: an `underway.Operation` of one piece, in which all ranks work.

    Sums are the scheme's: over each node in the order of its members, then over nodes, and rounded
    where theirs are. So their bits are those of the same tensor in pieces.
    """

    window, light, alone = 8, True, True

    def __init__(self, shared: CollectiveContext, call: CollectiveCall, loan: TensorAccess) -> None:
        self._shared, self._call, self._loan = shared, call, loan

    def begin(self) -> None:
        """See `Operation.begin`."""
        self._loan.begin()

    def enter(self) -> bool:
        """See `Operation.enter`."""
        return self._loan.here()

    def ready(self) -> bool:
        """See `Operation.ready`."""
        return True

    def pieces(self) -> Iterator[tuple[int, Steps[None]]]:
        """See `Operation.pieces`."""
        call = self._call
        number = self._shared.number(1)
        if call.verb == "broadcast":
            yield number, self._copy()
        elif call.verb == "all_gather":
            yield number, self._gather()
        else:
            yield number, self._sum()

    def leave(self) -> None:
        """See `Operation.leave`."""

    def left(self) -> bool:
        """See `Operation.left`."""
        return True

    def finish(self) -> Work:
        """See `Operation.finish`."""
        return self._loan.give_back()

    def _sum(self) -> Steps[None]:
        """All-reduce. A reduce-scatter too: everybody keeps all shards."""
        tensor, wire, add = self._loan.host, self._call.wire, self._shared.tools.adder.add
        nodes = self._shared.schemes[self._call.choice.algorithm].nodes.nodes
        with self._shared.tools.scratch.lend() as lent:
            everyone = yield from self._everyone(lent)
            if sum_dtype(tensor.dtype) == tensor.dtype and wire in (None, tensor.dtype):
                arrays = everyone.arrays
                with np.errstate(over="ignore", invalid="ignore"):  # as torch does
                    for node in nodes:
                        _add([arrays[rank] for rank in node], arrays[node[0]])
                    _add([arrays[node[0]] for node in nodes], tensor.numpy())
                return
            for node in nodes:
                if len(node) > 1:
                    add([everyone.tensors[rank] for rank in node], everyone.tensors[node[0]], 0)
            sums = [everyone.tensors[node[0]] for node in nodes]
            if len(sums) == 1:
                tensor.copy_(sums[0])
                return
            add([total.to(wire or tensor.dtype) for total in sums], tensor, None)
            if wire is not None:
                tensor.copy_(tensor.to(wire))

    def _gather(self) -> Steps[None]:
        """All-gather."""
        shards, tensor = pairwise(self._call.bounds), self._loan.host
        with self._shared.tools.scratch.lend() as lent:
            everyone = yield from self._everyone(lent)
            for (low, high), owner in zip(shards, self._shared.owners, strict=True):
                tensor[low:high].copy_(everyone.tensors[owner][low:high])

    def _copy(self) -> Steps[None]:
        """Broadcast."""
        comm = self._shared.tools.comm
        yield comm.broadcast(as_bytes(self._loan.host), self._call.root).over

    def _everyone(self, lent: Lease) -> Steps[BufferRows]:
        """Everyone's tensor, by rank, in memory that is lent."""
        comm, tensor = self._shared.tools.comm, self._loan.host
        everyone = lent.rows(comm.size, tensor.numel(), tensor.dtype)
        if everyone.arrays:
            everyone.arrays[comm.rank][:] = tensor.numpy()
        else:
            everyone.tensors[comm.rank].copy_(tensor)
        yield comm.gather(everyone.bytes).over
        return everyone


def _add(addends: Sequence["NDArray[Any]"], total: "NDArray[Any]") -> None:
    """Leave the sum of addends, in their order, in `total`: numpy begins sooner than torch."""
    first, *others = addends
    if not others:
        total[:] = first
        return
    for addend in others:
        np.add(first, addend, out=total)
        first = total
