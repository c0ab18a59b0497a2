"""The optimizer step of data-parallel training: wait, mean, clip, update, publish."""

import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from zero.accumulation import Accumulation
from zero.collectives import Collectives, broadcast_from_rank_0
from zero.comm_hooks import CommHook, NodeLevels, make_hook
from zero.comparison import StepComparison, describe_model, expect_alike
from zero.exchange.exchange import Exchange
from zero.exchange.replicas import Replicas
from zero.layout import Bucket, ParameterSpec, lay_out
from zero.losses import note_weight
from zero.memory import Memory
from zero.options import Options, check_norm_type
from zero.param_groups import (
    Named,
    as_groups,
    by_name,
    check_trainable,
    check_undistributed,
    groups_of_names,
    hyperparameters,
    named_groups,
    unnamed,
)
from zero.parameter_watch import (
    check_free,
    dense_parts,
    finish_gathers,
    left_untrained,
    placement,
    take_over,
)
from zero.precision import LossScale, is_positive
from zero.prediction import predict
from zero.shard import NonFiniteGradientError, OptimizerShard, update_alone
from zero.state import (
    PartOfState,
    StateSlice,
    check_groups,
    check_state,
    from_torch,
    load_slices,
    own_slices,
    to_torch,
    unnamed_state,
    whole_states,
    whole_unnamed_state,
)
from zero.state_view import StateByParameter
from zero.step_message import StepMessage
from zero.sync_batchnorm import layers_below
from zero.sync_schedule import EveryStep
from zero.trials import check_drivable, check_partition, choose_partition, works_by_element


class StepResult(NamedTuple):
    """Figures of one step, the same on all ranks that it is averaged over."""

    grad_norm: float  # of the mean gradient, before clipping
    clip_coef: float  # factor of the gradient: 1.0 if it was not clipped, 0.0 if skipped
    clipped_norm: float  # after clipping
    weight: float  # samples (or tokens, or ranks) that the mean is over
    skipped: bool  # whether a gradient of any rank was not finite, and nothing was updated
    loss: Any = None  # what the closure of `step` returned; differs between ranks


