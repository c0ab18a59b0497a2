"""Who moves tensors between the devices of a node, and the cross group that goes with it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mntrain.comm.algorithm_table import AlgorithmTable
from mntrain.comm.collectives import Devices, WorldCollectives
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator
from mntrain.comm.nccl import NcclGroup, bindings
from mntrain.comm.node_first import DeviceGroup, NodeFirstCollectives
from mntrain.comm.topology import Topology


def nccl(node: Communicator, devices: Devices) -> DeviceGroup:
    """The GPUs of a node, by NCCL. Collective over the node; blocks."""
    return NcclGroup(node, devices.device)


@dataclass
class NodeGroupFactory:
    """Makes what `nodefirst` needs when it is wanted, and frees it.

    `check` raises ImportError where `group` cannot even be tried.
    """

    world: Communicator
    node: Communicator
    topology: Topology
    progress: ProgressEngine
    devices: Devices
    group: Callable[[Communicator, Devices], DeviceGroup] = nccl
    check: Callable[[], object] = bindings
    _group: DeviceGroup | None = None
    _comms: list[Communicator] = field(default_factory=list)

    def connect(self) -> None:
        """Make the group. Collective over the node; blocks; raises what the group raises."""
        if self._group is None:
            make = self.group
            self._group = self.progress.call(lambda: make(self.node, self.devices)).wait()

    def join(self) -> NodeFirstCollectives:
        """Collectives that go over the connected node first. Collective over the world."""
        rank, group = self.world.rank, self._group
        assert group is not None
        local_rank, nodes = self.topology.local_rank(rank), len(self.topology.nodes)
        cross, alone = self.progress.call(
            lambda: (
                self.world.split(local_rank, self.topology.node(rank), "cross"),
                self.world.split(rank, 0, "alone"),
            )
        ).wait()
        self._comms = [cross, alone]
        cross.traffic = self.world.traffic
        singles = Topology(tuple((node,) for node in range(nodes)))
        collectives = self.progress.call(
            lambda: WorldCollectives(
                cross,
                alone,
                singles,
                self.progress,
                self.devices,
                table=AlgorithmTable.always("flat"),
            )
        ).wait()
        return NodeFirstCollectives(
            group,
            collectives,
            self.topology,
            slots=self.topology.slots,
            copier=self.devices.copier,
            kernels=self.devices.kernels,
        )

    def close(self) -> None:
        """Free what was made. Collective."""
        if self._group is not None:
            self._group.close()
            self._group = None
        for comm in self._comms:
            self.progress.call(comm.free).wait()
        self._comms = []
