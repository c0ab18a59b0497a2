"""NCCL among the GPUs of a node, by CuPy's bindings; its ranks find each other over MPI.

NCCL moves bytes here: the sends and receives of one call form a group, which starts together.
Source: NCCL's user guide, "Point-to-point communication" and "Group calls".
"""

from typing import Any

import torch

from mntrain.comm.mpi import Communicator
from mntrain.comm.node_first import Messages


class NcclGroup:
    """See `nodefirst.NodeGroup`. Construction is collective over the node group, and blocks.

    Each rank has a GPU of its own. Raises ImportError where there is no CuPy, or no NCCL for it.
    """

    def __init__(self, node: Communicator, device: torch.device) -> None:
        self.rank, self.size = node.rank, node.size
        self._device = device
        self._nccl = nccl = bindings()
        name, why = node.gather_objects(_name(nccl) if node.rank == 0 else None)[0]
        if why:
            raise RuntimeError(why)
        with torch.cuda.device(device):
            self._comm = nccl.NcclCommunicator(node.size, name, node.rank)

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """See `nodefirst.NodeGroup.exchange`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        nccl = self._nccl
        calls = [(self._comm.send, sends), (self._comm.recv, receives)]
        nccl.groupStart()
        try:
            for call, messages in calls:
                for peer, tensor in messages:
                    if tensor.numel():
                        nbytes = tensor.numel() * tensor.element_size()
                        call(tensor.data_ptr(), nbytes, nccl.NCCL_UINT8, peer, stream)
        finally:
            nccl.groupEnd()

    def close(self) -> None:
        """Give the communicator back. After all that was exchanged."""
        torch.cuda.synchronize(self._device)
        self._comm.destroy()


def _name(nccl: Any) -> tuple[Any, str]:
    """A new group's name, or why there is none: who waits for it is to know."""
    try:
        return nccl.get_unique_id(), ""
    except Exception as error:  # CuPy's own
        return None, f"NCCL does not start: {error}"


def bindings() -> Any:
    """CuPy's NCCL module. Local; raises ImportError, which says what to install."""
    try:
        from cupy.cuda import nccl  # type: ignore[import-not-found]  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"NCCL is used through CuPy, and there is none: {error}; pip install 'mntrain[cuda12]'"
        ) from None
    if not nccl.available:
        raise ImportError("CuPy finds no NCCL here: pip install nvidia-nccl-cu12")
    return nccl
