"""The slots of gradients: what `parameter.grad` is, in backward and when it has returned.

    slots      stages       after backward               in a further backward
    own        one rank     autograd's own tensor        autograd adds to it
    visible    0            the mean over ranks          autograd adds to it
    refused    1, 2         an `UnavailableGradient`     what autograd adds is kept apart

A parameter whose `grad` was set to None in between starts anew, as in torch.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from zero.kernels import uses

KEPT_VIEW = (
    "the script keeps a view of an earlier gradient of {name}, such as p.grad.detach() or "
    "p.grad.view(-1), into whose memory backward now writes another one: keep p.grad.clone(), or "
    "drop the view before"
)

NO_GRAPH = (
    "the gradient of {name} is a mean over ranks, of which p.grad has no graph for backward to go "
    "through: take the gradient by torch.autograd.grad(loss, parameters, create_graph=True) in "
    "place of backward(create_graph=True), and compute the loss of that"
)


class _MeanWithoutGraph(torch.autograd.Function):
    """Stands for the graph of a mean over ranks, in `parameter.grad`. Backward refuses it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, mean: Tensor, name: str) -> Tensor:
        """Return an alias of the mean, which requires a gradient as `anchor` does."""
        ctx.name = name
        return mean.data  # not detached: backward would raise that the mean has changed since

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(NO_GRAPH.format(name=ctx.name))


class UnavailableGradient(Tensor):
    """Stands for a gradient of which each rank keeps a shard, in `parameter.grad`. Has no values.

    Any operation on it raises RuntimeError with one sentence that names the alternatives, so that
    nothing reads a part of a gradient for the whole. It may be replaced by None, as `zero_grad`
    does, and autograd may accumulate into it, once in a backward: the new gradient is then
    `arrived`.
    """

    arrived: Tensor | None
    task: int  # autograd's number of the latest backward that has made the gradient
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
        self.arrived, self.task, self._name = None, -1, name
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
        leaves = tree_leaves((args, kwargs))
        own: UnavailableGradient = next(x for x in leaves if isinstance(x, UnavailableGradient))
        accumulates = func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
        # Later in a backward, a hook of the user's adds.
        if (
            accumulates
            and args[0] is own
            and torch._C._current_graph_task_id() not in {-1, own.task}
        ):
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


class Slots(ABC):
    """The `grad` of parameters, by name."""

    hides = True  # whether `pop` hides a gradient from autograd and the user until `publish`

    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = {}

    def add(self, name: str, parameter: Parameter) -> None:
        """Take over the `grad` of a parameter. A gradient that it has counts as assigned."""
        self.parameters[name] = parameter

    @property
    def filled(self) -> bool:
        """True if any parameter has a gradient."""
        return not all(map(self.dropped, self.parameters))

    def dropped(self, name: str) -> bool:
        """Return whether a parameter's `grad` is None."""
        return self.parameters[name].grad is None

    @abstractmethod
    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still what this object has made of it."""

    def has_gradient(self, name: str) -> bool:
        """Return whether a parameter has a gradient to take, which the user may have assigned."""
        return not self.dropped(name)

    def pop(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, and take it away."""
        parameter = self.parameters[name]
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def put(self, name: str, gradient: Tensor) -> None:
        """Give a parameter a gradient to take; adds to one that it has."""
        before = self.pop(name)
        self.parameters[name].grad = gradient if before is None else before + gradient

    def void(self) -> None:
        """Drop the `grad` of every parameter."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def close(self, unfinished: Collection[str]) -> None:
        """Leave `parameter.grad` to others, who are refused what is no gradient of a whole batch.

        `unfinished` are the names of parameters with a gradient that was not reduced.
        """
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and name in unfinished:
                parameter.grad = UnavailableGradient(parameter, name, 0)
            if isinstance(parameter.grad, UnavailableGradient):
                parameter.grad.outlive()


class OwnSlots(Slots):
    """Slots of a single rank's gradients: `parameter.grad` is autograd's own tensor."""

    hides = False

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, ReferenceType[Tensor]] = {}  # gradients that have been taken

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still the tensor that was taken."""
        seen = self._seen.get(name)
        return seen is not None and seen() is self.parameters[name].grad is not None

    def publish(self, name: str, gradient: Tensor) -> None:
        """Make `parameter.grad` a tensor that was taken."""
        self.parameters[name].grad, self._seen[name] = gradient, ref(gradient)


