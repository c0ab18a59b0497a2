"""Flat parameters, and the all-gathers that bring updated shards to every rank.

    step:     update own shards | launch the all-gathers, in the order of the next forward
    forward:  wait(1) layer 1   | wait(2) layer 2 | ...        while the others are in flight

A parameter must not be read before its all-gather has finished. So a module's forward waits for the
module's own parameters, and so does any access through the module (`module.weight`,
`model.parameters()`, `model.state_dict()`) while one of them is in flight.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork
from zero.kernels import own_view
from zero.layout import Bucket
from zero.precision import narrower


class FlatParameters:
    """The parameters of buckets, each a view of its bucket's flat tensor, and their all-gathers.

    Without a model, `launch` waits for all. It also does under torch.compile, which reads
    parameters outside of their modules. Code that holds parameters from elsewhere (a list of its
    own) has to call `wait` itself.

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
        self._narrow: dict[int, Tensor] = {}  # copies in the gather dtype, by bucket
        self._bucket_of: dict[Parameter, int] = {}
        self._works: dict[int, Work] = {}  # in flight, by bucket
        self._original: dict[nn.Module, dict[str, Parameter | None]] = {}  # replaced dictionaries
        self._hooks: dict[nn.Module, RemovableHandle] = {}
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
                slot = own_view(flat, entry.start, parameter)
                slot.copy_(parameter)
                parameter.data = slot
                self._bucket_of[parameter] = len(self._buckets)
            dtype = narrower(self._gather_dtype, bucket.dtype)
            if dtype and self._collectives.size > 1:
                narrow = self._collectives.allocate(bucket.numel, dtype, device)
                self._narrow[len(self._buckets)] = narrow
                self.gather_bytes += narrow.nbytes
            self._buckets.append(bucket)
            self._flats.append(flat)
        self._watch()
        return self._flats[-len(buckets) :]

    def launch(self) -> None:
        """Start an all-gather of every bucket, in the order of the next forward. Collective."""
        if self._collectives.size == 1 or not self._buckets:
            return
        for parameter in self._bucket_of:  # so that autograd refuses a graph of their old values
            torch.autograd.graph.increment_version(parameter)
        for index in reversed(range(len(self._buckets))):
            self._works[index] = self._all_gather(index)
        if not self._overlaps_forward:
            self.wait()
            return
        self._watch()
        for module in self._hooks:
            if self._buckets_of(module._parameters.values()):
                self._original[module] = module._parameters
                waiting = WaitingParameterDict(module._parameters, partial(self._release, module))
                module.__dict__["_parameters"] = waiting

    def wait(self) -> None:
        """Return when every parameter is complete."""
        for module in list(self._original):
            self._release(module)
        for index in list(self._works):
            self._finish(index)

    def close(self) -> None:
        """Wait for what is in flight, and give the model back as it was, also if the wait fails."""
        try:
            self.wait()
        finally:
            for module, parameters in self._original.items():
                module.__dict__["_parameters"] = parameters
            self._original.clear()
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()

    def _all_gather(self, index: int) -> Work:
        if index in self._narrow:
            return ChainedWork(self._all_gather_narrow(index))
        collectives = self._collectives.named(f"parameter bucket {index}")
        return collectives.all_gather(self._flats[index], self._buckets[index].bounds)

    def _all_gather_narrow(self, index: int) -> Iterator[Work]:
        """Gather in the narrow dtype, to which the owners have rounded their shards."""
        flat, narrow, bucket = self._flats[index], self._narrow[index], self._buckets[index]
        shard = slice(*bucket.shard(self._slot))
        narrow[shard].copy_(flat[shard])
        yield self._collectives.all_gather(narrow, bucket.bounds)
        flat.copy_(narrow)

    def _watch(self) -> None:
        """Add a hook to every module that has parameters of its own and no hook yet."""
        for module in self._model.modules() if self._model is not None else ():
            if self._buckets_of(module._parameters.values()) and module not in self._hooks:
                hook = ModuleHook(self._before_forward)
                self._hooks[module] = module.register_forward_pre_hook(hook, prepend=True)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Wait for a module's parameters, also those that it refers to directly (as nn.LSTM)."""
        if torch.compiler.is_compiling():
            self._overlaps_forward = False
        else:
            self._release(module)

    def _release(self, module: nn.Module) -> None:
        """Wait for a module's parameters, and give it its own dictionary back."""
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
            self._works.pop(index, None)

    def _buckets_of(self, parameters: Iterable[Parameter | None]) -> list[int]:
        """Return the buckets of parameters, in the order of forward."""
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


class ModuleHook:
    """A module hook that does nothing in copies of the module, which copy its hooks."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[()]]:
        """Copy and pickle as a hook without a function."""
        return ModuleHook, ()
