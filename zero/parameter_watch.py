"""The parameters and buffers of this process: whether they have changed, and what trains them.

Buckets, flat memory and the optimizer's state hold elements in the order in which parameters lay in
memory when the optimizer was made. After a change an update would be written to other elements, or
to memory that no module reads.

A parameter has one optimizer at a time, since two would both take its gradient from
`parameter.grad`. So an optimizer that is given a parameter closes the one that has trained it so
far. That does not depend on who still holds the old one, or on garbage collection: all ranks close
it at one point.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from zero.collectives import Collectives, broadcast_from_rank_0
from zero.kernels import order

_KEY = "zero: optimizer"
BUFFERS = "buffers of the model"  # in errors about collectives that differ


class ParameterWatch:
    """The trained parameters, their memory, and their places in groups and in a model. Local.

    A model need not be given.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._modules: list[nn.Module] = []  # of the model
        self.others: dict[str, Parameter] = {}  # of the model, that another one may train
        self.left: frozenset[str] = frozenset()  # of them, that one trained before
        # Each with its name; dtype, device and shape; strides and order in memory; and the address
        # of its flat memory, or None if it may lie anywhere.
        self._trained: list[tuple[Parameter, str, tuple[Any, ...], Any, Any, int | None]] = []
        self._places: list[tuple[dict[str, Any], str, object]] = []  # holder, key, what it holds
        self._count = 0  # of the places in the model
        self._frozen: dict[str, Parameter] = {}  # that were given, but required no gradient
        self._groups: list[list[Parameter]] = []  # the parameters of each group

    def add(self, parameters: Mapping[str, Parameter], *, flat: bool) -> None:
        """Note parameters by name, which are views of flat memory if `flat`."""
        self._trained += [
            (p, name, _kind(p), p.stride(), order(p), p.data_ptr() if flat else None)
            for name, p in parameters.items()
        ]
        self._note_places()

    def note_frozen(self, groups: Iterable[dict[str, Any]]) -> None:
        """Note the parameters of named groups that require no gradient, and are not trained."""
        for group in groups:
            self._frozen |= {name: p for name, p in group["params"] if not p.requires_grad}

    def unfrozen(self) -> list[str]:
        """Return the parameters that require a gradient only now, once, unless they are trained."""
        found = [name for name, p in self._frozen.items() if p.requires_grad]
        for name in found:
            del self._frozen[name]
        trained = {name for _, name, *_ in self._trained} if found else set()
        return [name for name in found if name not in trained]

    def note_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        """Note which parameters groups have."""
        self._groups = [list(group["params"]) for group in groups]

    def check_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise RuntimeError if code of the user's has changed which parameters groups have."""
        if placement(groups) != [[*map(id, group)] for group in self._groups]:
            raise RuntimeError(
                "the parameters of optimizer.param_groups were changed by hand, which nothing "
                "follows: call optimizer.add_param_group for new ones, or make another optimizer"
            )

    def note_others(self) -> None:
        """Note the parameters of the model that this optimizer does not train, as `others`.

        Before `take_over`, which may close the optimizer that trains some of them.
        """
        self._find_others()
        self.left = frozenset(name for name, p in self.others.items() if is_trained(p))

    def _find_others(self) -> None:
        own = {id(parameter) for parameter, *_ in self._trained}
        named = self._model.named_parameters() if self._model is not None else ()
        self.others = {name: p for name, p in named if id(p) not in own}

    def untrained(self) -> dict[str, Parameter]:
        """Return those of the `others` that no optimizer trains now, by name."""
        return {name: p for name, p in self.others.items() if not is_trained(p)}

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the model's buffers that are in its state dict, and the others, each once.

        As they are now: a module may assign another tensor, and `model.double()` does.
        """
        persistent, others = dict[Tensor, None](), dict[Tensor, None]()
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    apart = name in module._non_persistent_buffers_set
                    (others if apart else persistent)[buffer] = None
        return [*persistent], [*others]

    def overwrite_buffers(self, ranks: Collectives, *, constant: bool) -> None:
        """Overwrite the model's buffers with those of the first rank. Collective; waits.

        If the others are `constant` on these ranks, only those in its state dict.
        """
        persistent, others = self.buffers()
        if found := persistent if constant else persistent + others:
            broadcast_from_rank_0(ranks.named(BUFFERS), found)

    def check_kinds(self) -> None:
        """Raise RuntimeError for a parameter whose dtype, device or shape was changed."""
        for parameter, name, kind, *_ in self._trained:
            if _kind(parameter) != kind:
                now, before = (", ".join(map(str, each)) for each in (_kind(parameter), kind))
                _refuse(name, f"is of {now}, and was of {before}")

    def check(self) -> None:
        """Raise RuntimeError for a parameter that was changed, moved or replaced in the model.

        Modules and parameters that were added since are `others` from then on.
        """
        self.check_kinds()
        for parameter, name, _, strides, memory_order, address in self._trained:
            if parameter.stride() != strides and order(parameter) != memory_order:
                _refuse(name, "has another memory format (channels_last, say) than")
            if address is not None and parameter.data_ptr() != address:
                _refuse(name, "has other memory than")
        added = sum(map(len, self._dictionaries())) != self._count
        # A scripted module's dictionaries have no `get`.
        if added or any(
            key not in holder or holder[key] is not held for holder, key, held in self._places
        ):
            self._check_replaced()
            self._note_places()
            self._find_others()

    def _check_replaced(self) -> None:
        """Raise RuntimeError for a trained parameter that is not in the model any more.

        If another one that requires a gradient has its name, unless that is trained, too: layers
        get other names when one before them is removed from a list.
        """
        assert self._model is not None, "no places are noted without a model"
        present = dict(self._model.named_parameters(remove_duplicate=False))
        ids = set(map(id, present.values()))
        trained = {id(parameter) for parameter, *_ in self._trained}
        for parameter, name, *_ in self._trained:
            other = present.get(name)
            replaced = other is not None and other.requires_grad and id(other) not in trained
            if replaced and id(parameter) not in ids:
                _refuse(
                    name, "is another object (assigned, moved, or loaded with assign=True) than"
                )

    def _note_places(self) -> None:
        self._modules = list(self._model.modules()) if self._model is not None else []
        self._places = [
            (holder, key, held) for holder in self._dictionaries() for key, held in holder.items()
        ]
        self._count = len(self._places)

    def _dictionaries(self) -> Iterator[dict[str, Any]]:
        for module in self._modules:
            yield module._parameters
            yield module._modules


def placement(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Return the ids of the parameters, or other tensors, of each group."""
    return [[*map(id, group["params"])] for group in groups]


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
        if holder.sync_schedule.replicas > 1:
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


