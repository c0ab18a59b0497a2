"""Parameters in flat buckets, and the all-gathers that bring updated shards to every rank.

    step:     update own shards | launch the all-gathers, in the order of the next forward
    forward:  wait(1) layer 1   | wait(2) layer 2 | ...        while the rest is still on its way

A parameter must not be read before it is whole. So a module's forward waits for its own parameters,
and while any of them is on its way, so does whoever asks the module for one (`module.weight`,
`model.parameters()`, `model.state_dict()`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zero.collectives import Collectives, Work
from zero.hooks import ModuleHook
from zero.layout import Bucket
from zero.tensor_views import view


class StorageGuard:
    """Where parameters lie: they are to stay there for as long as they are trained."""

    def __init__(self) -> None:
        self._homes: list[tuple[str, Parameter, int]] = []  # with the address that they are at

    def add(self, name: str, parameter: Parameter) -> None:
        """Note where a parameter lies."""
        self._homes.append((name, parameter, parameter.data_ptr()))

    def check(self) -> None:
        """RuntimeError for a parameter that has been moved elsewhere since."""
        for name, parameter, address in self._homes:
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"parameter {name} has other memory than when the optimizer was made: move the "
                    "model to its device and dtype first, and make the optimizer after"
                )


class FlatParameters:
    """The parameters of buckets, each a view into its bucket's flat tensor."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._homes = StorageGuard()
        self.buckets: list[Bucket] = []
        self.flats: list[Tensor] = []
        self.index: dict[Parameter, int] = {}  # of the bucket that a parameter is in

    @torch.no_grad()
    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> list[Tensor]:
        """Move more parameters, by name, into flat memory; give it, a tensor a bucket.

        One bucket at a time, so no more than one is held twice. No two may share memory.
        """
        added = []
        for bucket in buckets:
            first = parameters[bucket.entries[0].spec.name]
            flat = self._collectives.allocate(bucket.numel, bucket.dtype, first.device)
            for entry in bucket.entries:
                parameter = parameters[entry.spec.name]
                home = view(flat, entry.start, parameter)
                home.copy_(parameter)
                parameter.data = home
                self.index[parameter] = len(self.buckets)
                self._homes.add(entry.spec.name, parameter)
            self.buckets.append(bucket)
            self.flats.append(flat)
            added.append(flat)
        return added

    def check(self) -> None:
        """See `StorageGuard.check`."""
        self._homes.check()


class ParameterGathers:
    """The all-gathers of flat parameters: launched together, waited for where they are needed.

    With a `model`, its modules wait for what they use; without one, `launch` waits for all. Under
    torch.compile, which looks at parameters once and for all, `launch` waits too. Who has a
    parameter from elsewhere (a list of his own) has to `wait` himself.
    """

    def __init__(
        self, collectives: Collectives, parameters: FlatParameters, model: nn.Module | None
    ) -> None:
        self._collectives, self._parameters = collectives, parameters
        self._model = model
        self._lazy = model is not None
        self._works: dict[int, Work] = {}  # of buckets on their way
        self._guarded: dict[nn.Module, dict[str, Parameter | None]] = {}  # with their own
        self._hooks: dict[nn.Module, RemovableHandle] = {}

    def watch(self) -> None:
        """Have the modules wait that have parameters of their own, those added since too."""
        for module in self._model.modules() if self._model is not None else ():
            if self._needs(module._parameters.values()) and module not in self._hooks:
                hook = module.register_forward_pre_hook(ModuleHook(self._before), prepend=True)
                self._hooks[module] = hook

    def launch(self) -> None:
        """Start an all-gather of every bucket, in the order of the next forward. Collective."""
        flats, buckets = self._parameters.flats, self._parameters.buckets
        for index in reversed(range(len(flats))):
            self._works[index] = self._collectives.all_gather(flats[index], buckets[index].bounds)
        if not self._lazy:
            self.wait()
            return
        self.watch()
        for module in self._hooks:
            if self._needs(module._parameters.values()):
                self._guarded[module] = module._parameters
                guard = WaitingParameterDict(module._parameters, partial(self._release, module))
                module.__dict__["_parameters"] = guard

    def wait(self) -> None:
        """Return when every parameter is whole."""
        for module in list(self._guarded):
            self._release(module)
        for index in list(self._works):
            self._works.pop(index).wait()

    def close(self) -> None:
        """Wait for what is on its way, and leave the modules alone."""
        self.wait()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _before(self, module: nn.Module, inputs: Any) -> None:
        """Wait for what a module uses itself, also by references that it keeps (as nn.LSTM)."""
        if torch.compiler.is_compiling():
            self._lazy = False
        else:
            self._release(module)

    def _release(self, module: nn.Module) -> None:
        """Wait for a module's parameters, if it is guarded, and let it have them."""
        parameters = self._guarded.pop(module, None)
        if parameters is None:
            return
        for index in self._needs(parameters.values()):
            if index in self._works:
                self._works.pop(index).wait()
        module.__dict__["_parameters"] = parameters

    def _needs(self, parameters: Iterable[Parameter | None]) -> list[int]:
        """The buckets that parameters are in, the first one in forward first."""
        index = self._parameters.index
        return sorted({index[p] for p in parameters if p in index}, reverse=True)


class WaitingParameterDict(MutableMapping[str, Parameter | None]):
    """Stands in for a module's dictionary of parameters while some are on their way.

    Who asks for one waits: `release` does, and gives the module its own dictionary back. Not a
    dict, of which C code would take the values without asking.
    """

    def __init__(
        self, parameters: dict[str, Parameter | None], release: Callable[[], None]
    ) -> None:
        self._parameters, self._release = parameters, release

    def __getitem__(self, name: str) -> Parameter | None:
        self._release()
        return self._parameters[name]

    def __setitem__(self, name: str, parameter: Parameter | None) -> None:
        self._release()
        self._parameters[name] = parameter

    def __delitem__(self, name: str) -> None:
        self._release()
        del self._parameters[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def copy(self) -> dict[str, Parameter | None]:
        """As that of a dict."""
        return dict(self)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """What copies and pickles are made of: a plain dictionary."""
        return dict, (dict(self),)
