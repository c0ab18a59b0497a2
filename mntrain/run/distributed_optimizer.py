"""The optimizer of a world: checked alike on all ranks, with collectives of its own."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from mntrain import errors
from mntrain.bootstrap import TRAVEL_DTYPES, WorldParts
from mntrain.ranks import Ranks
from zero.optimizer import ZeroOptimizer
from zero.param_groups import (
    check_sharding,
    check_trainable,
    describe_optimizer,
    name_parameters,
)
from zero.partition_trial import check_partition


def make_optimizer(
    world: Ranks,
    parts: WorldParts,
    model: nn.Module,
    optimizer_class: Callable[..., torch.optim.Optimizer],
    *,
    groups: Iterable[Any] | None,
    options: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> ZeroOptimizer:
    """Make the optimizer of `World.optimizer`, with the options of `ZeroOptimizer`. Collective.

    Raises AgreedError on all ranks, before anything is allocated, if they differ in what they give
    or if any of them cannot accept it.
    """
    with world.agreement():
        _check_kinds(model, optimizer_class)
    description = errors.describe(model, options)
    gathered = world.collectives.gather_objects(description, "world.optimizer")
    errors.expect_same(gathered.wait(), world.rank)
    make = partial(optimizer_class, **kwargs)
    with world.agreement():
        named = name_parameters(model, groups)
        check_sharding(options["stage"], options["partition"])
        trainable = check_trainable(named, sharded=options["stage"] != 0)
        if options["stage"] != 0:
            with _arguments_of(optimizer_class):
                check_partition(make, trainable, options["partition"])
    described = {"the optimizer": describe_optimizer(make, trainable)}
    errors.expect_same(world.gather(described), world.rank)
    kind = getattr(optimizer_class, "__name__", "torch")
    stream = world.collectives.add_stream(f"optimizer {next(parts.optimizer_numbers)} ({kind})")
    persistent = model.state_dict().keys()  # other buffers are constants, equal everywhere
    with world.agreement(), _arguments_of(optimizer_class):
        optimizer = ZeroOptimizer(
            named,
            optimizer_class,
            stream.replace(choice=stream.choice.among_others()),
            bucket_bytes=parts.settings.bucket_bytes,
            buffers=[b for name, b in model.named_buffers() if name in persistent],
            order=[name for name, _ in model.named_parameters()],
            model=model,
            wire_dtype=TRAVEL_DTYPES[parts.settings.wire_dtype],
            gather_dtype=TRAVEL_DTYPES[parts.settings.gather_dtype],
            kernels=parts.kernels,
            **options,
            **kwargs,
        )
    optimizer.start()
    return optimizer


def _check_kinds(model: object, optimizer_class: object) -> None:
    """Raise ValueError for the parameters in place of a model, or an optimizer for its class."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is of type {type(model).__name__}: give the torch.nn.Module to train"
        )
    if isinstance(optimizer_class, torch.optim.Optimizer) or not callable(optimizer_class):
        raise ValueError(
            f"optimizer_class is of type {type(optimizer_class).__name__}: give a class such as "
            "torch.optim.AdamW, and its arguments by keyword"
        )


@contextmanager
def _arguments_of(optimizer_class: Callable[..., object]) -> Iterator[None]:
    """Raise ValueError where the constructor of an optimizer raises TypeError."""
    try:
        yield
    except TypeError as error:
        name = getattr(optimizer_class, "__name__", "the optimizer")
        raise ValueError(f"{name} cannot be made with these arguments: {error}") from error
