"""The memory of a forward and backward, measured on tensors without memory."""

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mntrain.tasks import Task
from mntrain.train.forward import Precision, recompute_regions


class _LiveTensors(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations make, until they are gone."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: t for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returns."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            self._now -= nbytes
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self._now += nbytes
        self.peak = max(self.peak, self._now)


def activation_bytes(
    task: Task, model: nn.Module, batch: Any, precision: Precision, *, recompute: bool
) -> int:
    """Return the most bytes that a forward and backward of a batch take at a time. Local.

    Beside parameters, buffers, the batch and gradients that backward has finished. On tensors
    without memory, as on a CPU; the model, which may be on the meta device, and the batch stay as
    they are. Raises what the task raises on such tensors.
    """
    mode = FakeTensorMode()
    fake, given = _without_memory(model, mode), tree_map(lambda x: _fake(x, mode), batch)
    with mode:
        if recompute:
            recompute_regions(task.regions(fake))
        for parameter in fake.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)
        tensors = [tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor)]
        live = _LiveTensors([*fake.parameters(), *fake.buffers(), *tensors])
        with live:
            precision.loss(task, fake, given, torch.device("cpu")).mean.backward()
    return live.peak


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    """Return a tensor of the CPU without memory, or another value as it is."""
    if not isinstance(value, Tensor):
        return value
    return FakeTensor(mode, value.detach().to("meta"), torch.device("cpu"))


def _without_memory(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model whose parameters and buffers have no memory."""
    made: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        fake = _fake(tensor, mode)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        made[id(tensor)] = fake
    return copy.deepcopy(model, made)
