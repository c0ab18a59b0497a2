"""Means over nodes of values that each node computes for its tensors, in messages of several.

    stages 1, 2      a rank exchanges with the ranks of the other nodes that update the same slices
    stage 0          each rank of a node exchanges a part of every message, and the ranks of the
                     node gather the parts

A message is an all-reduce, or an all-gather of codes, which all nodes decode and add in the order
of nodes. Sums are in the dtype of the tensors, fp32 or wider. All replicas get the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork
from zero.comm_hooks.codes import ALIGNED_BYTES, Code, aligned
from zero.layout import MIB, split

MESSAGE_BYTES = 25 * MIB  # of tensors that travel together

Value: TypeAlias = Callable[[Tensor], Tensor]


class MeansInFlight(NamedTuple):
    """Means of some tensors' values, on their way."""

    tensors: Sequence[Tensor]
    work: ChainedWork
    nbytes: int  # held until it has arrived
    mean: Callable[[], Tensor]  # of what has arrived: flat

    def means(self, scale: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait, and yield each tensor with `scale` times its mean over nodes. Collective.

        The mean is new, and has the tensor's shape.
        """
        self.work.wait()
        mean = self.mean()
        if scale != 1.0:
            mean.mul_(scale)
        yield from _by_tensor(mean, self.tensors)


class NodeMeans:
    """Sends messages to the other nodes.

    `node` are the ranks of this node, and `cross` one rank of each node, in the order of nodes.
    `sharded` states that each rank of a node has tensors of its own; otherwise all have the same.
    """

    def __init__(self, node: Collectives, cross: Collectives, *, sharded: bool) -> None:
        self.node, self.cross = node, cross
        self._parts = 1 if sharded else node.size  # of a message, each sent by a rank of the node

    def of(
        self, tensors: Sequence[Tensor], value: Value, *, scale: float = 1.0, **options: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor with the mean of its values, as `MeansInFlight.means` does. Collective.

        One message travels while another is used. The options are those of `send`.
        """
        for message, _ in pairwise(chain(self.send(tensors, value, **options), [None])):
            assert message is not None, "the last one is second of a pair alone"
            yield from message.means(scale)

    def send(
        self,
        tensors: Sequence[Tensor],
        value: Value,
        *,
        code: Code | None = None,
        keep: Callable[[Tensor, Tensor], object] | None = None,
        weight: float = 1.0,
    ) -> Iterator[MeansInFlight]:
        """Start messages, one for each that is taken from the iterator. Collective.

        `value` returns what is sent for a tensor, in its shape and dtype, times `weight`, which is
        above 0. With a `code`, `keep` gets each tensor with the part of its value that its code
        lacks, in its shape. Complex values travel without.
        """
        nodes = self.cross.size
        for message in _messages(tensors):
            flat = torch.cat([value(tensor).detach().reshape(-1) for tensor in message])
            if weight != 1.0:
                flat.mul_(weight)
            if code is None or flat.is_complex():
                work = ChainedWork(self._travel(flat, self.cross.all_reduce))
                yield MeansInFlight(message, work, flat.nbytes, partial(flat.div_, nodes))
                continue
            # Codes by part, node and byte, of which this node has its own; parts are aligned.
            numbers = [aligned(code.nbytes(tensor.numel())) for tensor in message]
            unit = self._parts * ALIGNED_BYTES
            shape = self._parts, nodes, -(-sum(numbers) // unit) * ALIGNED_BYTES
            codes = torch.zeros(shape, dtype=torch.uint8, device=flat.device)
            own = torch.zeros_like(codes[:, 0]).view(-1)
            for part, written in _with_codes(flat, own, message, code):
                code.encode(part, written)
            codes[:, self.cross.slot(self.cross.rank)] = own.view(self._parts, -1)
            if keep is not None:
                left = flat if weight == 1.0 else flat.div_(weight)
                for tensor, part in _by_tensor(left, message):
                    keep(tensor, part)
            ratio = 2 * flat.nbytes / codes.nbytes  # of an all-reduce of the values
            cross = self.cross.named("coded values", ratio)
            work = ChainedWork(self._travel(codes.view(-1), cross.all_gather))
            mean = partial(self._decode, message, codes, code)
            yield MeansInFlight(message, work, codes.nbytes, mean)

    def _travel(self, flat: Tensor, exchange: Callable[[Tensor], Work]) -> Iterator[Work]:
        """Exchange this rank's part of a flat tensor, and gather the others from the node."""
        bounds = split(len(flat), self._parts)
        slot = self.node.slot(self.node.rank) if self._parts > 1 else 0
        yield exchange(flat[bounds[slot] : bounds[slot + 1]])
        if self._parts > 1:
            yield self.node.all_gather(flat, bounds)

    def _decode(self, message: Sequence[Tensor], codes: Tensor, code: Code) -> Tensor:
        numel, nodes = sum(tensor.numel() for tensor in message), self.cross.size
        total = torch.zeros(numel, dtype=message[0].dtype, device=codes.device)
        for rank in range(nodes):
            received = codes[:, self.cross.slot(rank)].reshape(-1)
            for part, read in _with_codes(total, received, message, code):
                code.decode(read, part)
        return total.div_(nodes)


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    message: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        same = message and (tensor.dtype, tensor.device) == (message[0].dtype, message[0].device)
        if message and not (same and nbytes + tensor.nbytes <= MESSAGE_BYTES):
            yield message
            message, nbytes = [], 0
        message.append(tensor)
        nbytes += tensor.nbytes
    if message:
        yield message


def _by_tensor(flat: Tensor, message: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of a message with its part of a flat one, a view in its shape."""
    start = 0
    for tensor in message:
        yield tensor, flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


def _with_codes(
    flat: Tensor, codes: Tensor, message: Sequence[Tensor], code: Code
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the flat part of each tensor of a message, with the view of its code.

    A code is of one tensor: the largest of a chunk and the scale of a block are of like numbers.
    """
    start = 0
    for _, part in _by_tensor(flat, message):
        nbytes = code.nbytes(part.numel())
        yield part.view(-1), codes[start : start + nbytes]
        start += aligned(nbytes)
