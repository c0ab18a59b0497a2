"""A torch optimizer over the slices of parameters that one rank owns."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.exchange.schedule import SyncSchedule
from zero.layout import Bucket, ParameterSpec, plan_buckets
from zero.master_weights import OptimizerShard
from zero.memory import Memory, predict, state_bytes
from zero.param_groups import (
    Named,
    as_groups,
    by_name,
    check_trainable,
    hyperparameters,
    unnamed,
)
from zero.parameter_watch import ParameterWatch
from zero.partition_trial import check_drivable, check_partition
from zero.state import StateSlice, load_slices, own_slices
from zero.trained_by import check_free, finish_gathers, take_over


class ShardedOptimizer(torch.optim.Optimizer):
    """The parameter groups, state and memory of `ZeroOptimizer`, without its step.

    Its `param_groups` hold the user's parameters. An inner torch optimizer, made by `make_inner`,
    updates the slices of them in `owned`. `watch` finds changes of the model that this class cannot
    follow. With `may_shard` it has to be one that can be sharded,
    also where a rank is alone.
    """

    schedule: SyncSchedule
    closed = False  # whether `close` was called
    _given_up = ""  # name of a parameter that another optimizer trains, for which this was closed

    def __init__(
        self,
        parameters: Iterable[Named] | Iterable[dict[str, Any]],
        make_inner: Callable[..., torch.optim.Optimizer],
        owned: OptimizerShard,
        watch: ParameterWatch,
        *,
        order: Iterable[str] | None,
        bucket_bytes: int,
        partition: str,
        shard_weights: Sequence[int] | None,
        may_shard: bool,
    ) -> None:
        self._make_inner, self._owned, self._may_shard = make_inner, owned, may_shard
        self._watch = watch
        self._bucket_bytes, self._partition = bucket_bytes, partition
        self._shard_weights = None if shard_weights is None else tuple(shard_weights)
        self._named: dict[str, Parameter] = {}  # that are trained
        self._placed: list[list[Parameter]] = []  # parameters by group, as they are trained
        self._frozen: dict[str, Parameter] = {}  # that were given, but required no gradient
        self._given: list[list[str]] = []  # names of all, by group
        self._constructed = False
        groups = self._check(parameters)
        named = by_name(groups)
        if order is not None:
            named = {name: named[name] for name in order if name in named}
        self._add_parameters(named)
        plain_groups = [unnamed(group) for group in groups]
        try:
            self._inner = make_inner(owned.groups(plain_groups))
            check_drivable(self._inner)
            super().__init__(plain_groups, self._inner.defaults)
            take_over(self, named)
        except BaseException:
            self.close()
            raise
        self._take_groups()
        self._constructed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters, of layers that were frozen, say. Collective, between steps.

        "params" are pairs (name, parameter), whose values are taken from rank 0. Raises ValueError
        as construction does, and closes optimizers as it does.
        """
        if not self._constructed:  # called by torch's constructor
            super().add_param_group(param_group)
            return
        self._check_open()
        (group,) = self._check([param_group])
        self.wait_for_parameters()
        if group["params"]:
            self._add_parameters(by_name([group]))
        self._give_groups()
        plain_group = unnamed(group)
        super().add_param_group(plain_group)
        self._inner.add_param_group(self._owned.groups([plain_group])[0])
        self._take_groups()
        take_over(self, by_name([group]))

    def wait_for_parameters(self) -> None:
        """Wait until all parameters hold the last update. Local.

        The modules of `model` do so by themselves. Code that reads parameters in other ways,
        from `param_groups` or a list made before, calls it first. Raises RuntimeError if parameters
        of the model were moved, converted or replaced since the optimizer was made.
        """
        self._owned.parameters.wait()
        self._watch.check()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the torch optimizer's class has, such as `train`.

        Its methods run under this optimizer's hyperparameters. Raises AttributeError also where the
        torch optimizer updates other memory than that of the parameters: shards, master weights.
        """
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        if self.sharded or any(owned.has_master for owned in self._owned.pieces):
            raise AttributeError(
                f"{name} of {type(inner).__name__} is of use with whole parameters alone, and this "
                "optimizer updates shards or master weights: use stage=0 and parameters of 32 bits"
            )
        value = getattr(inner, name)
        return self._under_own_groups(value) if callable(value) else value

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the torch optimizer, by tensor that it updates here. May be replaced."""
        return self._inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if self._constructed:  # torch's constructor assigns an empty one
            self._inner.state = state

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: copies and pickles would have no ranks."""
        raise TypeError(
            "this optimizer is bound to its ranks, and neither copied nor pickled: copy its "
            "full_state_dict(), and load that into another optimizer, of the copied model"
        )

    @property
    def sharded(self) -> bool:
        """True if a rank holds the state of some elements only."""
        return self._owned.sharded

    def slices(self) -> Iterator[StateSlice]:
        """Yield the state of what this rank owns. Local; tensors are not copied.

        What a sync schedule has in flight is lacking: `schedule.settle()` waits for it. Raises
        RuntimeError as `wait_for_parameters`.
        """
        if not self.closed:  # later, parameters are those of another optimizer
            self._watch.check()
        return own_slices(self._owned, self._inner.state, self._sync_state)

    def load_slices(
        self, slices: Iterable[StateSlice], groups: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Load the state of what this rank owns from slices of any extent, in any order. Local.

        And the hyperparameters of `groups`, if given, as the torch optimizer loads them.

        Raises ValueError, before anything is changed, if they are of another model or do not cover
        what this rank owns, and RuntimeError as `wait_for_parameters`.
        """
        self._watch.check()
        shapes = {name: tuple(parameter.shape) for name, parameter in self._named.items()}
        options = [hyperparameters(group) for group in groups or self.param_groups]
        load_sync = self.schedule.load_state
        load_slices(self._owned, self._inner, slices, shapes, load_sync, options=options)
        self._take_groups()

    def memory(self) -> Memory:
        """Return the bytes that this optimizer has held on this rank, at the peak. Local."""
        gradients = self._owned.gradients
        return Memory(
            parameters=sum(parameter.nbytes for parameter in self._named.values()),
            gradients=gradients.peak_bytes,
            buckets=gradients.working_bytes + self._owned.parameters.gather_bytes,
            master=self._owned.master_bytes,
            state=state_bytes(self._inner.state.values()) + self.schedule.nbytes(),
        )

    def expected_memory(self) -> Memory:
        """Return what `memory` will be after a step, from the plan alone. Local.

        With a sync schedule, after each of its exchanges has begun.
        """
        groups = self._named_groups()
        options = {name: hyperparameters(group) for group in groups for name in group["params"]}
        own = self._owned
        memory = predict(
            own.plan,
            self._make_inner,
            own.stage,
            own.slot,
            options,
            gather_dtype=own.gather_dtype,
        )
        kept = self.schedule.expected_nbytes([owned.tensor for owned in own.pieces])
        return replace(memory, state=memory.state + kept)

    def close(self) -> None:
        """Remove the hooks from the model, and wait for parameters in flight. Local.

        The model can be trained by any other optimizer then. What `p.grad` holds stays; where it is
        sharded, or of an accumulation that has not ended, it raises RuntimeError until it is set to
        None.
        """
        self.closed = True
        self._owned.parameters.close()

    def _under_own_groups(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the torch optimizer that reads and changes the groups here."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._check_open()
            self._give_groups()
            result = method(*args, **kwargs)
            self._take_groups()
            return result

        return call

    def _give_groups(self) -> None:
        """Give the torch optimizer this optimizer's hyperparameters."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(hyperparameters(group))

    def _take_groups(self) -> None:
        """Take the hyperparameters that the torch optimizer has given its groups.

        Raises ValueError if it has made other groups.
        """
        groups, made = self.param_groups, self._inner.param_groups
        expected = self._owned.groups(groups)
        if [list(map(id, g["params"])) for g in made] != [
            list(map(id, g["params"])) for g in expected
        ]:
            raise ValueError(
                f"{type(self._inner).__name__} makes {len(made)} parameter groups of the "
                f"{len(groups)} that it is given, or puts parameters elsewhere: give it the "
                "groups as it makes them (groups=), or a class that leaves them"
            )
        self._placed = [list(group["params"]) for group in groups]
        for group, inner in zip(groups, made, strict=True):
            for key in () if self._constructed else [key for key in group if key not in inner]:
                del group[key]
            group.update(hyperparameters(inner))

    def finish_gathers(self) -> None:
        """Wait for parameters in flight. Local."""
        self._owned.parameters.wait()

    def give_up(self, name: str) -> None:
        """Close, since another optimizer trains the parameter of a name from now on. Local."""
        self._given_up = name
        self.close()

    def _check_open(self) -> None:
        """Raise RuntimeError if this optimizer was closed."""
        if self._given_up:
            raise RuntimeError(
                f"this optimizer was closed when another one was made that trains "
                f"{self._given_up}, since a parameter has one optimizer at a time: use the new "
                "one, or give each optimizer parameters of its own"
            )
        if self.closed:
            raise RuntimeError(
                "this optimizer was closed by close(), or since its world was closed or abandoned: "
                "make another one"
            )

    def _check_groups(self) -> None:
        """Raise RuntimeError if code of the user's has changed which parameters groups have."""
        groups = [group["params"] for group in self.param_groups]
        if [list(map(id, group)) for group in groups] != [
            list(map(id, group)) for group in self._placed
        ]:
            raise RuntimeError(
                "the parameters of optimizer.param_groups were changed by hand, which nothing "
                "follows: call optimizer.add_param_group for new ones, or make another optimizer"
            )

    def _check(
        self, parameters: Iterable[Named] | Iterable[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return groups of those parameters that require a gradient. Raises ValueError."""
        given = as_groups(parameters)
        groups = check_trainable(given, sharded=self._may_shard, known=self._named)
        check_free(by_name(groups))
        if self._may_shard:
            known = self._groups() if self._constructed else []
            check_partition(self._make_inner, [*known, *groups], self._partition)
        self._given += [[name for name, _ in group["params"]] for group in given]
        pairs = [pair for group in given for pair in group["params"]]
        self._frozen |= {name: p for name, p in pairs if not p.requires_grad}
        return groups

    def _add_parameters(self, named: dict[str, Parameter]) -> Sequence[Bucket]:
        """Plan buckets of parameters, own this rank's part of them, and return them."""
        finish_gathers(named)
        specs = [ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in named.items()]
        size, plan = self._owned.sharding.size, self._owned.plan
        whole = self._partition == "parameter"
        loads = [sum(b.bounds[slot + 1] - b.bounds[slot] for b in plan) for slot in range(size)]
        added = plan_buckets(
            specs, self._bucket_bytes, size, loads if whole else None, self._shard_weights
        )
        self._owned.add(added, named)
        self._watch.add(named, flat=self._owned.sharded)
        self._named |= named
        tensors = {owned.piece.spec.name: owned.tensor for owned in self._owned.pieces}
        self.schedule.add({name: p.numel() for name, p in named.items()}, tensors)
        return added

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups with pairs (name, parameter)."""
        names = {parameter: name for name, parameter in self._named.items()}
        return [
            {**group, "params": [(names[p], p) for p in group["params"]]}
            for group in self.param_groups
        ]

    def _given_names(self) -> list[list[str]]:
        """Return the names of the parameters that were given, by group, with frozen ones.

        Of those that joined another group when they were unfrozen, only in that.
        """
        trained = [set(group["params"]) for group in self._named_groups()]
        return [
            [name for name in names if name in own or name not in self._named]
            for names, own in zip(self._given, trained, strict=True)
        ]

    def _named_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups with names in place of parameters."""
        return [
            {**group, "params": [name for name, _ in group["params"]]} for group in self._groups()
        ]

    def _warn_of_unfrozen(self) -> None:
        """Warn, once and on rank 0, of given parameters that require a gradient only now."""
        found = [name for name, p in self._frozen.items() if p.requires_grad]
        names = [name for name in found if name not in self._named]
        for name in found:
            del self._frozen[name]
        if names and self._owned.sharding.rank == 0:
            warnings.warn(
                f"not trained: {', '.join(names)}, which required no gradient when the optimizer "
                "was made, and do now: on all ranks, call "
                f'optimizer.add_param_group({{"params": [("{names[0]}", ...), ...]}})',
                stacklevel=4,
            )

    def _sync_state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return what the sync schedule keeps for an updated tensor."""
        return self.schedule.state(tensor)

    def _inner_step(self) -> None:
        """Update this rank's slices by their gradients, under this optimizer's hyperparameters.

        Schedulers change those of `param_groups`, and some optimizers change their own.
        """
        self._give_groups()
        self._inner.step()
        self._warn_of_unfrozen()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(hyperparameters(inner))
