"""Other libraries, which know nothing of ranks: refusals and warnings, torchmetrics over ranks."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zero.state import PartOfState

M = TypeVar("M")

_NO_DIST = 4  # place of this argument of torch's _save_state_dict


class GuardedFunction(MetaPathFinder):
    """The function `name` of a module, which first gives its arguments to `check`, until `close`.

    `name` may be that of a method, such as "Class.method", and the module may be imported later.
    What a module lacks is not guarded.
    """

    def __init__(self, module: str, name: str, check: Callable[..., None]) -> None:
        self._module, self._check = module, check
        self._owner, _, self._name = name.rpartition(".")
        self._places: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []
        if module in sys.modules:
            self._replace(sys.modules[module])
        else:
            sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Restore the function, unless others have replaced it since. Local."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for owner, function, guarded in self._places:
            if getattr(owner, self._name) is guarded:
                setattr(owner, self._name, function)
        self._check = lambda *args, **kwargs: None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the module's function be replaced once it has been imported; know no others."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            self._replace(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def _replace(self, module: Any) -> None:
        owner = getattr(module, self._owner, None) if self._owner else module
        function = getattr(owner, self._name, None)
        if function is None:
            return

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._check(*args, **kwargs)
            return function(*args, **kwargs)

        self._places.append((owner, function, guarded))
        setattr(owner, self._name, guarded)


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a model that other code distributes, as a whole or in part. Local."""
    for name, module in model.named_modules():
        which = f"model.{name} is" if name else "model is"
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ValueError(
                f"{which} wrapped in {type(module).__name__}: give the module inside, its .module; "
                "world.optimizer averages the gradients"
            )
        if kind := _sharding_of(module):
            raise ValueError(
                f"{which} sharded by {kind}: leave it out, and give the plain module to "
                "world.optimizer with stage=1 or 2, which shards optimizer state and gradients"
            )


def _sharding_of(module: nn.Module) -> str:
    """Return what has sharded a module's parameters; empty for nothing. Imports nothing."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    if fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ())):
        return "fully_shard"
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    found = any(isinstance(p, sharded) for p in module.parameters(recurse=False))
    return "torch.distributed.tensor" if found else ""


def lone_accelerator(size: int) -> str:
    """Return one sentence if an Accelerator trains each of `size` ranks alone; else "". Local.

    Trainer makes one, too. Reads the state that accelerate shares between its instances.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if size == 1 or state is None or not getattr(state, "_shared_state", None):
        return ""
    try:
        if int(state().num_processes) != 1:
            return ""
    except Exception:
        return ""
    return (
        f"accelerate's Accelerator, which Hugging Face's Trainer makes too, trains each of {size} "
        "ranks alone here: use world.optimizer and world.shard in its place, or python -m mntrain "
        "--task hf"
    )


def guard_torch_checkpoints(rank: int) -> list[GuardedFunction]:
    """Refuse what `torch.distributed.checkpoint` would save or load wrongly, until they close.

    Without a process group, torch takes each rank for a single process. All would `save` the same
    files, so what one has saved would be lost: only rank 0 may save. With a process group, any rank
    may. One rank's part of an optimizer's state is neither saved nor loaded: torch would take that
    of one rank for that of all.
    """

    def check_save(state_dict: Any, *args: Any, **kwargs: Any) -> None:
        alone = kwargs.get("no_dist", len(args) >= _NO_DIST and args[_NO_DIST - 1])
        if alone and rank:
            raise RuntimeError(
                f"torch.distributed.checkpoint would save on rank {rank} as a single process, "
                "since there is no process group, and overwrite the files of rank 0: use "
                "world.checkpoints, or save on world.master alone"
            )
        _expect_no_part(state_dict, "save")

    def check_load(state_dict: Any, *_: Any, **__: Any) -> None:
        _expect_no_part(state_dict, "load")

    modules = "torch.distributed.checkpoint.state_dict_"
    return [
        GuardedFunction(f"{modules}saver", "_save_state_dict", check_save),
        GuardedFunction(f"{modules}loader", "_load_state_dict", check_load),
    ]


