"""Comparison of a model with what it was when its optimizer was made.

Buckets, flat memory and the optimizer's state hold elements in the order in which parameters lay in
memory then. After a change an update would be written to other elements, or to memory that no
module reads.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Parameter

from zero.kernels import order


class Trained(NamedTuple):
    """A parameter as it was when the optimizer was made."""

    name: str
    parameter: Parameter
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]
    order: tuple[int, ...]  # `zero.kernels.order`
    address: int | None  # of its flat memory; None if it may lie anywhere


class ParameterWatch:
    """The trained parameters, their memory, and their places in a model, if it is given. Local."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._trained: list[Trained] = []
        self._places: list[tuple[dict[str, Any], str, object]] = []  # holder, key, what it holds

    def add(self, parameters: Mapping[str, Parameter], *, flat: bool) -> None:
        """Note parameters by name, which are views of flat memory if `flat`."""
        self._trained += [
            Trained(
                name,
                parameter,
                parameter.dtype,
                parameter.device,
                parameter.shape,
                parameter.stride(),
                order(parameter),
                parameter.data_ptr() if flat else None,
            )
            for name, parameter in parameters.items()
        ]
        self._note_places()

    def check_kinds(self) -> None:
        """Raise RuntimeError for a parameter whose dtype, device or shape was changed."""
        for name, parameter, dtype, device, shape, *_ in self._trained:
            if parameter.dtype is not dtype:
                _refuse(name, f"is of {parameter.dtype}, and was of {dtype}")
            if parameter.device != device:
                _refuse(name, f"is on {parameter.device}, and was on {device}")
            if parameter.shape != shape:
                _refuse(name, f"has the shape {tuple(parameter.shape)}, and had {tuple(shape)}")

    def check(self) -> None:
        """Raise RuntimeError for a parameter that was changed, moved or replaced in the model."""
        self.check_kinds()
        for name, parameter, _, _, _, strides, memory_order, address in self._trained:
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
        for name, parameter, *_ in self._trained:
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


def _refuse(name: str, what: str) -> None:
    raise RuntimeError(
        f"parameter {name} {what} when the optimizer was made: move or change the model first, and "
        "make the optimizer after"
    )
