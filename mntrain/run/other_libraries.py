"""Other libraries, which know nothing of ranks: refusals and warnings, torchmetrics over ranks."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zero.optimizer import ZeroOptimizer
from zero.param_groups import check_undistributed
from zero.state import PartOfState
from zero.sync_batchnorm import SyncBatchNorm

M = TypeVar("M")

_NO_DIST = 4  # place of this argument of torch's _save_state_dict


def check_calls(guards: ExitStack, owner: Any, name: str, check: Callable[..., None]) -> None:
    """Give the arguments of a function of a module or class to `check` first, until `guards` close.

    Guards of several worlds may close in any order. They suspend no generator, which a forked
    child, whose world stays open, would close with an error while its interpreter ends.
    """
    function, active = getattr(owner, name), True

    @wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if active:
            check(*args, **kwargs)
        return function(*args, **kwargs)

    def restore() -> None:
        nonlocal active
        active = False
        if getattr(owner, name) is checking:  # else others have replaced it since
            setattr(owner, name, function)

    setattr(owner, name, checking)
    guards.callback(restore)


def check_model(model: object, size: int) -> None:
    """Raise ValueError for no module, or one that other code distributes, or that differs by rank.

    As a whole or in part. Local; `size` is that of the world.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is of type {type(model).__name__}: give the torch.nn.Module to train"
        )
    check_undistributed(model, size)
    for path, module in model.named_modules():
        if "process_group" in vars(module) and not isinstance(module, SyncBatchNorm):
            which, kind = f"model.{path}" if path else "model", type(module).__name__
            batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            fix = "call world.sync_batchnorm(model) before" if batch_norm else "leave it out"
            raise ValueError(
                f"{which} is a {kind}, which asks torch.distributed for other ranks and finds "
                f"none: {fix}"
            )


def lone_accelerator(size: int) -> str:
    """Return one sentence if an Accelerator trains each of `size` ranks alone; else "". Local.

    Trainer makes one, too. Reads the state that accelerate shares between its instances.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    made = size > 1 and getattr(state, "_shared_state", None)
    if not (state and made) or getattr(state(), "num_processes", 1) != 1:
        return ""
    return (
        f"accelerate's Accelerator, which Hugging Face's Trainer makes too, trains each of {size} "
        "ranks alone here: use world.optimizer and world.shard in its place, or python -m mntrain "
        "--task hf"
    )


def guard_torch_checkpoints(guards: ExitStack, rank: int) -> None:
    """Refuse what `torch.distributed.checkpoint` would save or load wrongly, until `guards` close.

    Imports it, which takes a second of CPU time, but a tenth where an optimizer of torch was made.
    It looks for the state of each parameter in that of an optimizer, which has slices here.

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

    def check_optimizers(model: nn.Module, optimizers: Sequence[object], *_: Any) -> None:
        if any(isinstance(one, ZeroOptimizer) for one in optimizers):
            raise RuntimeError(
                "torch.distributed.checkpoint.state_dict cannot read or set the state of an "
                "optimizer of world.optimizer: use optimizer.full_state_dict(), on all ranks, and "
                "optimizer.load_state_dict, or world.checkpoints"
            )

    if not torch.distributed.is_available():
        return
    from torch.distributed.checkpoint import (  # noqa: PLC0415 - see above
        state_dict,
        state_dict_loader,
        state_dict_saver,
    )

    check_calls(guards, state_dict_saver, "_save_state_dict", check_save)
    check_calls(guards, state_dict_loader, "_load_state_dict", check_load)
    check_calls(guards, state_dict, "_get_optim_state_dict", check_optimizers)
    check_calls(guards, state_dict, "_load_optim_state_dict", check_optimizers)


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


def warn_of_local_metrics(guards: ExitStack) -> bool:
    """Warn, once for each class, of metrics that compute over this rank's samples alone. Local.

    Until `guards` close, if torchmetrics is imported; else returns False. Metrics of
    `gather_states`, those that compute over the ranks of torch.distributed, and those with
    sync_on_compute=False do not count.
    """
    if (imported := sys.modules.get("torchmetrics.metric")) is None:
        return False
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

    check_calls(guards, imported.Metric, "sync_context", check)
    return True


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
