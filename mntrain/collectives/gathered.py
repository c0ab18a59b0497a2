"""Small tensors: everyone gets everything, in one call of MPI, and adds it all.

Of little, steps cost more than bytes: to enter, to add in the node, to exchange, to add, to hand
out. One collective of MPI's own takes their place.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mntrain.collectives.near import Steps, Tools
from mntrain.collectives.plan import Scheme
from mntrain.collectives.sums import as_bytes

# Of all ranks' tensors together: what one rank receives. Above it a link's bytes count.
GATHERED_BYTES = 64 << 10


class Gathered:
    """The four verbs on a flat tensor in host memory, of which every rank holds all ranks'.

    Sums are the scheme's: over each node in the order of its members, then over nodes, and rounded
    where theirs are. So their bits are those of the same tensor in pieces.
    """

    def __init__(self, tools: Tools, scheme: Scheme, tensor: Tensor) -> None:
        self._comm, self._adder, self._tensor = tools.comm, tools.adder, tensor
        self._nodes = scheme.nodes.nodes

    def sum(self, wire: torch.dtype | None) -> Steps[None]:
        """All-reduce. A reduce-scatter too: everybody keeps all shards."""
        wire = wire or self._tensor.dtype
        everyone = yield from self._everyone()
        sums = []
        for node in self._nodes:
            addends = [everyone[rank] for rank in node]
            if len(addends) > 1:
                self._adder.add(addends, addends[0], 0)
            sums.append(addends[0] if len(self._nodes) == 1 else addends[0].to(wire))
        if len(sums) == 1:
            self._tensor.copy_(sums[0])
            return
        self._adder.add(sums, self._tensor, None)
        if wire != self._tensor.dtype:
            self._tensor.copy_(self._tensor.to(wire))

    def gather(self, bounds: Sequence[int], owners: Sequence[int]) -> Steps[None]:
        """All-gather. `owners`: the rank that owns each slot."""
        everyone = yield from self._everyone()
        for (low, high), owner in zip(pairwise(bounds), owners, strict=True):
            self._tensor[low:high].copy_(everyone[owner][low:high])

    def copy(self, root: int) -> Steps[None]:
        """Broadcast."""
        yield self._comm.broadcast(as_bytes(self._tensor), root).over

    def _everyone(self) -> Steps[Tensor]:
        """Everyone's tensor, by rank: new, of shape (ranks, elements)."""
        everyone = self._tensor.new_empty((self._comm.size, len(self._tensor)))
        yield self._comm.gather(as_bytes(self._tensor), as_bytes(everyone.view(-1))).over
        return everyone
