"""Collectives of a device's tensors whose node part stays on the devices: NCCL there, MPI between.

    all-reduce       lanes to their owners, who add | all-reduce of a lane     | lanes to everyone
    reduce-scatter   shards to their owners, ditto  | reduce-scatter of a lane |
    all-gather       (one node)                                                | shards to everyone

Within the node everything is one exchange of messages from device to device, and sums are made by
their owner in the order of members, in fp32 or wider: so they have the bits of the other ways. All
nodes have as many ranks as one another: a lane is owned by one rank of each.

On one node everything is handed to the devices as the caller starts a collective, and so in one
order on all ranks. On several, an all-reduce hands its lanes out when somebody waits for it, and so
all ranks have to start and wait in one order; an all-gather, for which each waits when it needs
something, is left to host memory, where the wire limits it as well.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from mntrain.comm.device_copy import DeviceCopy, DeviceEvent
from mntrain.comm.topology import Topology
from zero.collectives import Collectives, CompletedWork, Work
from zero.kernels import Kernels
from zero.layout import split

Messages = Sequence[tuple[int, Tensor]]  # pairs of a local rank and a flat tensor


class DeviceGroup(Protocol):
    """The devices of a node's ranks, as one of them sees them."""

    rank: int
    size: int

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Send and receive, all at once, in the order of the caller's work on the device.

        Collective over the node. Between two ranks messages arrive in the order of the lists.
        """

    def close(self) -> None:
        """Give back what it has, after all that was exchanged. Collective over the node."""


class NodeFirstCollectives:
    """The three verbs. `cross` are the collectives of the ranks with this local rank, by node."""

    def __init__(
        self,
        group: DeviceGroup,
        cross: Collectives,
        topology: Topology,
        *,
        slots: Sequence[int],
        copier: DeviceCopy,
        kernels: Kernels,
    ) -> None:
        self._group, self._cross, self._copier = group, cross, copier
        self._kernels = kernels
        self._peers = [peer for peer in range(group.size) if peer != group.rank]
        self._alone = cross.size == 1
        self.verbs = {"all_reduce", "reduce_scatter"} | ({"all_gather"} if self._alone else set())
        # By local rank: the slots of the ranks that have it, node by node.
        self._columns = [[slots[node[i]] for node in topology.nodes] for i in range(group.size)]

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None) -> Work:
        """See `Collectives.all_reduce`."""
        marks = split(len(tensor), self._group.size)
        lanes = [[tensor[low:high]] for low, high in pairwise(marks)]
        caller = self._copier.mark()
        with self._copier.beside():
            caller.order()
            self._sum(lanes)
            work = self._cross.all_reduce(lanes[self._group.rank][0], wire)
        return self._ended(NodeFirstWork(self, work, lanes, ()))

    def reduce_scatter(
        self, tensor: Tensor, bounds: Sequence[int], wire: torch.dtype | None
    ) -> Work:
        """See `Collectives.reduce_scatter`."""
        lanes = self._shards(tensor, bounds)
        mine = lanes[self._group.rank]
        caller = self._copier.mark()
        with self._copier.beside():
            caller.order()
            self._sum(lanes)
            together, places = _packed(mine)
            work = self._cross.reduce_scatter(together, _bounds(mine), wire)
        node = self._cross.rank
        return self._ended(NodeFirstWork(self, work, None, [(places[node], mine[node])]))

    def all_gather(self, tensor: Tensor, bounds: Sequence[int]) -> Work:
        """See `Collectives.all_gather`: on one node."""
        lanes = self._shards(tensor, bounds)
        caller = self._copier.mark()
        with self._copier.beside():
            caller.order()
        return self._ended(NodeFirstWork(self, CompletedWork(), lanes, ()))

    def _ended(self, rest: "NodeFirstWork") -> "NodeFirstWork":
        """Whatever needs no other node is given to the device at once."""
        if self._alone:
            rest.finish()
        return rest

    def finish(
        self,
        work: Work,
        lanes: list[list[Tensor]] | None,
        unpacked: Sequence[tuple[Tensor, Tensor]],
    ) -> DeviceEvent:
        """What is left to do when a lane has crossed the nodes; the mark of its end."""
        with self._copier.beside():
            work.wait()
            for source, place in unpacked:
                place.copy_(source)
            if lanes is not None:
                self._hand_out(lanes)
            return self._copier.mark()

    def _sum(self, lanes: list[list[Tensor]]) -> None:
        """Leave the sums over the node of this rank's lane in its tensors."""
        mine = lanes[self._group.rank]
        theirs = {peer: [torch.empty_like(part) for part in mine] for peer in self._peers}
        sends = [(peer, part) for peer in self._peers for part in lanes[peer]]
        receives = [(peer, room) for peer in self._peers for room in theirs[peer]]
        self._group.exchange(sends, receives)
        for index, total in enumerate(mine):
            addends = [
                total if local == self._group.rank else theirs[local][index]
                for local in range(self._group.size)
            ]
            self._kernels.add(addends, total)

    def _hand_out(self, lanes: list[list[Tensor]]) -> None:
        """Send this rank's lane to the node's other ranks, and receive theirs."""
        mine = lanes[self._group.rank]
        sends = [(peer, part) for peer in self._peers for part in mine]
        receives = [(peer, part) for peer in self._peers for part in lanes[peer]]
        self._group.exchange(sends, receives)

    def _shards(self, tensor: Tensor, bounds: Sequence[int]) -> list[list[Tensor]]:
        """By local rank, node by node: the shard of the rank there."""
        return [
            [tensor[bounds[slot] : bounds[slot + 1]] for slot in column] for column in self._columns
        ]


class NodeFirstWork:
    """A collective whose last part is given to the device at once, or when somebody waits."""

    def __init__(
        self,
        first: NodeFirstCollectives,
        work: Work,
        lanes: list[list[Tensor]] | None,
        unpacked: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._first, self._work = first, work
        self._lanes, self._unpacked = lanes, unpacked
        self._done: DeviceEvent | None = None

    def finish(self) -> DeviceEvent:
        """Give it to the device, unless it has been."""
        if self._done is None:
            self._done = self._first.finish(self._work, self._lanes, self._unpacked)
        return self._done

    def wait(self) -> None:
        """See `Work.wait`: the caller's stream comes after it."""
        self.finish().order()


def _packed(parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copies of tensors end to end, in all and one by one."""
    together = torch.cat(list(parts))
    return together, list(together.split([len(part) for part in parts]))


def _bounds(parts: Sequence[Tensor]) -> list[int]:
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + len(part))
    return bounds