class ZeroOptimizer(torch.optim.Optimizer):
    """Any torch optimizer over gradients that are reduced across ranks, at a ZeRO stage.

    `parameters` are a model, or pairs (name, parameter), as `model.named_parameters()` yields, or
    parameter groups whose "params" are such pairs. `optimizer_class(groups, **kwargs)` makes the
    update. Given a model, construction compares it over ranks; it is `model` then. `options` may be
    given by name instead, such as stage=2.

    Construction, `step`, and every `loss.backward()` outside of `no_sync` are collective.
    Construction overwrites parameters with rank 0's before the optimizer class is called, which
    may copy them. Autograd hooks launch a bucket as soon as backward has filled it. When
    backward returns, the gradient is the mean over all ranks, and further ones are added to it.
    At stage 0 `p.grad` is this mean, as in DDP, and `step` uses what it holds then. At stages 1 and
    2 `p.grad` refuses any use (`zero.gradients.slots`): see `clip_grad_norm_`,
    `full_gradient` and `scale_gradients_`. One rank has `p.grad` at every stage, since nothing is
    sharded. From stage 1 on parameters become views of flat memory, so move the model first, and
    make tensors over their memory after.

    A parameter has one optimizer at a time. Making another one over it closes the one before, whose
    `step` and other uses raise RuntimeError from then on; its `state_dict` can still be taken. So
    training may go on with a new optimizer of any stage, as with plain torch. An optimizer with a
    sync schedule is not closed so, since its replicas may differ: ValueError asks for `exchange`
    and `close`.

    A mean is over the samples of all ranks. `loss.backward()` alone gives every rank the same
    weight, or that of the batch that was drawn (`Accumulation.expect`); `share` and `backward`
    state another.

    - `comm_hook`: how a bucket is summed (`zero.comm_hooks`); by default as it is. Its public
      numbers, strings, bools and dtypes are alike on all ranks.
    - `levels`: the nodes of `collectives`, for a hook that is `between_nodes`.
    - `sync_schedule`: over which ranks a step is averaged, by default all (`zero.sync_schedule`).
    - `model`: its parameters are in the order of forward, by default `parameters` are. Its buffers,
      and its parameters that no optimizer trains, are overwritten with rank 0's, too. So are
      buffers after every step: with the first's of the ranks that the step was averaged over, and
      after an exchange with rank 0's everywhere, as parameters that no optimizer trains are.

    Parameters of 16 bits have fp32 master weights in the owner's shard; what is written into the
    parameters between steps is copied to them.

    Raises ValueError for an option that does not exist, for parameters without names, or as
    `check_trainable` does, and for an optimizer that cannot be driven here, or not at this stage
    and partition: its results in a trial on small tensors depend on which rank updates what
    (`zero.trials`).
    """

    closed = ""  # why this optimizer was closed; empty if it was not
    _constructed = False

    def __init__(
        self,
        parameters: nn.Module | Iterable[Named] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        collectives: Collectives,
        options: Options | None = None,
        *,
        comm_hook: CommHook | None = None,
        levels: NodeLevels | None = None,
        sync_schedule: EveryStep | None = None,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if compares := isinstance(parameters, nn.Module):
            if model is not None:
                raise ValueError("the model is given as `parameters`: leave out model=")
            model, parameters = parameters, parameters.named_parameters()
            check_undistributed(model, collectives.size)
        given = {name: kwargs.pop(name) for name in Options.__dataclass_fields__ if name in kwargs}
        if options is not None and given:
            raise ValueError(
                f"{', '.join(given)} is given beside Options(...): give all in one of the two ways"
            )
        self.options = options = options or Options(**given)
        self._collectives, self._scale = collectives, LossScale(options.loss_scale)
        self._model, self._hook = model, make_hook(comm_hook)
        self.sync_schedule = sync_schedule or EveryStep(collectives)
        sharding = self.sync_schedule.sharding
        if collectives.size > 1:
            self._hook.bind(collectives.size, levels, scheduled=sync_schedule is not None)
        self._shard = OptimizerShard(
            options.stage,
            sharding,
            model,
            options.gather_dtype,
            overlap_forward=options.overlap_forward,
            alone=collectives.size == 1,
        )
        self._comparison = StepComparison(
            self._shard, collectives.rank, self.sync_schedule.replica, options.check_every
        )
        self.replicas: Replicas | None = None
        """Replicas of the sync schedule, if there is one."""
        if isinstance(sync_schedule, Exchange):
            self.replicas = Replicas(
                sync_schedule, self._shard, collectives, self._comparison, self._scale
            )
        self.accumulation = Accumulation(self._shard, self._hook, self.sync_schedule, self._scale)
        self._make_inner = partial(optimizer_class, **kwargs)
        self.stage = options.stage
        self.partition = choose_partition(optimizer_class, options.partition)
        self.known = works_by_element(optimizer_class)  # so is its state
        self._given: list[list[str]] = []  # names of all parameters, also frozen ones, by group
        groups = self._check(parameters)
        named = by_name(groups)
        if model is not None:
            named = {n: named[n] for n, _ in model.named_parameters() if n in named} | named
        if compares:
            self._expect_alike(named)
        self._take_first_values(named)
        self._add_parameters(named)
        torch_groups = [unnamed(group) for group in groups]
        try:
            self._inner = self._make_inner(self._shard.groups(torch_groups))
            check_drivable(self._inner)
            self._check_state()
            super().__init__(torch_groups, self._inner.defaults)
            self._shard.watch.note_others()
            take_over(self, named)
            if compares:
                self._expect_same({"the class": self.class_name})
        except BaseException:
            self.close()
            raise
        self._take_groups()
        self._constructed = True

    @_disable_dynamo
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None
    ) -> StepResult:
        """Wait for the means, clip, update, publish. Collective.

        A closure is run once before; it computes the loss and runs backward, the same number of
        times on every rank. Raises NonFiniteGradientError on all ranks, before anything is updated,
        DifferentWeightsError, a RuntimeError, on all ranks if weights differ that are compared in
        this step (`check_every`), RuntimeError on all ranks if they differ in hyperparameters, in
        loaded states, or in what was done to `p.grad`, or if something else trains a parameter of
        the model on each rank alone, ValueError if the weights of all ranks sum to 0, and
        RuntimeError in a block of `averaged` or if the optimizer was closed. With a loss scale, the
        gradients are dropped at its end.
        With a sync schedule, steps between two exchanges are those of each replica alone, which
        skips one that is not finite, with a warning: all ranks raise in the exchange. What must be
        alike on all replicas is compared in exchanges.
        """
        self._check_open()
        if self.replicas is not None:
            self.replicas.check_not_averaging()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = time.perf_counter()
        unused = self._means()
        self._shard.take_changes()
        with self._shard.gradients_set(unused):  # before the norm: then the host waits
            norm, coef = self._clip(unused)
            if self.replicas is not None:
                self.replicas.before_update(self.accumulation.steps)
            if finite := math.isfinite(norm):
                self._update(coef / self._scale.value, unused)
            else:
                self._skip_or_raise(norm)
        weight = self._publish(updated=finite)
        self.accumulation.observe("optimizer", start)
        clipped = norm * coef if finite else 0.0
        return StepResult(norm, coef, clipped, weight, skipped=not finite, loss=loss)

    @property
    def class_name(self) -> str:
        """The name of the torch class by which each rank updates its part."""
        return type(self._inner).__name__

    # Gradients: what backward leaves, and changes of it.

    @property
    def group(self) -> Collectives:
        """The ranks over which the current step is averaged."""
        return self.accumulation.group

    @property
    def coming_exchange(self) -> Exchange | None:
        """The exchange that ends the current round; None where all ranks take the step together."""
        if self.replicas is None or not self.replicas.sync_schedule.alone(self.accumulation.steps):
            return None
        return self.replicas.sync_schedule

    def share(self, count: float | None) -> None:
        """State that the gradient of the coming backward is a mean over `count` samples. Local.

        A count of 0 makes this rank's gradient zero, whatever its values. None takes back a
        statement that no backward has followed. The shares of accumulated micro-batches must be
        equal, or backward raises RuntimeError; `backward` takes any weights.
        """
        self._check_open()
        self.accumulation.weight.state(count)

    def forget_batches(self, *, drawn: bool = True) -> None:
        """Forget the batch of the last backward; with `drawn` also those not used yet. Local."""
        self.accumulation.weight.forget(drawn=drawn)

    @_disable_dynamo
    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss times the loss scale, for a call of its `backward`. Local.

        Another optimizer that the backward reaches must have the same loss scale: its `step`
        raises RuntimeError otherwise, unless `zero_grad` has dropped the gradient.
        """
        return self._scale.apply(loss)

    @_disable_dynamo
    def backward(self, loss: Tensor, weight: float) -> None:
        """Run backward of a loss that is a mean over `weight` samples or tokens, scaled if needed.

        Collective outside of `no_sync`, for one micro-batch. The gradient of a step is the mean
        over the samples of all its micro-batches, also if it is read between two of them. A rank
        without a backward in a step adds no sample to it. The weight acts on gradients, as they
        are taken. Another optimizer of the loss takes its own as those of `loss.backward()`, and
        its `step` raises RuntimeError where that gives another mean.
        Raises RuntimeError beside gradients of `loss.backward()` in the step.
        """
        self._check_open()
        weight = self.accumulation.weight.counted(weight)
        layers, zeros = ([], []) if weight else layers_below(loss)
        # What other ranks' losses owe to this rank's samples counts, also if its own has none.
        self.accumulation.state_weight(weight, weight or float(bool(layers)))
        noted = []
        try:
            if layers:  # only what lies below layers in which other ranks wait
                self._scale.applied = True
                nodes = [layer.node for layer in layers]
                noted = note_weight(nodes, self.accumulation, weight)
                torch.autograd.backward(layers, zeros)
            elif weight or loss.requires_grad:
                # Without weight, too: other optimizers of the loss take part. The mean over no
                # samples is NaN, of which the hooks of these parameters make zeros.
                loss = self.scale(loss)
                nodes = [get_gradient_edge(loss).node] if loss.requires_grad else []
                noted = note_weight(nodes, self.accumulation, weight)
                loss.backward()
        except BaseException:
            self.accumulation.interrupt()
            raise
        finally:
            for handle in noted:
                handle.remove()
        if self.accumulation.weight.stated:  # the loss reaches no parameter, or has no graph
            self.accumulation.pass_backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Enclose the backward passes of an accumulation but the last.

        Gradients only accumulate; at stage 2 they are reduced, and their owners accumulate them.
        """
        self._check_open()
        return self.accumulation.no_sync()

    @_disable_dynamo
    def synchronize(self) -> None:
        """Make sure that the gradients are means over ranks. Collective.

        Backward has done so, except on a rank that had none since the last step. Such a rank calls
        this, or `step`, while the others run backward.
        """
        self._check_open()
        self.accumulation.synchronize()

    def clip_each_rank(self, max_norm: float | None) -> None:
        """Scale each rank's own mean gradient to a norm of at most `max_norm` before the reduction.

        Local; between steps, alike on all ranks, or `step` raises RuntimeError on all. None: no
        longer. Gradients are sent when a backward outside of `no_sync` ends, when the norm of what
        was not sent before is known; means that are held then are not clipped again.
        Raises ValueError for a limit that is not above 0, and at stage 2, where each micro-batch is
        reduced by itself.
        """
        self._check_open()
        if max_norm is not None and not is_positive(max_norm):
            raise ValueError(f"max_norm is {max_norm!r}: give a number above 0, or None")
        if max_norm is not None and self._shard.stage == 2:
            raise ValueError(
                "at stage 2, no rank has the whole of its own gradient, so it cannot be clipped: "
                "use stage 0 or 1"
            )
        self._comparison.own_limit = max_norm = None if max_norm is None else float(max_norm)
        self.accumulation.clip_own(max_norm)

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradient in place so that its norm is at most `max_norm`. Collective.

        Returns the norm before, of the whole model, as a 0-dim fp64 tensor on the CPU. The same as
        `torch.nn.utils.clip_grad_norm_` at stage 0. Raises ValueError for a limit below 0, and for
        a `norm_type` that is not above 0; if limits differ, `step` raises RuntimeError on all
        ranks.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm is {max_norm!r}: give 0 or a number above")
        check_norm_type(norm_type)
        self._means()
        norm = self._agreed_norm(norm_type)
        if max_norm < norm < math.inf:  # otherwise `step` stops or skips
            self._scale_gradients(max_norm / (norm + 1e-6))
        return torch.tensor(norm, dtype=torch.float64, device="cpu")

    @_disable_dynamo
    @torch.no_grad()
    def scale_gradients_(self, factor: float) -> None:
        """Multiply the gradient in place. Collective, with the same factor on every rank.

        Otherwise `step` raises RuntimeError on all ranks.
        """
        self._means()
        self._scale_gradients(float(factor))

    def _scale_gradients(self, factor: float) -> None:
        self._shard.gradients.scale_(factor)
        self._comparison.gradient_factor *= factor

    @_disable_dynamo
    @torch.no_grad()
    def full_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a copy of a parameter's whole gradient, the same on every rank. Collective.

        In the parameter's shape, in fp32 or wider, without the loss scale. None if it has none.
        Raises ValueError for a parameter that this optimizer does not train.
        """
        name = next((name for name, p in self._named.items() if p is parameter), None)
        if name is None:
            raise ValueError("the tensor is no parameter of this optimizer")
        if name in self._means():
            return None
        return self._shard.full_gradient(name, parameter).div_(self._scale.value)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients: those of parameters become None, or zeros without `set_to_none`.

        Local; waits for reductions in flight. From stage 1 on, only `full_gradient` shows zeros.
        """
        if self.closed:
            super().zero_grad(set_to_none)
        else:
            self.accumulation.clear(set_to_none)
            self._comparison.gradient_factor = 1.0

    # Parameters.

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
            named = by_name([group])
            finish_gathers(named)
            broadcast_from_rank_0(self._collectives, named.values())
            self._comparison.begin_anew()
            self._add_parameters(named)
        self._give_groups()
        torch_group = unnamed(group)
        super().add_param_group(torch_group)
        self._inner.add_param_group(self._shard.groups([torch_group])[0])
        self._take_groups()
        take_over(self, by_name([group]))

    def wait_for_parameters(self) -> None:
        """Wait until all parameters hold the last update, as the modules of `model` do. Local.

        Raises RuntimeError if parameters of the model were moved, converted or replaced since the
        optimizer was made.
        """
        self._shard.wait()

    @property
    def in_sync(self) -> bool:
        """True if all ranks hold the same parameters: False from a step of a group to an exchange.

        An exchange of a part of the parameters leaves it False. Also True in a block of `averaged`.
        Local; the same on all ranks.
        """
        return self.replicas is None or self.replicas.in_sync

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange parameters and buffers now, if they may differ between ranks. Collective.

        Between steps, for example after the last one; later exchanges of the sync schedule stay
        where they are. Raises RuntimeError in a block of `averaged`.
        """
        self._check_open()
        if self.replicas is not None:
            self.replicas.exchange(self.accumulation.steps)

    def averaged(self) -> AbstractContextManager[bool]:
        """Return a context in which all ranks hold the means of their parameters. Collective.

        Buffers are rank 0's in it, and must not be changed, nor parameters. At its end every rank
        gets back its own, at stages 1 and 2 not after an exception that may be of this rank alone:
        then `step` raises RuntimeError. Yields whether they differ.
        """
        return nullcontext(False) if self.replicas is None else self.replicas.averaged()

    @torch.no_grad()
    def publish_loaded(self) -> None:
        """Send parameters that `load_state_dict` has restored to where they are read. Collective.

        Nothing at stage 0. Needed only for a state that was made in a block of `averaged`, and for
        `zero.state.EXACT`.
        """
        self._shard.publish()
        self._shard.wait()

    def close(
        self, why: str = "by close(), or since its world was closed or abandoned: make another one"
    ) -> None:
        """Remove the hooks from the model, and wait for parameters in flight. Local.

        The model can be trained by any other optimizer then. What `p.grad` holds stays; where it is
        sharded, or of an accumulation that has not ended, it raises RuntimeError until it is set to
        None. Errors of later uses say `why` it was closed.
        """
        if not self.closed:
            self.accumulation.close()
        self.closed = self.closed or why
        self._shard.parameters.close()

    def finish_gathers(self) -> None:
        """Wait for parameters in flight. Local."""
        self._shard.parameters.wait()

    # State.

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the torch optimizer, by parameter. May be changed, and replaced.

        At stages 1 and 2 by what each rank updates: parameters that it owns whole, and flat slices.
        The use of another parameter as a key raises RuntimeError.
        """
        if self._shard.updates_parameters:
            return self._inner.state
        return StateByParameter(self._shard, self._inner.state)  # type: ignore[return-value]

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if not self._constructed:  # torch's constructor assigns an empty one
            return
        if not self._shard.updates_parameters:
            view = StateByParameter(self._shard, defaultdict(dict))
            view.update(state)
            state = view.by_tensor
        self._inner.state = state

    @property
    def sharded(self) -> bool:
        """True if a rank holds the state of some elements only."""
        return self._shard.sharded

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices, the hyperparameters and the rest of the state.

        Local, unless a sync schedule has an exchange in flight: then collective, and waits for it,
        and applies it. Plain containers and tensors of the optimizer's own memory. The "slices"
        (`zero.state`) of all ranks together are the whole state; "unnamed_state", what the torch
        optimizer keeps under a key that is no parameter, and "comm_hook" are of this rank only, and
        "sync_weights" of its replica. At stages 1 and 2 of several ranks, "slices" refuses to be
        pickled, since one rank's are not the whole: see `full_state_dict`.
        """
        if self.replicas is not None:
            self.replicas.apply_sent()
        slices = [piece._asdict() for piece in self.slices()]
        return {
            "slices": PartOfState(slices) if self.sharded else slices,
            "param_groups": groups_of_names(self.param_groups, self._named),
            "unnamed_state": unnamed_state(self._inner.state),
            "loss_scale": self._scale.state_dict(),
            "comm_hook": self.accumulation.hook_state(),
            "steps": self.accumulation.steps,
            "in_sync": True,
            "sync_weights": [],
            **({} if self.replicas is None else self.replicas.state_dict()),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, here or at any stage and number of ranks. Local.

        Or what `full_state_dict` or a torch optimizer of the same class and groups returned.

        The slices must cover what this rank owns; others are ignored. "comm_hook", "steps",
        "in_sync" and "sync_weights" may be absent. Raises ValueError, before anything is changed,
        for a state that does not fit, and RuntimeError as `wait_for_parameters`.
        """
        self._check_open()
        own_groups = groups_of_names(self.param_groups, self._named)
        if "state" in state_dict and "slices" not in state_dict:
            trained = [group["params"] for group in own_groups]
            given = self._given_names()
            slices, groups, unnamed = from_torch(state_dict, given, trained, self._shapes())
            usual = {"loss_scale": self._scale.state_dict()} | state_dict
            parts = {"slices": [s._asdict() for s in slices], "param_groups": groups}
            state_dict = usual | parts | {"unnamed_state": unnamed}
        groups = check_groups(state_dict, own_groups)
        self._shard.watch.check()
        load_slices(
            self._shard,
            self._inner,
            (StateSlice(**piece) for piece in state_dict["slices"]),
            self._shapes(),
            None if self.replicas is None else self.replicas.sync_schedule.load_state,
            options=map(hyperparameters, groups),
            unnamed=state_dict.get("unnamed_state", {}),
        )
        if self.replicas is not None:
            self.replicas.sync_schedule.begin_anew()
        self._take_groups()
        self._comparison.begin_anew()
        self._scale.load_state_dict(state_dict["loss_scale"])
        self.accumulation.load_hook_state(state_dict.get("comm_hook"))
        self.accumulation.resume(state_dict.get("steps", self.accumulation.steps))
        if self.replicas is not None:
            self.replicas.load_state_dict(state_dict)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole state as torch's optimizers do, on every rank. Collective.

        `load_state_dict` of a torch optimizer of the same class takes it, if it was given the same
        groups of parameters, frozen ones too; and that of this class, at any stage and number of
        ranks. Tensors are copies in host memory. Raises RuntimeError with a sync schedule of
        several replicas, whose states differ: `world.checkpoints` saves all of them.
        """
        if self.sync_schedule.replicas > 1:
            raise RuntimeError(
                "with sync=, nodes have states of their own, and torch's form has one: use "
                "world.checkpoints"
            )
        self.wait_for_parameters()
        self._shard.take_changes()
        sharding, slices = self._shard.sharding, self.slices()
        states = whole_states(sharding, self._named, slices, sharded=self.sharded)
        unnamed = whole_unnamed_state(sharding, self._inner.state, sharded=self.sharded)
        groups = [
            {**group, "params": names}
            for group, names in zip(self.param_groups, self._given_names(), strict=True)
        ]
        whole = to_torch(states, unnamed, groups)
        return {**whole, "loss_scale": self._scale.state_dict(), "steps": self.accumulation.steps}

    def slices(self) -> Iterator[StateSlice]:
        """Yield the state of what this rank owns. Local; tensors are not copied.

        What a sync schedule has in flight is lacking: `state_dict` waits for it. Raises
        RuntimeError as `wait_for_parameters`.
        """
        if not self.closed:  # later, parameters are those of another optimizer
            self._shard.watch.check()
        of_replica = None if self.replicas is None else self.replicas.state
        return own_slices(self._shard, self._inner.state, of_replica)

    @property
    def weight_checks(self) -> tuple[int, float]:
        """The number of comparisons of the weights so far, and the seconds that they took here."""
        return self._comparison.checks, self._comparison.checks_s

    def memory(self) -> Memory:
        """Return the bytes that this optimizer has held on this rank, at the peak. Local."""
        kept = self._shard.memory(self._inner.state)
        exchange = 0 if self.replicas is None else self.replicas.sync_schedule.nbytes()
        return replace(kept, hook=self._hook.nbytes(), exchange=exchange)

    def predicted_memory(self, stage: int | None = None) -> Memory:
        """Return the bytes that `memory` says after a step of one micro-batch. Local.

        From the layout alone, at this optimizer's stage or another. What a hook and a sync schedule
        keep is not predicted and counts 0. Raises what the torch optimizer raises on tensors
        without memory.
        """
        return predict(
            self._shard.buckets,
            named_groups(self.param_groups, self._named),
            self._make_inner,
            stage=self.stage if stage is None else stage,
            shards=self._shard.sharding.size,
            slot=self._shard.slot,
            gather_dtype=self.options.gather_dtype,
            chained=self._hook.several_nodes,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: copies and pickles would have no ranks."""
        raise TypeError(
            "this optimizer is bound to its ranks, and neither copied nor pickled: copy its "
            "full_state_dict(), and load that into another optimizer, of the copied model"
        )

    def register_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: the states have slices, which hooks do not expect."""
        raise NotImplementedError(
            "this optimizer does not call hooks of state_dict and load_state_dict: change what "
            "full_state_dict() has returned, and what load_state_dict is given"
        )

    register_state_dict_post_hook = register_state_dict_pre_hook
    register_load_state_dict_pre_hook = register_state_dict_pre_hook
    register_load_state_dict_post_hook = register_state_dict_pre_hook

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the torch optimizer's class has, such as `train`.

        Its methods run under this optimizer's hyperparameters. Raises AttributeError also where the
        torch optimizer updates other memory than that of the parameters: shards, master weights.
        """
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        if self.sharded or self._shard.with_master:
            raise AttributeError(
                f"{name} of {type(inner).__name__} is of use with whole parameters alone, and this "
                "optimizer updates shards or master weights: use stage=0 and parameters of 32 bits"
            )
        value = getattr(inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._check_open()
            self._give_groups()
            result = value(*args, **kwargs)
            self._take_groups()
            return result

        return call if callable(value) else value

    # Phases of a step.

    def _means(self) -> frozenset[str]:
        """Make sure that the gradients are means, with the user's changes. Collective.

        Returns the names of parameters without a gradient.
        """
        self._check_open()
        if self._collectives.size > 1 and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a hook of a backward calls step() or asks for the whole gradient, which is a mean "
                "over ranks only when the backward has returned: call it behind loss.backward()"
            )
        self._shard.watch.check_groups(self.param_groups)
        self._shard.watch.check()
        self.accumulation.synchronize()
        if self.accumulation.means.scaled_by_others:
            raise RuntimeError(
                "the loss was multiplied by the loss scale of another optimizer, which is not "
                f"that of this one ({self._scale.value:g}): give all optimizers of a loss the same "
                "number as loss_scale=, and multiply the loss by one of them; or drop this "
                "optimizer's gradient by zero_grad()"
            )
        if self.accumulation.means.weighed_by_others:
            raise RuntimeError(
                "the loss was weighed by backward(loss, weight=n) of another optimizer, and counts "
                "otherwise in the gradient of this one: for one micro-batch, call share(n) of this "
                "one before, on all ranks; for several, share(n) of both, and backward of "
                "loss / micro-batches; or drop this optimizer's gradient by zero_grad()"
            )
        return self._shard.gradients.collect()

    def _clip(self, unused: frozenset[str]) -> tuple[float, float]:
        if self._collectives.size > 1:
            self._comparison.begin_step(self.param_groups)
        norm = self._agreed_norm(float(self.options.norm_type), unused)
        most = self.options.max_grad_norm
        coef = 1.0 if most is None else min(1.0, float(most) / (norm + 1e-6))
        return norm, coef if math.isfinite(norm) else 0.0

    def _update(self, factor: float, unused: frozenset[str]) -> None:
        """Let the torch optimizer update this rank's slices by means times `factor`. Local."""
        self._shard.scale_gradients(factor, unused)
        groups = self.param_groups
        self._give_groups()
        update_alone(self._inner)  # global hooks run around this optimizer's own step
        self._check_state()
        self._warn_of_unfrozen()
        for group, inner in zip(groups, self._inner.param_groups, strict=True):
            group.update({**inner, "params": group["params"]})
        if self._collectives.size > 1:
            self._comparison.after_update(groups)
        if self._scale.dynamic:
            self._scale.note_good_step()

    def _check_state(self) -> None:
        if not self.known:
            check_state(self._shard, self._inner)

    def _skip_or_raise(self, norm: float) -> None:
        """Reduce the loss scale, skip the update, or raise for what is not finite. Collective.

        A replica that takes the step alone lets the exchange raise.
        """
        if self._scale.shrink() or self.options.skips:
            return
        flag = self.accumulation.means.finite_flag
        where = self._shard.find_non_finite(self.group, self._collectives.rank, flag)
        found = f"the gradient's norm is {norm}: {where}"
        if (exchange := self.coming_exchange) is not None:
            exchange.refuse(found)
            return
        self.accumulation.end_step(taken=False)
        raise NonFiniteGradientError(found)

    def _publish(self, *, updated: bool) -> float:
        """End the step: exchange what is due, and send updated shards to other ranks. Collective.

        Returns the weight of its mean.
        """
        step, weight = self.accumulation.steps, self.accumulation.means.weight
        replicas, alone = self.replicas, self.coming_exchange is not None
        try:
            if replicas is not None:
                replicas.end_step(step, weight, updated=updated)
            else:
                constant = self._comparison.constant
                self._shard.watch.overwrite_buffers(self._collectives, constant=constant)
                if updated:
                    self._shard.publish()
        finally:
            self.accumulation.end_step(taken=updated)
            self._comparison.gradient_factor = 1.0
        if self._scale.scales:
            # They are without the scale now, which later ones have again; or not finite.
            self.zero_grad()
        if replicas is not None and alone and replicas.in_sync:
            replicas.compare(self.param_groups, frozenset(), step + 1)
        return weight

    def _agreed_norm(self, norm_type: float, without: frozenset[str] | None = None) -> float:
        """Return the norm of the mean gradient of this rank's group. Collective in the group.

        If the names of parameters `without` a gradient are given, a step begins: raises
        RuntimeError unless ranks have the same hyperparameters and update the same.

        Not computed in gradient hooks: one that reads a gradient evicts backward's caches, and
        would miss later changes of it.
        """
        sharding = self._shard.sharding  # each of the group's has the whole mean
        step, groups = self.accumulation.steps, self.param_groups
        begins, names = without is not None, without or frozenset()
        largest, message = math.isinf(norm_type), StepMessage()
        message.put("powers", self._shard.powers(norm_type), "max" if largest else "sum")
        if compares := begins and sharding.size > 1:
            self._comparison.put(message, names, step)
        message.send(sharding)
        powers = message.read()["powers"]
        norm = (powers if largest else math.pow(powers, 1 / norm_type)) / self._scale.value
        differ = compares and not self._comparison.alike(message)
        if self.replicas is not None and self.group.size > sharding.size:
            if begins:
                self.replicas.compare(groups, names, step, differ=differ)
        elif differ:
            whole = sharding.size == self._collectives.size
            self._comparison.compare(sharding, groups, names, step, in_sync=False, all_ranks=whole)
        return norm

    # Parameter groups, whose hyperparameters the torch optimizer has, too.

    def _give_groups(self) -> None:
        """Give the torch optimizer this optimizer's hyperparameters, which schedulers change."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({**group, "params": inner["params"]})

    def _take_groups(self) -> None:
        """Take the hyperparameters that the torch optimizer has given its groups.

        Raises ValueError if it has made other groups.
        """
        groups, made = self.param_groups, self._inner.param_groups
        if placement(made) != placement(self._shard.groups(groups)):
            raise ValueError(
                f"{type(self._inner).__name__} makes {len(made)} parameter groups of the "
                f"{len(groups)} that it is given, or puts parameters elsewhere: give it the "
                "groups as it makes them (groups=), or a class that leaves them"
            )
        self._shard.watch.note_groups(groups)
        for group, inner in zip(groups, made, strict=True):
            for key in () if self._constructed else [key for key in group if key not in inner]:
                del group[key]
            group.update({**inner, "params": group["params"]})

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(f"this optimizer was closed {self.closed}")

    def _check(
        self, parameters: Iterable[Named] | Iterable[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return groups of those parameters that require a gradient. Raises ValueError."""
        given = as_groups(parameters)
        groups = check_trainable(
            given, sharded=self.stage > 0, known=self._named, model=self._model
        )
        check_free(by_name(groups))
        if self.stage > 0:
            known = named_groups(self.param_groups, self._named) if self._constructed else []
            check_partition(self._make_inner, [*known, *groups], self.partition)
        self._given += [[name for name, _ in group["params"]] for group in given]
        self._shard.watch.note_frozen(given)
        return groups

    def _expect_alike(self, named: Mapping[str, Parameter]) -> None:
        """Raise ValueError on all ranks if they make different optimizers. Collective."""
        model = self._model
        if model is None or self._collectives.size == 1:
            return
        alike, tensors = describe_model(model, {**vars(self.options), "comm_hook": self._hook})
        alike |= {f"tensor {number}": text for number, text in enumerate(tensors)}
        bounds = [bucket.bounds for bucket in self._lay_out(named)]
        self._expect_same({**alike, "the bounds of shards": bounds})

    def _expect_same(self, values: Mapping[str, object]) -> None:
        expect_alike(self._collectives, values, "make the optimizer alike on all ranks")

    def _take_first_values(self, named: Mapping[str, Parameter]) -> None:
        """Overwrite parameters and buffers of the model with rank 0's. Collective.

        But for parameters that another optimizer goes on to train, which has done so.
        """
        finish_gathers(named)
        tensors: list[Tensor] = [*named.values()]
        if (model := self._model) is not None:
            others = left_untrained(model, named).items()
            tensors += [part for name, p in others for _, part in dense_parts(name, p)]
            tensors += model.buffers()
        broadcast_from_rank_0(self._collectives, tensors)

    def _lay_out(self, named: Mapping[str, Parameter]) -> tuple[Bucket, ...]:
        """Return buckets of parameters, beside those that there are. Local."""
        specs = [ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in named.items()]
        size, buckets = self._shard.sharding.size, self._shard.buckets
        whole = self.partition == "parameter"
        loads = [sum(b.bounds[slot + 1] - b.bounds[slot] for b in buckets) for slot in range(size)]
        return lay_out(specs, self.options.bucket_bytes, size, loads if whole else None)

    def _add_parameters(self, named: dict[str, Parameter]) -> None:
        """Lay out parameters in buckets, own this rank's part, and watch their gradients."""
        added = self._lay_out(named)
        self._shard.add(added, named)
        self.accumulation.add(added, named)

    @property
    def _named(self) -> dict[str, Parameter]:
        return self._shard.named

    def _given_names(self) -> list[list[str]]:
        """Return the names of the parameters that were given, by group, with frozen ones.

        Of those that joined another group when they were unfrozen, only in that.
        """
        groups = groups_of_names(self.param_groups, self._named)
        return [
            [name for name in names if name in own or name not in self._named]
            for names, own in zip(self._given, (set(g["params"]) for g in groups), strict=True)
        ]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._named.items()}

    def _warn_of_unfrozen(self) -> None:
        """Warn, once and on rank 0, of given parameters that require a gradient only now."""
        names = self._shard.watch.unfrozen()
        if names and self._shard.sharding.rank == 0:
            warnings.warn(
                f"not trained: {', '.join(names)}, which required no gradient when the optimizer "
                "was made, and do now: on all ranks, call "
                f'optimizer.add_param_group({{"params": [("{names[0]}", ...), ...]}})',
                stacklevel=8,
            )
