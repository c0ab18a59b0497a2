"""Flat parameters, and the all-gathers that bring updated shards to every rank.

    step:     update own shards | launch the all-gathers, in the order of the next forward
    forward:  wait(1) layer 1   | wait(2) layer 2 | ...        while the others are in flight

A parameter must not be read before its all-gather has finished. Three things wait for it meanwhile:

    any operation on it       its class is `ArrivingParameter`
    an access by a module     `model.weight`, `model.parameters()`, `model.state_dict()`
    a call of any module      for its own parameters, also outside of the model; for all of them,
                              if it is scripted or was given others by torch.func

Other tensors over the same memory, such as a kept `p.detach()` or state dict, are read without
asking: while there are any, no all-gather outlasts the step.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork
from zero.kernels import own_view, uses
from zero.layout import Bucket
from zero.precision import narrower

# They read no values. Not `size` or `dim`, after which torch.vmap reads values without asking.
_PROPERTIES = ("grad", "requires_grad", "is_leaf", "shape", "dtype", "device")
_GRAD: Any = Tensor.grad
_METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        _GRAD.__set__,
        _GRAD.__delete__,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
    ]
)


class FlatParameters:
    """The parameters of buckets, each a view of its bucket's flat tensor, and their all-gathers.

    Every rank of a node has its own, since one rank may change a parameter in place.
    Without a model, `launch` waits for all. It also does if torch.compile is used, and while others
    than the library have tensors over the memory. It waits for a bucket that has a parameter of a
    class derived from `Parameter`.

    With a `gather_dtype` narrower than a bucket, its all-gather goes through a copy of that dtype.
    """

    def __init__(
        self, collectives: Collectives, model: nn.Module | None, gather_dtype: torch.dtype | None
    ) -> None:
        self._collectives, self._model, self._gather_dtype = collectives, model, gather_dtype
        self._slot = collectives.slot(collectives.rank)
        self._overlaps_forward = model is not None
        self._buckets: list[Bucket] = []
        self._flats: list[Tensor] = []  # by bucket
        self._own_uses: list[int] = []  # by parameter: the library's tensors over its memory
        self._narrow: dict[int, Tensor] = {}  # copies in the gather dtype, by bucket
        self._bucket_of: dict[Parameter, int] = {}
        self._members: list[list[Parameter]] = []  # by bucket
        self._works: dict[int, Work] = {}  # in flight, by bucket
        self._original: dict[nn.Module, dict[str, Parameter | None]] = {}  # replaced dictionaries
        self._hook: RemovableHandle | None = None  # while anything is in flight
        self.gather_bytes = 0  # of the copies in the gather dtype

    @torch.no_grad()
    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> list[Tensor]:
        """Move parameters, by name, into flat memory; return it, one tensor per bucket. Collective.

        One bucket at a time, so that no more than one is in memory twice. No two parameters may
        share memory.
        """
        for bucket in buckets:
            device = parameters[bucket.entries[0].spec.name].device
            flat = self._collectives.allocate(bucket.numel, bucket.dtype, device)
            for entry in bucket.entries:
                parameter = parameters[entry.spec.name]
                place = own_view(flat, entry.start, parameter)
                place.copy_(parameter)
                parameter.data = place
                self._bucket_of[parameter] = len(self._buckets)
            dtype = narrower(self._gather_dtype, bucket.dtype)
            if dtype and self._collectives.size > 1:
                narrow = self._collectives.allocate(bucket.numel, dtype, device)
                self._narrow[len(self._buckets)] = narrow
                self.gather_bytes += narrow.nbytes
            self._members.append([parameters[entry.spec.name] for entry in bucket.entries])
            self._buckets.append(bucket)
            self._flats.append(flat)
        return self._flats[-len(buckets) :]

    def count_uses(self) -> None:
        """Note the library's tensors over the memory of new parameters, when all are made. Local.

        A script may have some over that of the others by then.
        """
        self._own_uses += self._uses()[len(self._own_uses) :]

    def _uses(self) -> list[int]:
        return [*map(uses, self._bucket_of)]

    def launch(self) -> None:
        """Start an all-gather of every bucket, in the order of the next forward. Collective."""
        if self._collectives.size == 1 or not self._buckets:
            return
        for parameter in self._bucket_of:  # so that autograd refuses a graph of their old values
            torch.autograd.graph.increment_version(parameter)
        self._overlaps_forward = self._overlaps_forward and not compiles()
        overlaps = self._overlaps_forward and self._uses() == self._own_uses
        for index in reversed(range(len(self._buckets))):
            self._works[index] = self._all_gather(index)
        if not overlaps:
            self.wait()
            return
        self._watch()

    def wait(self) -> None:
        """Return when every parameter is complete."""
        for module in list(self._original):
            self._release(module)
        for index in list(self._works):
            self._finish(index)
        self._unhook()

    def flat(self, index: int) -> Tensor:
        """Wait for all parameters, and return the memory of those of a bucket."""
        self.wait()
        return self._flats[index]

    def close(self) -> None:
        """Wait for what is in flight, and give the model back as it was, also if the wait fails."""
        try:
            self.wait()
        finally:
            for module, parameters in self._original.items():
                module.__dict__["_parameters"] = parameters
            self._original.clear()
            for parameter in self._bucket_of:
                land(parameter)
            self._unhook()

    def _all_gather(self, index: int) -> Work:
        flat, label = self._flats[index], f"parameter bucket {index}"
        if (narrow := self._narrow.get(index)) is not None:
            ratio = flat.element_size() / narrow.element_size()
            collectives = self._collectives.named(label, ratio)
            return ChainedWork(self._all_gather_narrow(index, collectives))
        return self._collectives.named(label).all_gather(flat, self._buckets[index].bounds)

    def _all_gather_narrow(self, index: int, collectives: Collectives) -> Iterator[Work]:
        """Gather in the narrow dtype, to which the owners have rounded their shards."""
        flat, narrow, bucket = self._flats[index], self._narrow[index], self._buckets[index]
        shard = slice(*bucket.shard(self._slot))
        narrow[shard].copy_(flat[shard])
        yield collectives.all_gather(narrow, bucket.bounds)
        flat.copy_(narrow)

    def _watch(self) -> None:
        assert self._model is not None, "forward is overlapped"
        for module in self._model.modules():
            parameters = module._parameters
            if type(parameters) is dict and self._buckets_of(parameters.values()):
                self._original[module] = parameters
                waiting = WaitingParameterDict(parameters, partial(self._release, module))
                module.__dict__["_parameters"] = waiting
        for parameter, index in self._bucket_of.items():
            depart(parameter, partial(self._finish, index))
        self._hook = register_module_forward_pre_hook(self._before_call)
        for index, members in enumerate(self._members):
            if any(type(parameter) is not ArrivingParameter for parameter in members):
                self._finish(index)  # operations on a parameter of a derived class do not ask

    @_disable_dynamo
    def _before_call(self, module: nn.Module, inputs: Any) -> None:
        """Wait for what a module reads without asking: its own parameters, as nn.LSTM does."""
        if isinstance(module, torch.jit.ScriptModule):
            self.wait()
        self._release(module)
        for parameter in module._parameters.values():
            if parameter in self._bucket_of:
                self._finish(self._bucket_of[parameter])
            elif parameter is not None and not isinstance(parameter, Parameter):
                self.wait()  # torch.func may have wrapped one of them

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _release(self, module: nn.Module) -> None:
        original = self._original.get(module)
        if original is None:
            return
        for index in self._buckets_of(original.values()):
            self._finish(index)
        module.__dict__["_parameters"] = original
        self._original.pop(module, None)  # another thread may have waited for it, too

    def _finish(self, index: int) -> None:
        """Wait for a bucket. If that fails, later waits for it fail, too."""
        if (work := self._works.get(index)) is not None:
            work.wait()
            for parameter in self._members[index]:
                land(parameter)
            self._works.pop(index, None)
        if not self._works and not torch.compiler.is_compiling():  # which keeps track of hooks
            self._unhook()

    def _buckets_of(self, parameters: Iterable[Parameter | None]) -> list[int]:
        bucket_of = self._bucket_of
        return sorted({bucket_of[p] for p in parameters if p in bucket_of}, reverse=True)


class WaitingParameterDict(MutableMapping[str, Parameter | None]):
    """Replacement of a module's parameter dictionary while some of them are in flight.

    Any access to a value calls `wait`, which also gives the module its own dictionary back.
    Not a subclass of dict, whose values C code would read without a call.
    """

    def __init__(self, parameters: dict[str, Parameter | None], wait: Callable[[], None]) -> None:
        self._parameters, self._wait = parameters, wait

    def __getitem__(self, name: str) -> Parameter | None:
        self._wait()
        return self._parameters[name]

    def __setitem__(self, name: str, parameter: Parameter | None) -> None:
        self._wait()
        self._parameters[name] = parameter

    def __delitem__(self, name: str) -> None:
        self._wait()
        del self._parameters[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """Copy and pickle as a plain dictionary."""
        return dict, (dict(self),)


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
        arriving = [x for x in tree_leaves((args, kwargs)) if type(x) is ArrivingParameter]
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
    """Make operations on a parameter call `arrive`, until `land`. Not of a derived class."""
    if type(parameter) is Parameter:
        parameter.__class__ = ArrivingParameter
        parameter.arrive = arrive  # type: ignore[attr-defined]


def land(parameter: Parameter) -> None:
    """Give a parameter its own class back."""
    if type(parameter) is ArrivingParameter:
        parameter.__class__ = Parameter  # type: ignore[assignment]
        del parameter.arrive


def compiles() -> bool:
    """Return whether torch.compile was called, whose code reads parameters without asking."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return any(map(callable, getattr(compiler, "cached_backends", {}).values()))