class VisibleSlots(Slots):
    """Slots of means that are whole on this rank: `parameter.grad` is a view of the mean.

    `places` are those of the means, by name. The user is warned of views that are kept of a mean
    after it was dropped, unless this rank is `silent`: they are about to change.

    A mean has no graph, also if its gradients had one, by backward(create_graph=True). What is
    computed of such a mean raises RuntimeError in its own backward, where autograd would take the
    mean for a constant.
    """

    accumulate = True  # autograd adds to what is published

    def __init__(self, places: Mapping[str, Tensor], *, silent: bool = False) -> None:
        super().__init__()
        self._places, self._silent = places, silent
        self._own_uses: dict[str, int] = {}  # of the memory of each place
        self._had_graph: set[str] = set()  # names of gradients that were taken with a graph
        self._shown: dict[str, ReferenceType[Tensor]] = {}  # aliases of them in `parameter.grad`

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still the view that was shown."""
        return self._alias(name) is self.parameters[name].grad is not None

    def pop(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, or its place if it is there; hide it until `publish`."""
        kept, gradient = self.keeps(name), super().pop(name)
        if kept:
            return self._places[name]
        if gradient is not None and gradient.requires_grad:
            self._had_graph.add(name)
        else:
            self._had_graph.discard(name)
        shown = self._shown.pop(name, None)
        held = shown() if shown is not None else None
        if held is not None:  # by the user, to whom the last gradient is left, as in torch
            held.data = held.clone()
        if (
            shown is not None
            and not self._silent
            and uses(self._places[name]) > self._own_uses[name]
        ):
            self._silent = True
            warnings.warn(KEPT_VIEW.format(name=name), stacklevel=2)
        return gradient

    adopt = pop

    def hold(self, name: str, taken: Tensor | None) -> None:
        """Show a gradient that a later backward reduces. It is in its place."""
        self.publish(name)

    def publish(self, name: str) -> None:
        """Make `parameter.grad` a view of the mean."""
        alias = self._alias(name)
        if alias is None:
            place = self._places[name]
            if name not in self._own_uses:
                self._own_uses[name] = uses(place)
            if name in self._had_graph:
                with torch.enable_grad():
                    anchor = torch.empty(0, device="cpu", requires_grad=True)
                    make = cast(Callable[..., Tensor], _MeanWithoutGraph.apply)
                    alias = make(anchor, place, name)
            else:
                alias = place.detach()
            self._shown[name] = ref(alias)
        self.parameters[name].grad = alias

    def _alias(self, name: str) -> Tensor | None:
        """Return the last gradient shown, unless it is gone, or `p.grad.data = t` has moved it."""
        shown = self._shown.get(name)
        alias = shown() if shown is not None else None
        return alias if alias is not None and alias.is_set_to(self._places[name]) else None


class RefusedSlots(Slots):
    """Slots of means of which this rank keeps a shard: `parameter.grad` refuses any use."""

    accumulate = False

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._stage = stage
        self._unavailable: dict[str, UnavailableGradient] = {}  # by parameter name

    def add(self, name: str, parameter: Parameter) -> None:
        """Take over the `grad` of a parameter. A gradient that it has counts as assigned."""
        super().add(name, parameter)
        self._unavailable[name] = UnavailableGradient(parameter, name, self._stage)

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still the refusal."""
        return self.parameters[name].grad is self._unavailable[name]

    def has_gradient(self, name: str) -> bool:
        """Return whether a parameter has a gradient to take: arrived, or assigned by the user."""
        arrived = self._unavailable[name].arrived is not None
        return arrived if self.keeps(name) else super().has_gradient(name)

    def pop(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, and refuse it to later hooks of this backward."""
        unavailable = self._unavailable[name]
        gradient = unavailable.arrived if self.keeps(name) else super().pop(name)
        self.publish(name)
        unavailable.task = torch._C._current_graph_task_id()
        return gradient

    def adopt(self, name: str) -> None:
        """Return None if the mean was dropped; raise RuntimeError if another one was assigned."""
        if not self.dropped(name):
            raise RuntimeError(
                f"a gradient of {name} was assigned after backward, but at stage {self._stage} "
                "each rank keeps a shard: assign it before backward, or use stage 0"
            )

    def hold(self, name: str, taken: Tensor | None) -> None:
        """Keep a gradient that a later backward adds to, and reduces, as arrived."""
        self._unavailable[name].arrived = taken

    def publish(self, name: str) -> None:
        """Make `parameter.grad` the refusal."""
        self.parameters[name].grad = self._unavailable[name]
        self._unavailable[name].arrived = None
