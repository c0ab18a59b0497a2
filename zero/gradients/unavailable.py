"""The `grad` of parameters whose gradients are sharded: it refuses every use."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter


class UnavailableGradient(Tensor):
    """Stands for a gradient of which each rank keeps a shard, in `parameter.grad`. Has no values.

    Any operation on it raises RuntimeError with one sentence that names the alternatives, so that
    nothing reads a part of a gradient for the whole. It may be replaced by None, as `zero_grad`
    does, and autograd may accumulate into it: the new gradient is then `arrived`.
    """

    arrived: Tensor | None
    _name: str
    _message: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: Parameter, name: str, stage: int) -> "UnavailableGradient":
        """Return a gradient for a parameter, without memory."""
        self: UnavailableGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self.arrived, self._name = None, name
        self._message = (
            f"the gradient of {name} is sharded over ranks (stage {stage}): use "
            "optimizer.clip_grad_norm_, optimizer.scale_gradients_, or "
            "optimizer.full_gradient(parameter), loss_scale= for a GradScaler, and "
            "optimizer.zero_grad(); or stage 0"
        )
        return self

    def outlive(self) -> None:
        """Say, from now on, that the optimizer of this gradient is closed."""
        self.arrived = None
        self._message = (
            f"the gradient of {self._name} is of an optimizer that is closed, and was sharded or "
            "not reduced: call model.zero_grad() before the next backward or step"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Keep what autograd adds; raise RuntimeError for anything else."""
        own: UnavailableGradient = _first([*args, *(kwargs or {}).values()])
        accumulates = func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
        if accumulates and args[0] is own and torch._C._current_graph_task_id() != -1:
            arrived: Tensor = args[1].detach()  # it may have a graph of its own
            own.arrived = arrived if own.arrived is None else own.arrived.add_(arrived)
            return own  # type: ignore[no-any-return]
        raise RuntimeError(own._message)

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(self._message)

    tolist = numpy = item = __float__ = __bool__ = refuse

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Return the sentence that other uses raise."""
        return f"<{self._message}>"


def _first(args: Sequence[Any]) -> UnavailableGradient:
    for arg in args:
        if isinstance(arg, UnavailableGradient):
            return arg
        if isinstance(arg, list | tuple):
            for item in arg:
                if isinstance(item, UnavailableGradient):
                    return item
    raise AssertionError("a dispatch has an argument of the class")
