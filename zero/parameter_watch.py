"""The trained parameters of this process: whether they have changed, and what trains them.

Buckets, flat memory and the optimizer's state hold elements in the order in which parameters lay in
memory when the optimizer was made. After a change an update would be written to other elements, or
to memory that no module reads.

A parameter has one optimizer at a time, since two would both take its gradient from
`parameter.grad`. So an optimizer that is given a parameter closes the one that has trained it so
far. That does not depend on who still holds the old one, or on garbage collection: all ranks close
it at one point.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zero.kernels import order

_KEY = "zero: optimizer"


class ParameterWatch:
    """The trained parameters, their memory, and their places in a model, if it is given. Local."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        # Each with its name; dtype, device and shape; strides and order in memory; and the address
        # of its flat memory, or None if it may lie anywhere.
        self._trained: list[tuple[Parameter, str, tuple[Any, ...], Any, Any, int | None]] = []
        self._places: list[tuple[dict[str, Any], str, object]] = []  # holder, key, what it holds

    def add(self, parameters: Mapping[str, Parameter], *, flat: bool) -> None:
        """Note parameters by name, which are views of flat memory if `flat`."""
        self._trained += [
            (p, name, _kind(p), p.stride(), order(p), p.data_ptr() if flat else None)
            for name, p in parameters.items()
        ]
        self._note_places()

    def check_kinds(self) -> None:
        """Raise RuntimeError for a parameter whose dtype, device or shape was changed."""
        for parameter, name, kind, *_ in self._trained:
            if _kind(parameter) != kind:
                now, before = (", ".join(map(str, each)) for each in (_kind(parameter), kind))
                _refuse(name, f"is of {now}, and was of {before}")

    def check(self) -> None:
        """Raise RuntimeError for a parameter that was changed, moved or replaced in the model."""
        self.check_kinds()
        for parameter, name, _, strides, memory_order, address in self._trained:
            if parameter.stride() != strides and order(parameter) != memory_order:
                _refuse(name, "has another memory format (channels_last, say) than")
            if address is not None and parameter.data_ptr() != address:
                _refuse(name, "has other memory than")
        if any(holder.get(key) is not held for holder, key, held in self._places):
            self._check_replaced()
            self._note_places()

    def _check_replaced(self) -> None:
        """Raise RuntimeError for a trained parameter that is not in the model any more.

        If another one that requires a gradient has its name.
        """
        assert self._model is not None, "no places are noted without a model"
        present = dict(self._model.named_parameters(remove_duplicate=False))
        ids = set(map(id, present.values()))
        for parameter, name, *_ in self._trained:
            other = present.get(name)
            if other is not None and other.requires_grad and id(parameter) not in ids:
                _refuse(
                    name, "is another object (assigned, moved, or loaded with assign=True) than"
                )

    def _note_places(self) -> None:
        self._places = [
            (holder, key, held)
            for module in (self._model.modules() if self._model is not None else ())
            for holder in (module._parameters, module._modules)
            for key, held in holder.items()
        ]


def _kind(parameter: Parameter) -> tuple[Any, ...]:
    return parameter.dtype, parameter.device, tuple(parameter.shape)


def _refuse(name: str, what: str) -> None:
    raise RuntimeError(
        f"parameter {name} {what} when the optimizer was made: move or change the model first, and "
        "make the optimizer after; write new values in place, as by parameter.copy_(values)"
    )


def check_free(parameters: Mapping[str, Parameter]) -> None:
    """Raise ValueError for a parameter whose optimizer cannot be replaced. Local."""
    for name, holder in _holders(parameters):
        if holder.schedule.replicas > 1:
            raise ValueError(
                f"parameter {name} is trained by an optimizer with sync=, and may differ between "
                "nodes: call exchange() and close() of that optimizer before another is made"
            )


def finish_gathers(parameters: Mapping[str, Parameter]) -> None:
    """Wait until parameters hold what the optimizers that have trained them have sent. Local."""
    for _, holder in _holders(parameters):
        holder.finish_gathers()


def take_over(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Parameter]) -> None:
    """Let a `ZeroOptimizer` train parameters, by name; close the others that did. Local."""
    for name, holder in _holders(parameters):
        holder.close(
            f"when another one was made that trains {name}, since a parameter has one optimizer at "
            "a time: use the new one, or give each optimizer parameters of its own"
        )
    for parameter in parameters.values():
        accumulation_node(parameter).metadata[_KEY] = optimizer


def accumulation_node(parameter: Parameter) -> Any:
    """Return the node of autograd that accumulates into `parameter.grad`.

    Its hooks run after all hooks on the parameter, which may change the gradient. Autograd keeps
    it only while it is in use: so does an optimizer, until it is closed.
    """
    with torch.enable_grad():
        function = parameter.expand_as(parameter).grad_fn
    assert function is not None, "the parameter requires a gradient"
    return function.next_functions[0][0]


def first_after_accumulation(parameter: Parameter, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook that runs before other `register_post_accumulate_grad_hook` of a parameter.

    Those of later calls follow too.
    """
    others = parameter._post_accumulate_grad_hooks
    handle = parameter.register_post_accumulate_grad_hook(hook)
    if others:
        hooks = parameter._post_accumulate_grad_hooks
        before = {key: hooks.pop(key) for key in [*hooks] if key != handle.id}
        hooks.update(before)
    return handle


def _holders(parameters: Mapping[str, Parameter]) -> list[tuple[str, Any]]:
    """Return the optimizers that train parameters now, each with the name of the first of these."""
    found: dict[int, tuple[str, Any]] = {}
    for name, parameter in parameters.items():
        holder = accumulation_node(parameter).metadata.get(_KEY)
        if holder is not None and not holder.closed:
            found.setdefault(id(holder), (name, holder))
    return list(found.values())
