"""torchmetrics over the ranks of a world."""

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from mntrain.run.guarded_function import GuardedFunction

M = TypeVar("M")


def warn_of_local_metrics() -> GuardedFunction:
    """Warn, once for each class, of metrics that compute over this rank's samples alone. Local.

    Until the result is closed. Those of `gather_states`, those that compute over the ranks of
    torch.distributed, and those with sync_on_compute=False do not count.
    """
    warned: set[type] = set()

    def check(metric: Any, *_: Any, should_sync: bool = True, **__: Any) -> None:
        kind = type(metric)
        if not should_sync or kind in warned or "_sync_dist" in vars(metric):
            return
        if callable(metric.distributed_available_fn) and metric.distributed_available_fn():
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
        own = type(one)._sync_dist not in (Metric._sync_dist, CompositionalMetric._sync_dist)
        if own:
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
        states = gather({name: _on_host(getattr(one, name)) for name in one._reductions})
        for name, reduce in one._reductions.items():
            values = [_to(state[name], one.device) for state in states]
            if isinstance(values[0], list):
                entries = [entry for value in values for entry in value]
                reduced = reduce(entries) if entries and reduce is not None else entries
            else:
                stacked = torch.stack(values)
                reduced = reduce(stacked) if reduce is not None else stacked
            setattr(one, name, reduced)

    for one in inner:
        if type(one)._sync_dist is CompositionalMetric._sync_dist:
            continue  # its parts exchange their states
        one.distributed_available_fn = is_distributed
        one.compute_with_cache = False  # a rank without new samples takes part in each computation
        exchanging: Any = one
        exchanging._sync_dist = MethodType(exchange, one)  # of a copy of the metric, too
    return metric


def _on_host(state: Any) -> Any:
    """Return copies of the tensors of a state, in memory of their own on the host."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return [_on_host(entry) for entry in state] if isinstance(state, list) else state


def _to(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.to(device)
    return [_to(entry, device) for entry in state] if isinstance(state, list) else state