def left_untrained(model: nn.Module, taken: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters of a model that none trains once one optimizer trains `taken`. Local.

    By name, without those. The optimizers that have trained any of these so far will be closed.
    """
    own = {id(parameter) for parameter in taken.values()}
    closing = [None, *(holder for _, holder in _holders(taken))]
    others = {name: p for name, p in model.named_parameters() if id(p) not in own}
    return {n: p for n, p in others.items() if any(_holder(p) is each for each in closing)}


def is_trained(parameter: Parameter) -> bool:
    """Return whether an optimizer trains a parameter, which may be frozen meanwhile. Local."""
    return _holder(parameter) is not None


def _holder(parameter: Parameter) -> Any:
    """Return the optimizer that trains a parameter, which may be frozen meanwhile, or None."""
    with torch._C.DisableTorchFunctionSubclass():  # one in flight is not read
        real = parameter.is_floating_point() or parameter.is_complex()
        if not real or parameter.is_inference() or is_traceable_wrapper_subclass(parameter):
            return None
        required = parameter.requires_grad
        parameter.requires_grad_(True)  # else autograd shows no node
        holder = accumulation_node(parameter).metadata.get(_KEY)
        parameter.requires_grad_(required)
    return None if holder is None or holder.closed else holder


def dense_parts(name: str, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """Return the dense tensors over a parameter's memory, by name: one, or those that it wraps.

    None of a parameter without memory, or of a layout or class whose memory torch does not show.
    """
    if is_traceable_wrapper_subclass(parameter):
        keys = parameter.__tensor_flatten__()[0]
        return [p for key in keys for p in dense_parts(f"{name}.{key}", getattr(parameter, key))]
    if type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return []
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.layout is not torch.strided or parameter.is_meta or parameter.is_quantized:
            return []
        return [(name, parameter.detach().as_subclass(Tensor))]


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
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
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
