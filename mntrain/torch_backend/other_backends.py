"""Backends of torch beside mntrain in one process group, as of `cpu:mntrain,cuda:nccl`."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world


class OtherBackends:
    """The groups that collectives of some devices' tensors go to. Construction is local.

    Torch takes a process group written in Python for all devices, whatever it was asked for. So
    `group` has to pass on what is not for it. `store` is of this group alone, and `timeout` is the
    group's.
    """

    def __init__(self, group: Any, store: Store, timeout: timedelta) -> None:
        self._group, self._store, self._timeout = group, store, timeout
        self._names: dict[str, str] | None = None  # by device, once torch knows the group
        self._made: dict[str, ProcessGroup] = {}
        self._lock = threading.Lock()  # threads make one group

    def of(self, device: str) -> ProcessGroup | None:
        """Return the group for a type of device; None if that is mntrain's.

        The first call for a device makes it, which with gloo is collective. Raises ValueError for a
        backend that is neither nccl nor gloo.
        """
        if self._names is None and self._group in _world.pg_map:
            pairs = [it.split(":") for it in dist.get_backend_config(self._group).split(",")]
            self._names = {at: name for at, name in pairs if name != self._group.getBackendName()}
        if not self._names or device not in self._names:
            return None
        with self._lock:
            if device not in self._made:
                self._made[device] = self._make(device, self._names[device])
            return self._made[device]

    def of_call(self, arguments: Sequence[Any]) -> ProcessGroup | None:
        """Return the group for a call with these arguments, by the first tensor among them."""
        if self._names == {}:  # as nearly always
            return None
        tensor = _first_tensor(arguments)
        return None if tensor is None else self.of(tensor.device.type)

    def shutdown(self) -> None:
        """End all groups."""
        for group in self._made.values():
            group.shutdown()
        self._made.clear()

    def _make(self, device: str, name: str) -> ProcessGroup:
        rank, size = self._group.rank(), self._group.size()
        store = PrefixStore(f"{name} for {device}", self._store)
        kinds = ProcessGroup.BackendType
        backend: Any
        if name == dist.Backend.NCCL:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            kind, backend = kinds.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
        elif name == dist.Backend.GLOO:
            kind = kinds.GLOO
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
        else:
            raise ValueError(f"backend {name} for {device}: beside mntrain, give nccl or gloo")
        backend._set_sequence_number_for_group()
        group = ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device), kind, backend)
        return group


def _first_tensor(values: Sequence[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, list | tuple) and (found := _first_tensor(value)) is not None:
            return found
    return None
