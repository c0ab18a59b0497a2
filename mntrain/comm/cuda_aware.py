"""Collectives over CUDA-aware MPI, which reads and writes device memory.

The steps are those of host tensors. All messages are point to point, within the node as well:
non-blocking collectives of device memory crash in Open MPI. Sums are made on the device, in fp32 or
wider, on a side stream. The host does not wait for the device: where MPI is to read a computed
result, or to overwrite memory that a kernel reads, a step polls an event.
"""

from torch import Tensor

from mntrain.comm.device_copy import DeviceCopy, DeviceEvent
from mntrain.comm.pending import Steps
from mntrain.comm.staging import StreamOrderedWork
from zero.collectives import Work


class DeviceAccess:
    """Access to a device tensor that MPI uses in place."""

    reachable = False

    def __init__(self, tensor: Tensor, copier: DeviceCopy, ready: DeviceEvent) -> None:
        self.host, self._copier, self._ready = tensor, copier, ready

    def begin(self) -> None:
        """Do nothing: the content stays where it is."""

    def here(self) -> bool:
        """Return True when the caller's work on the tensor is done."""
        return self._ready.query()

    def give_back(self) -> Work:
        """Return work that ends with the side stream's work so far."""
        with self._copier.side_stream():
            return StreamOrderedWork([self._copier.record_event()])


class SideStream:
    """Runs the steps of a collective on a side stream of the device."""

    def __init__(self, copier: DeviceCopy) -> None:
        self._copier = copier

    def fence(self) -> Steps[None]:
        """Wait until the work given to the current stream so far is done."""
        yield self._copier.record_event().query

    def run(self, steps: Steps[None]) -> Steps[None]:
        """Run each step with the side stream as the current one."""
        while True:
            with self._copier.side_stream():
                condition = next(steps, None)
            if condition is None:
                return
            yield condition