def _expect_no_part(state: Any, verb: str) -> None:
    """Raise RuntimeError for a state that has one rank's part of a sharded optimizer's. Local."""
    if isinstance(state, PartOfState):
        raise RuntimeError(
            f"torch.distributed.checkpoint cannot {verb} optimizer.state_dict() of a sharded "
            "optimizer, which has only this rank's slices: use world.checkpoints, or "
            "mntrain.checkpoint.load of what it has saved, or save optimizer.full_state_dict(), "
            "load it on every rank, and give it to optimizer.load_state_dict"
        )
    if isinstance(state, Mapping | list | tuple):
        for part in state.values() if isinstance(state, Mapping) else state:
            _expect_no_part(part, verb)


def warn_of_local_metrics() -> GuardedFunction:
    """Warn, once for each class, of metrics that compute over this rank's samples alone. Local.

    Until the result is closed. Those of `gather_states`, those that compute over the ranks of
    torch.distributed, and those with sync_on_compute=False do not count.
    """
    warned: set[type] = set()

    def check(metric: Any, *_: Any, should_sync: bool = True, **__: Any) -> None:
        kind, available = type(metric), metric.distributed_available_fn
        known = not should_sync or kind in warned or "_sync_dist" in vars(metric)
        if known or (callable(available) and available()):
            return
        warned.add(kind)
        warnings.warn(
            f"{kind.__name__} computes over the samples that this rank gives it: for those of all "
            "ranks, use world.metric(metric); if each rank gives all samples, make it with "
            "sync_on_compute=False",
            stacklevel=4,
        )

    return GuardedFunction("torchmetrics.metric", "Metric.sync_context", check)


def gather_states(metric: M, gather: Callable[[Any], list[Any]]) -> M:
    """Let a metric, and all within it, compute over the states of all ranks; return it. Local.

    Each of its computations is collective by `gather`, which returns every rank's object, by rank.
    Raises ValueError for what is no metric, and for one that gathers its state in a way of its own.
    """
    from torchmetrics import Metric, MetricCollection  # noqa: PLC0415 - an optional package
    from torchmetrics.metric import CompositionalMetric  # noqa: PLC0415

    if not isinstance(metric, Metric | MetricCollection):
        raise ValueError(
            f"metric is of type {type(metric).__name__}: give a torchmetrics Metric or "
            "MetricCollection"
        )
    inner = [module for module in metric.modules() if isinstance(module, Metric)]
    for one in inner:
        if type(one)._sync_dist not in (Metric._sync_dist, CompositionalMetric._sync_dist):
            raise ValueError(
                f"{type(one).__name__} gathers its state by torch.distributed alone: compute it on "
                "every rank from world.gather_in_order(predictions)"
            )

    def is_distributed() -> bool:
        return True

    def exchange(one: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        """Replace the metric's states by those over all ranks. Collective.

        One message has them all, so ranks may have unlike numbers of entries, or none.
        """
        states = gather({name: _moved(getattr(one, name), "cpu") for name in one._reductions})
        for name, reduce in one._reductions.items():
            values = [_moved(state[name], one.device) for state in states]
            if isinstance(values[0], list):
                joined: Any = [entry for value in values for entry in value]
            else:
                joined = torch.stack(values)
            empty = isinstance(joined, list) and not joined
            setattr(one, name, joined if reduce is None or empty else reduce(joined))

    for one in inner:
        if type(one)._sync_dist is CompositionalMetric._sync_dist:
            continue  # its parts exchange their states
        one.distributed_available_fn = is_distributed
        one.compute_with_cache = False  # a rank without new samples takes part in each computation
        exchanging: Any = one
        exchanging._sync_dist = MethodType(exchange, one)  # of a copy of the metric, too
    return metric


def _moved(state: Any, device: Any) -> Any:
    """Return copies of the tensors of a state, in memory of their own on a device."""
    if isinstance(state, Tensor):
        return state.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    return [_moved(entry, device) for entry in state] if isinstance(state, list) else state
