"""The optimizer of a world: checked alike on all ranks, with collectives of its own."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from mntrain import compression
from mntrain.alike.values import compare
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.ranks import TRAVEL_DTYPES, Ranks
from mntrain.run.other_libraries import check_model, lone_accelerator
from mntrain.sync import LocalSGD
from zero.comm_hooks import CommHook, make_hook
from zero.comparison import describe_model, describe_optimizer
from zero.exchange.exchange import Exchange
from zero.optimizer import ZeroOptimizer
from zero.options import Options
from zero.param_groups import as_groups, by_name, check_trainable
from zero.parameter_watch import check_free
from zero.sync_batchnorm import SyncBatchNorm
from zero.trials import check_arguments, check_partition


def make_optimizer(
    world: Ranks,
    model: nn.Module,
    optimizer_class: Callable[..., torch.optim.Optimizer],
    *,
    number: int,
    groups: Iterable[Any] | None,
    comm_hook: CommHook | None,
    sync: LocalSGD | None,
    options: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    check_exchanged: Callable[[Iterable[nn.Parameter]], None],
) -> ZeroOptimizer:
    """Make the optimizer of `World.optimizer`. Collective.

    `options` are those of `zero.Options` that the world's settings do not decide, and `kwargs` the
    arguments of the class. The world counts its optimizers by `number`. `check_exchanged` raises
    ValueError for parameters that nodes may not exchange rarely. Raises AgreedError on all ranks,
    before anything is allocated, if they differ in what they give or if any of them cannot accept
    it.
    """
    with world.agreement():
        checked = _check_request(world, model, optimizer_class, sync, options)
    make = partial(optimizer_class, **kwargs)
    alike, tensors = describe_model(model, {**vars(checked), "comm_hook": comm_hook, "sync": sync})
    compare(world, {**alike, "the model": tensors})
    with world.agreement():
        given = compression.select_hook(world.settings.compress, comm_hook)
        hook = make_hook(given, TRAVEL_DTYPES[world.settings.wire_dtype])
        named = as_groups(model.named_parameters() if groups is None else groups, model)
        trainable = _check_parameters(model, named, make, checked)
        if sync and len(world.topology.nodes) > 1:
            check_exchanged(by_name(trainable).values())
    compare(world, {"the optimizer": describe_optimizer(make, trainable)})
    kind = getattr(optimizer_class, "__name__", "torch")
    label = f"optimizer {number} ({kind})"
    stream = _without_sole_use(world.collectives.add_stream(label))
    sync_schedule = _make_sync_schedule(world, sync, stream, stage=checked.stage, user=label)
    needs_levels = hook.between_nodes and world.size > 1
    levels = world.node_levels(label) if needs_levels else None
    with world.agreement(), _arguments_of(optimizer_class):
        optimizer = ZeroOptimizer(
            named,
            optimizer_class,
            stream,
            checked,
            model=model,
            sync_schedule=sync_schedule,
            levels=levels,
            comm_hook=hook,
            **kwargs,
        )
    # Before, a function may have stood for any class.
    compare(world, {"the class of the optimizer": optimizer.class_name})
    note = hook.note(len(world.topology.nodes), sharded=optimizer.sharded)
    if note and world.master:
        print(f"mntrain: {note}", file=sys.stderr)
    return optimizer


def _check_request(
    world: Ranks,
    model: nn.Module,
    optimizer_class: object,
    sync: LocalSGD | None,
    options: Mapping[str, Any],
) -> Options:
    """Return the options of an optimizer. Raises ValueError for what cannot be accepted. Local."""
    check_model(model, world.size)
    if isinstance(optimizer_class, torch.optim.Optimizer) or not callable(optimizer_class):
        raise ValueError(
            f"optimizer_class is of type {type(optimizer_class).__name__}: give a class such "
            "as torch.optim.AdamW, and its arguments by keyword"
        )
    if alone := lone_accelerator(world.size):
        raise ValueError(alone)
    checked = Options(
        bucket_bytes=world.settings.bucket_bytes,
        gather_dtype=TRAVEL_DTYPES[world.settings.gather_dtype],
        **options,
    )
    check_sync(world, sync)
    if sync and any(isinstance(m, SyncBatchNorm) for m in model.modules()):
        raise ValueError(
            "the model was given to world.sync_batchnorm, which needs all ranks in every "
            "step, and with sync= nodes take steps of their own: leave one of the two out"
        )
    return checked


def _check_parameters(
    model: nn.Module,
    named: list[dict[str, Any]],
    make: partial[torch.optim.Optimizer],
    options: Options,
) -> list[dict[str, Any]]:
    """Return the groups of parameters that train. Raises ValueError for what cannot. Local."""
    stage = options.stage
    trainable = check_trainable(named, sharded=stage != 0, model=model)
    check_free(by_name(trainable))
    # Optimizers of others may need more than small tensors.
    if getattr(make.func, "__module__", "").startswith(("torch.optim.", "mntrain.optim")):
        plain = [{**group, "params": [p for _, p in group["params"]]} for group in trainable]
        check_arguments(make.func, make.keywords, plain, leaves=stage == 0)
    if stage != 0:
        with _arguments_of(make.func):
            check_partition(make, trainable, options.partition)
    return trainable


def check_sync(world: Ranks, sync: object) -> None:
    """Raise ValueError for what describes no exchange, or none for these nodes. Local."""
    if sync is None:
        return
    if not isinstance(sync, LocalSGD):
        raise ValueError(
            f"sync is of type {type(sync).__name__}: give mntrain.sync.LocalSGD(every=...), "
            "DiLoCo or SparseLoCo, or None"
        )
    sizes = [len(node) for node in world.topology.nodes]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the nodes have {'+'.join(map(str, sizes))} ranks: nodes that exchange rarely need "
            "equal numbers of ranks; launch as many on each, or average every step over all ranks"
        )


def _make_sync_schedule(
    world: Ranks,
    sync: LocalSGD | None,
    stream: WorldCollectives,
    *,
    stage: int,
    user: str,
) -> Exchange | None:
    """Bind a description to collectives of an optimizer's own. Collective.

    Without one, returns None, and also on one node: then warns that there is nothing to exchange.
    """
    if sync is None:
        return None
    if len(world.topology.nodes) == 1:
        if world.master:
            warnings.warn(f"{sync}: there is one node, so every step is synchronous", stacklevel=4)
        return None
    node = _without_sole_use(world.group_collectives("node", user))
    cross = _without_sole_use(world.group_collectives("cross", user))
    return sync.bind(stream, node, cross, stage=stage)


def _without_sole_use(collectives: WorldCollectives) -> WorldCollectives:
    """Return collectives whose calls run while the ranks compute and call others."""
    return collectives.replace(choice=collectives.choice.among_others())


@contextmanager
def _arguments_of(optimizer_class: Callable[..., object]) -> Iterator[None]:
    """Raise ValueError where the constructor of an optimizer raises an error of another kind."""
    try:
        yield
    except (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError) as error:
        name = getattr(optimizer_class, "__name__", "the optimizer")
        raise ValueError(f"{name} cannot be made with these arguments: {error}") from error
