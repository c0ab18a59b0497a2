"""Parameters that are in flight: every operation on one waits until it has arrived."""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# They read no values. Not `size` or `dim`, after which torch.vmap reads values without asking.
_PROPERTIES: tuple[Any, ...] = (
    Tensor.requires_grad,
    Tensor.is_leaf,
    Tensor.shape,
    Tensor.dtype,
    Tensor.device,
)
_GRAD: Any = Tensor.grad
_METADATA = frozenset(
    [
        *(each.__get__ for each in (_GRAD, *_PROPERTIES)),
        _GRAD.__set__,
        _GRAD.__delete__,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
    ]
)


class ArrivingParameter(Parameter):
    """The class of a parameter while it is in flight: operations in Python call `arrive` first.

    Also those on references that were kept from before, as in lists and parameter groups. C++ code
    that is handed the tensor reads it without asking: a scripted module, the transforms of
    torch.func, extensions.
    """

    arrive: Callable[[], None]  # waits, and gives the parameter its own class back

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for all that are among the arguments, and call the function."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        arriving = list(_among([args, kwargs or {}]))
        if not arriving:
            raise RuntimeError(
                f"{func} reads parameters that are in flight (overlap_forward=True): call "
                "optimizer.wait_for_parameters() before"
            )
        for parameter in arriving:
            arrive = parameter.__dict__.get("arrive")  # None: it came with another one, or thread
            if arrive is not None:
                arrive()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Copy as a parameter that has arrived."""
        self.arrive()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a parameter that has arrived."""
        self.arrive()
        return self.__reduce_ex__(protocol)


def depart(parameter: Parameter, arrive: Callable[[], None]) -> None:
    """Make operations on a parameter call `arrive`, until `land`. Not for classes of the user's."""
    if type(parameter) is Parameter:
        parameter.__class__ = ArrivingParameter
        parameter.arrive = arrive  # type: ignore[attr-defined]


def land(parameter: Parameter) -> None:
    """Give a parameter its own class back."""
    if type(parameter) is ArrivingParameter:
        parameter.__class__ = Parameter  # type: ignore[assignment]
        del parameter.arrive


def compiles() -> bool:
    """Return whether torch.compile was called in this process.

    Compiled code reads parameters without asking.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return any(map(callable, getattr(compiler, "cached_backends", {}).values()))


def _among(value: Any) -> Iterator[ArrivingParameter]:
    """Yield the parameters in flight among arguments, also within containers."""
    if type(value) is ArrivingParameter:
        yield value
    elif isinstance(value, dict):
        yield from _among(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _among(item)
