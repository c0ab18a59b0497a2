"""Means over nodes of values that each node computes for its tensors, in messages of several.

    stages 1, 2      a rank exchanges with the ranks of the other nodes that update the same slices
    stage 0          each rank of a node exchanges a part of every message, and the ranks of the
                     node gather the parts

A message is an all-reduce, or an all-gather of codes, which all nodes decode and add in the order
of nodes. Sums are in the dtype of the tensors, fp32 or wider. All replicas get the same bits.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork
from zero.comm_hooks.codes import ALIGNED_BYTES, Code, aligned
from zero.layout import MIB, split

MESSAGE_BYTES = 25 * MIB  # of tensors that travel together


class Message:
    """Means of some tensors' values, on their way."""

    def __init__(
        self, tensors: Sequence[Tensor], work: Work, nbytes: int, mean: Callable[[], Tensor]
    ) -> None:
        self.nbytes = nbytes  # that it holds until it has arrived
        self._tensors, self._work, self._mean = tensors, work, mean

    def arrived(self) -> bool:
        """Return whether `means` waits for no other node. Local."""
        return self._work.done()

    def means(self, scale: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait, and yield each tensor with `scale` times its mean over nodes. Collective.

        The mean is new, and has the tensor's shape.
        """
        self._work.wait()
        mean = self._mean()
        if scale != 1.0:
            mean.mul_(scale)
        for tensor, part in zip(self._tensors, _parts(mean, self._tensors), strict=True):
            yield tensor, part.view(tensor.shape)


class NodeMeans:
    """Sends messages to the other nodes.

    `node` are the ranks of this node, and `cross` one rank of each node, in the order of nodes.
    `sharded` states that each rank of a node has tensors of its own; otherwise all have the same.
    """

    def __init__(self, node: Collectives, cross: Collectives, *, sharded: bool) -> None:
        self._node, self._cross = node, cross
        self._parts = 1 if sharded else node.size  # of a message, each sent by a rank of the node

    def of(
        self,
        tensors: Sequence[Tensor],
        value: Callable[[Tensor], Tensor],
        code: Code | None = None,
        keep: Callable[[Tensor, Tensor], object] | None = None,
        *,
        weight: float = 1.0,
        scale: float = 1.0,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor with the mean of its values, as `Message.means` does. Collective.

        One message travels while another is used. The arguments are those of `send` and `means`.
        """
        sent: Message | None = None
        for following in self.send(tensors, value, code, keep, weight=weight):
            if sent is not None:
                yield from sent.means(scale)
            sent = following
        if sent is not None:
            yield from sent.means(scale)

    def send(
        self,
        tensors: Sequence[Tensor],
        value: Callable[[Tensor], Tensor],
        code: Code | None = None,
        keep: Callable[[Tensor, Tensor], object] | None = None,
        *,
        weight: float = 1.0,
    ) -> Iterator[Message]:
        """Start messages, one for each that is taken from the iterator. Collective.

        `value` returns what is sent for a tensor, in its shape and dtype, times `weight`, which is
        above 0. With a `code`, `keep` gets each tensor with the part of its value that its code
        lacks, in its shape. Complex values travel without.
        """
        for message in _messages(tensors):
            flat = torch.cat([value(tensor).detach().reshape(-1) for tensor in message])
            if weight != 1.0:
                flat.mul_(weight)
            if code is None or flat.is_complex():
                sent = self._send_sum(message, flat)
                left = None
            else:
                sent = self._send_codes(message, flat, code)
                left = flat if weight == 1.0 else flat.div_(weight)
            if keep is not None:
                left = torch.zeros_like(flat) if left is None else left
                for tensor, part in zip(message, _parts(left, message), strict=True):
                    keep(tensor, part.view(tensor.shape))
            yield sent

    def nbytes(self, tensors: Sequence[Tensor], code: Code | None = None) -> int:
        """Return the bytes that messages of tensors hold until they have arrived. Local."""
        total = 0
        for message in _messages(tensors):
            if code is None or message[0].is_complex():
                total += sum(tensor.nbytes for tensor in message)
            else:
                total += self._cross.size * self._code_bytes(message, code)
        return total

    def _send_sum(self, message: Sequence[Tensor], flat: Tensor) -> Message:
        mean = lambda: flat.div_(self._cross.size)  # noqa: E731
        return Message(message, ChainedWork(self._sum(flat)), flat.nbytes, mean)

    def _sum(self, flat: Tensor) -> Iterator[Work]:
        """Sum a flat tensor over nodes, in place."""
        if self._parts == 1:
            yield self._cross.all_reduce(flat)
            return
        bounds, slot = split(flat.numel(), self._parts), self._node.slot(self._node.rank)
        yield self._cross.all_reduce(flat[bounds[slot] : bounds[slot + 1]])
        yield self._node.all_gather(flat, bounds)

    def _send_codes(self, message: Sequence[Tensor], flat: Tensor, code: Code) -> Message:
        """Encode values, and leave in `flat` what the codes lack."""
        nodes = self._cross.size
        own = torch.zeros(self._code_bytes(message, code), dtype=torch.uint8, device=flat.device)
        for part, written in _with_codes(flat, own, message, code):
            code.encode(part, written)
        codes = own.new_empty(self._parts, nodes, len(own) // self._parts)
        codes[:, self._cross.slot(self._cross.rank)] = own.view(self._parts, -1)
        dtype, numel = flat.dtype, len(flat)

        def mean() -> Tensor:
            total = torch.zeros(numel, dtype=dtype, device=codes.device)
            for rank in range(nodes):
                received = codes[:, self._cross.slot(rank)].reshape(-1)
                for part, read in _with_codes(total, received, message, code):
                    code.decode(read, part)
            return total.div_(nodes)

        return Message(message, ChainedWork(self._gather(codes)), codes.nbytes, mean)

    def _gather(self, codes: Tensor) -> Iterator[Work]:
        """Gather codes by (part, node, byte): this rank's part of all nodes, then the others."""
        flat, (parts, nodes, nbytes) = codes.view(-1), codes.shape
        slot = self._node.slot(self._node.rank) if parts > 1 else 0
        yield self._cross.all_gather(codes[slot].view(-1), [i * nbytes for i in range(nodes + 1)])
        if parts > 1:
            yield self._node.all_gather(flat, [i * nodes * nbytes for i in range(parts + 1)])

    def _code_bytes(self, message: Sequence[Tensor], code: Code) -> int:
        """Return the bytes of a message's codes, in equal parts that are aligned."""
        nbytes = sum(aligned(code.nbytes(tensor.numel())) for tensor in message)
        unit = self._parts * ALIGNED_BYTES
        return -(-nbytes // unit) * unit


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors of one dtype and device that travel together."""
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


def _parts(flat: Tensor, message: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the views of a flat tensor that stand for the tensors of a message."""
    parts: Sequence[Tensor] = flat.split([tensor.numel() for tensor in message])
    return parts


def _with_codes(
    flat: Tensor, codes: Tensor, message: Sequence[Tensor], code: Code
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the part of each tensor of a message in a flat tensor, with the view of its code."""
    start = 0
    for part in _parts(flat, message):
        nbytes = code.nbytes(len(part))
        yield part, codes[start : start + nbytes]
        start += aligned(nbytes)
