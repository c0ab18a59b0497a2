"""Collectives whose messages MPI takes from a device's memory, and puts there (CUDA-aware MPI).

The same steps as on the host, on device tensors: messages go point to point, also within the node,
and sums are made on the device, in fp32 or wider, beside the caller's stream. Never a non-blocking
collective of MPI's on device memory, which crashes in Open MPI; and nobody waits for the device:
steps ask for a mark where MPI is to read what was computed, or to write where something was read.
"""

from torch import Tensor

from mntrain.comm.device_copy import DeviceCopy, DeviceEvent
from mntrain.comm.pending import Steps
from mntrain.comm.staging import StreamOrderedWork
from zero.collectives import Work


class DeviceAccess:
    """A tensor of a device that MPI works on directly."""

    reachable = False

    def __init__(self, tensor: Tensor, copier: DeviceCopy, ready: DeviceEvent) -> None:
        self.host, self._copier, self._ready = tensor, copier, ready

    def begin(self) -> None:
        """See `Loan.begin`: the content stays where it is."""

    def here(self) -> bool:
        """See `Loan.here`: the caller's work on the tensor is done."""
        return self._ready.over()

    def give_back(self) -> Work:
        """See `Loan.give_back`."""
        with self._copier.beside():
            return StreamOrderedWork([self._copier.mark()])


class SideStream:
    """Runs steps beside the caller's work on the device, and knows when they are through."""

    def __init__(self, copier: DeviceCopy) -> None:
        self._copier = copier

    def fence(self) -> Steps[None]:
        """See `Tools.fence`."""
        yield self._copier.mark().over

    def run(self, steps: Steps[None]) -> Steps[None]:
        """The steps, each given to the device beside what the caller gives it."""
        while True:
            with self._copier.beside():
                ask = next(steps, None)
            if ask is None:
                return
            yield ask
