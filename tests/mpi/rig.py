"""Collectives of a world whose ranks have an emulated device each."""

from contextlib import ExitStack

import pytest
from devices import GlooGroup, LateGlooGroup, PromptDevice, late_add

import mntrain
from mntrain.comm import nccl, transport
from mntrain.comm.ticket import AlgorithmChoice
from mntrain.comm.transport import TransportContext, select_transport
from mntrain.comm.world_collectives import WorldCollectives
from zero.kernels import add

BUFFER_BYTES = 4096
TRANSPORTS = ("host", "cuda-aware", "nccl")


class Rig:
    """Collectives of a world whose ranks have an emulated device each."""

    def __init__(self, ranks_per_node, device):
        self.world = mntrain.init(ranks_per_node=ranks_per_node)
        self.device, self.progress = device, self.world._engine
        self.late = not isinstance(device, PromptDevice)
        device.add, device.buffer_bytes = late_add(device) if self.late else add, BUFFER_BYTES
        self.comm = self.on_thread(lambda: self.world._comm.split(0, self.world.rank, "test"))
        self.collectives = self.on_thread(
            lambda: WorldCollectives(
                self.comm,
                self.world._node,
                self.world.topology,
                self.progress,
                self.device,
                choice=AlgorithmChoice("lanes"),
            )
        )
        self.resources = ExitStack()

    def on_thread(self, function):
        return self.progress.call(function).wait()

    def connect(self, node, device):
        return LateGlooGroup(node, self.device) if self.late else GlooGroup(node, device)

    def select(
        self,
        name,
        gpus=None,
        connect=None,
        use=lambda group, device: None,
        probe=lambda device: "",
    ):
        """Use a transport and return its explanation."""
        context = TransportContext(
            self.comm,
            self.world._node,
            self.world.topology,
            self.progress,
            self.device,
            gpus or [f"gpu {rank}" for rank in range(self.world.size)],
            self.resources,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nccl, "connect", connect or self.connect)
            patch.setattr(nccl, "use", use)
            patch.setattr(transport, "probe_device_memory", probe)
            selected = select_transport(name, context)
        self.collectives = self.collectives.replace(
            transport=selected.name, node_first=selected.node_first
        )
        return selected.line

    def use(self, name):
        """Return the collectives by a transport; skip a layout that it does not support."""
        try:
            self.select(name)
        except ValueError as error:
            pytest.skip(str(error))
        return self.collectives

    def close(self):
        self.resources.close()
        self.on_thread(self.comm.free)
        self.world.close()
        self.device.close()
