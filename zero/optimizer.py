"""The optimizer step of data-parallel training: wait, mean, clip, update, publish."""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from zero.agreement import StepAgreement, plain_numbers
from zero.averaging import AveragingOptimizer
from zero.collectives import Collectives, broadcast_from_rank_0
from zero.comm_hooks import CommHook, HookState, bind_hook, make_hook
from zero.comm_hooks.node_levels import NodeLevels
from zero.exchange.schedule import EveryStep, Exchanged, SyncSchedule, check_replicas
from zero.full_state import PartOfState, from_plain, to_plain, whole_tensors
from zero.gradients.reduction import StepReduction
from zero.kernels import Kernels, order
from zero.layout import MIB, Bucket
from zero.master_weights import OptimizerShard
from zero.memory import Memory
from zero.norms import NonFiniteGradientError, NonFiniteReplicaError, find_non_finite
from zero.param_groups import Named, check_shard_weights, check_sharding
from zero.parameter_watch import ParameterWatch
from zero.precision import LossScale, check_travel_dtype, is_positive
from zero.state import StateSlice, check_groups


class StepResult(NamedTuple):
    """Figures of one step, the same on all ranks that it is averaged over."""

    grad_norm: float  # of the mean gradient, before clipping
    clip_coef: float  # factor of the gradient: 1.0 if it was not clipped, 0.0 if skipped
    clipped_norm: float  # after clipping
    weight: float  # samples (or tokens, or ranks) that the mean is over
    skipped: bool  # whether a gradient of any rank was not finite, and nothing was updated
    loss: Any = None  # what the closure of `step` returned; differs between ranks


class ZeroOptimizer(AveragingOptimizer):
    """Any torch optimizer over gradients that are reduced across ranks, at a ZeRO stage.

    `parameters` are pairs (name, parameter), as `model.named_parameters()` yields, or parameter
    groups whose "params" are such pairs. `optimizer_class(groups, **kwargs)` makes the update.
    Stage 0 shards nothing, 1 the optimizer state, 2 the gradients too. `partition` "element" makes
    shards equal to within an element, and may cut parameters; "parameter" deals whole ones to
    ranks, for optimizers that need matrices. `shard_weights` make shards unequal, in proportion to
    them: whole numbers by slot of the ranks that share the state, the same on all ranks.

    Construction, `start`, `step`, and every `loss.backward()` outside of `no_sync` are collective;
    `start` is called once. Autograd hooks launch a bucket as soon as backward has filled it. When
    backward returns, the gradient is the mean over all ranks, and further ones are added to it.
    At stage 0 `p.grad` is this mean, as in DDP, and `step` uses what it holds then. At stages 1 and
    2 `p.grad` refuses any use (`zero.gradients.unavailable`): see `clip_grad_norm_`,
    `full_gradient` and `scale_gradients_`. One rank has `p.grad` at every stage, since nothing is
    sharded. From stage 1 on parameters become views of flat memory, so move the model first.

    A parameter has one optimizer at a time. Making another one over it closes the one before, whose
    `step` and other uses raise RuntimeError from then on; its `state_dict` can still be taken. So
    training may go on with a new optimizer of any stage, as with plain torch. An optimizer with a
    sync schedule is not closed so, since its replicas may differ: ValueError asks for `exchange`
    and `close`.

    A mean is over the samples of all ranks. A rank states what its gradient stands for in one of
    three ways: `loss.backward()` alone gives every rank the same weight, or that of the batch that
    was drawn (`expect_batch`); `share(n)` before it declares the accumulated gradient a mean over n
    samples; `backward(loss, weight=n)`, once a micro-batch, declares each loss a mean over n.

    - `max_grad_norm`, `norm_type`: the limit to which the gradient's norm is clipped.
    - `non_finite`: "stop" raises for a gradient that is not finite, "skip" updates nothing.
    - `loss_scale`: None, a number, or "dynamic" (`zero.precision.LossScale`), for fp16. Then
      `scale(loss).backward()`, or `backward(loss, weight)`, takes the place of `loss.backward()`.
    - `wire_dtype`: bf16 or fp16, in which sums of wider gradients travel between nodes.
    - `comm_hook`: a name in `zero.comm_hooks.names()` or a `CommHook`, instead of `wire_dtype`.
    - `levels`: the nodes of `collectives`, for a hook that is `between_nodes`.
    - `gather_dtype`: bf16 or fp16, to which updated parameters that are wider are rounded at stages
      1 and 2, so that their all-gather sends fewer bytes; owners keep them as master weights.
    - `schedule`: over which ranks a step is averaged (`zero.exchange.schedule`); by default all.
    - `bucket_bytes`: maximum size of a bucket; small models get smaller ones.
    - `buffers`: tensors that are overwritten with rank 0's after every step: with the first's of
      the ranks that the step was averaged over, and after an exchange with rank 0's everywhere.
      Iterated over anew each time.
    - `order`: names of parameters in the order of forward; by default that of `parameters`.
    - `model`: `start` also broadcasts its buffers, and its parameters that do not train.
    - `overlap_forward`: at stages 1 and 2, `step` does not wait for the parameters that other ranks
      update. Each module of `model` waits for its own when it is called or read. Code that reads
      parameters from a list made before has to call `wait_for_parameters`.
    - `kernels`: widen 16-bit gradients, and sum squares on a device; by default torch's.

    Parameters of 16 bits have fp32 master weights in the owner's shard; what is written into the
    parameters between steps is copied to them.

    Raises ValueError for an option that does not exist, for parameters as `check_trainable` does,
    for a schedule whose replicas are not all ranks, and for an optimizer that cannot be driven
    here, or not at this stage and partition: its results in a trial on small tensors depend on
    which rank updates what (`zero.partition_trial`).
    """

    def __init__(
        self,
        parameters: Iterable[Named] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        collectives: Collectives,
        *,
        stage: int = 0,
        partition: Literal["element", "parameter"] = "element",
        shard_weights: Sequence[int] | None = None,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        non_finite: Literal["stop", "skip"] = "stop",
        loss_scale: float | Literal["dynamic"] | None = None,
        wire_dtype: torch.dtype | None = None,
        gather_dtype: torch.dtype | None = None,
        comm_hook: str | CommHook | None = None,
        levels: NodeLevels | None = None,
        schedule: SyncSchedule | None = None,
        bucket_bytes: int = 25 * MIB,
        buffers: Collection[Tensor] = (),
        order: Iterable[str] | None = None,
        model: nn.Module | None = None,
        overlap_forward: bool = False,
        kernels: Kernels | None = None,
        **kwargs: Any,
    ) -> None:
        check_sharding(stage, partition)
        check_travel_dtype("gather_dtype", gather_dtype)
        if non_finite not in ("stop", "skip"):
            raise ValueError(f"non_finite is {non_finite!r}: choose stop or skip")
        if not is_positive(norm_type):
            raise ValueError(f"norm_type is {norm_type!r}: give a number above 0, or math.inf")
        if max_grad_norm is not None and not is_positive(max_grad_norm):
            raise ValueError(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None")
        self._collectives, self._kernels = collectives, kernels or Kernels()
        self._norm_type = float(norm_type)
        self._max_norm = math.inf if max_grad_norm is None else float(max_grad_norm)
        self._skips, self._scale = non_finite == "skip", LossScale(loss_scale)
        self._buffers, self._model, watch = buffers, model, ParameterWatch(model)
        self._warned_of_sparse = False
        self._hook = make_hook(comm_hook, wire_dtype)
        self.schedule: SyncSchedule = schedule or EveryStep(collectives)
        check_replicas(self.schedule, collectives)
        alone, sharding = collectives.size == 1, self.schedule.sharding
        check_shard_weights(shard_weights, sharding.size)
        self._levels = bind_hook(
            self._hook,
            levels,
            size=collectives.size,
            scheduled=not isinstance(self.schedule, EveryStep),
        )
        gather_dtype, own_stage = gather_dtype if stage else None, stage if sharding.size > 1 else 0
        waiting = model if overlap_forward else None
        owned = OptimizerShard(own_stage, sharding, waiting, gather_dtype, alone=alone)
        self._agreement = StepAgreement(owned, collectives.rank, self.schedule.replica)
        self._reduction = StepReduction(
            owned,
            self._hook,
            self.schedule,
            self._levels,
            self._scale,
            world_size=collectives.size,
            check=partial(_check_backward, watch, self._scale),
        )
        super().__init__(
            parameters,
            partial(optimizer_class, **kwargs),
            owned,
            watch,
            order=order,
            bucket_bytes=bucket_bytes,
            partition=partition,
            shard_weights=shard_weights,
            may_shard=stage > 0,
        )

    def start(self) -> None:
        """Overwrite parameters, frozen ones too, and buffers with rank 0's. Collective."""
        others = list(self._buffers)
        if self._model is not None:
            frozen = {n: p for n, p in self._model.named_parameters() if not p.requires_grad}
            others = [*frozen.values(), *self._model.buffers()]
            self._agreement.add_untrained(frozen)
        broadcast_from_rank_0(self._collectives, [*self._named.values(), *others])
        self._owned.copy_from_parameters()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Wait for the means, clip, update, publish. Collective.

        A closure is run once before; it computes the loss and runs backward, the same number of
        times on every rank. Raises NonFiniteGradientError on all ranks, before anything is updated,
        RuntimeError on all ranks if they differ in hyperparameters, in parameters (of which some
        elements are compared), in loaded states, or in what was done to `p.grad`,
        ValueError if the weights of all ranks sum to 0, and RuntimeError in a block of `averaged`
        or if the optimizer was closed.
        In a step in which replicas do not wait for each other, one of them alone raises
        NonFiniteReplicaError, and weights are not compared.
        """
        self._check_open()
        self._check_not_averaging()
        loss = _evaluate(closure)
        unused = self._prepare()
        self._warn_of_sparse()
        self._owned.parameters.wait()
        self._owned.sync_from_parameters()
        self._owned.set_gradients(unused)  # before the norm, for which the host waits
        try:
            norm = self._agreed_norm(self._norm_type, unused)
            finite = math.isfinite(norm)
            coef = min(1.0, self._max_norm / (norm + 1e-6)) if finite else 0.0
            steps = self._reduction.steps
            self.schedule.before_update(steps, self._updated_tensors(), equal=self.in_sync)
            if finite:
                self._update(coef / self._scale.value, unused)
            else:
                self._skip_or_raise(norm)
        finally:
            self._owned.restore_gradients()
        try:
            self._publish(updated=finite)
        finally:
            weight = self._reduction.end_step(taken=finite)
        if finite and self._scale.scales:
            self.zero_grad()  # they are without the scale now, which later gradients have again
        norms = (norm, coef, norm * coef if finite else 0.0)
        return StepResult(*norms, weight, skipped=not finite, loss=loss)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices, the hyperparameters and the rest of the state.

        Local, unless a sync schedule has an exchange in flight: then collective, and waits for it,
        and applies it if `settling_changes` of the schedule. Plain containers and tensors of the
        optimizer's own memory. The "slices" (`zero.state`) of all ranks together are the whole
        state; "comm_hook" is of this rank only, and "sync_weights" of its replica. At stages 1 and
        2 of several ranks, "slices" refuses to be pickled, since one rank's are not the whole: see
        `full_state_dict`.
        """
        self._settle()
        slices = [piece._asdict() for piece in self.slices()]
        return {
            "slices": PartOfState(slices) if self.sharded else slices,
            "param_groups": self._named_groups(),
            "loss_scale": self._scale.state_dict(),
            "comm_hook": self.hook_state.state_dict(),
            "steps": self._reduction.steps,
            "in_sync": self._in_sync,
            "sync_weights": self.schedule.weights(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, here or at any stage and number of ranks. Local.

        Or what `full_state_dict` or a torch optimizer of the same class and groups returned.

        The slices must cover what this rank owns; others are ignored. "comm_hook", "steps",
        "in_sync" and "sync_weights" may be absent. Raises ValueError, before anything is changed,
        for a state that does not fit.
        """
        self._check_open()
        if "state" in state_dict and "slices" not in state_dict:
            state_dict = self._from_plain(state_dict)
        groups = check_groups(state_dict, self._named_groups())
        self.load_slices((StateSlice(**piece) for piece in state_dict["slices"]), groups)
        self._agreement.begin_anew()
        self._scale.load_state_dict(state_dict["loss_scale"])
        self.hook_state.load_state_dict(state_dict.get("comm_hook"))
        self._reduction.resume(state_dict.get("steps", self._reduction.steps))
        self.schedule.load_weights(state_dict.get("sync_weights", ()))
        self._in_sync = self.schedule.replicas == 1 or state_dict.get("in_sync", True)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole state as torch's optimizers do, on every rank. Collective.

        `load_state_dict` of a torch optimizer of the same class takes it, if it was given the same
        groups of parameters, frozen ones too; and that of this class, at any stage and number of
        ranks. Tensors are copies in host memory. Raises RuntimeError with a sync schedule of
        several replicas, whose states differ: `world.checkpoints` saves all of them.
        """
        if self.schedule.replicas > 1:
            raise RuntimeError(
                "with sync=, nodes have states of their own, and torch's form has one: use "
                "world.checkpoints"
            )
        self.wait_for_parameters()
        self._owned.sync_from_parameters()
        sharding, slices = self._owned.sharding, self.slices()
        states = whole_tensors(sharding, self._named, slices, sharded=self.sharded)
        groups = [
            {**group, "params": names}
            for group, names in zip(self._named_groups(), self._given_names(), strict=True)
        ]
        plain = to_plain(states, groups)
        return {**plain, "loss_scale": self._scale.state_dict(), "steps": self._reduction.steps}

    def memory(self) -> Memory:
        """Return the bytes that this optimizer has held on this rank, at the peak. Local."""
        return replace(super().memory(), hook=self._hook.nbytes())

    def expected_memory(self) -> Memory:
        """Return what `memory` will be after a step, from the plan alone. Local."""
        nbytes = self._hook.expected_nbytes(self._owned.plan, self._levels)
        return replace(super().expected_memory(), hook=nbytes)

    @property
    def hook_state(self) -> HookState:
        """The state of the communication hook on this rank, with what it depends on."""
        orders = {name: order(parameter) for name, parameter in self._named.items()}
        own = self._owned.plan, self._levels
        used = self._reduction.used
        return HookState(self._hook, self.schedule.sharding, *own, orders=orders, used=used)

    def close(self) -> None:
        """Close, as `ShardedOptimizer.close`. Local."""
        if not self.closed:
            self._reduction.buckets.close()
        super().close()

    def _from_plain(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return a state in torch's form as `state_dict` returns it."""
        trained = [group["params"] for group in self._named_groups()]
        shapes = {name: tuple(parameter.shape) for name, parameter in self._named.items()}
        slices, groups = from_plain(plain, self._given_names(), trained, shapes)
        scale = plain.get("loss_scale", self._scale.state_dict())
        steps = plain.get("steps", self._reduction.steps)
        named = [piece._asdict() for piece in slices]
        return {"slices": named, "param_groups": groups, "loss_scale": scale, "steps": steps}

    def _warn_of_sparse(self) -> None:
        """Warn, once and on rank 0, of sparse gradients."""
        names = self._reduction.buckets.sparse
        if names and not self._warned_of_sparse and self._collectives.rank == 0:
            self._warned_of_sparse = True
            warnings.warn(
                f"the sparse gradients of {', '.join(sorted(names))} are made dense, since ranks "
                "add them up: sparse=False gives the same result",
                stacklevel=7,
            )

    def _update(self, factor: float, unused: frozenset[str]) -> None:
        """Let the torch optimizer update this rank's slices by means times `factor`.

        Local, unless the torch optimizer counts steps by group (`StepAgreement.after_update`).
        """
        self._owned.scale_gradients(factor, unused, self._kernels)
        groups, before = self.param_groups, dict(plain_numbers(self.param_groups))
        self._inner_step()
        if self._owned.sharding.size > 1:
            self._agreement.after_update(groups, before, unused, self._named)
        self._scale.note_good_step()

    def _skip_or_raise(self, norm: float) -> None:
        """Reduce the loss scale, skip the update, or raise for what is not finite. Collective."""
        if not self._scale.shrink() and not self._skips:
            alone = self.schedule.independent(self._reduction.steps)
            ranks = self.group if alone else self._collectives
            shards, finite = self._owned.shards(), self._reduction.finite
            where = find_non_finite(ranks, shards, self._named, finite, self._collectives.rank)
            self._reduction.end_step(taken=False)
            error = NonFiniteReplicaError if alone else NonFiniteGradientError
            raise error(f"the gradient's norm is {norm}: {where}")

    def _publish(self, *, updated: bool) -> None:
        """Exchange what the schedule asks for, and send updated shards to other ranks. Collective.

        The all-gathers are still in flight on return.
        """
        whole = self.group.size == self._collectives.size
        self._in_sync = self._in_sync and whole
        weight = self._reduction.finished_weight if updated else 0.0
        self.schedule.note_weight(self._reduction.steps, weight)
        try:
            exchanged = self.schedule.after_update(self._reduction.steps, self._updated_tensors())
        except NonFiniteGradientError:  # on all ranks, which keep what they have updated
            self._publish_parameters()
            raise
        nothing = exchanged is Exchanged.NOTHING
        of_replica = nothing or self.schedule.independent(self._reduction.steps)
        broadcast_from_rank_0(self.group if of_replica else self._collectives, self._buffers)
        self._in_sync = self._in_sync or exchanged is Exchanged.ALL
        if updated or not nothing:
            self._publish_parameters()

    def _add_parameters(self, named: dict[str, Parameter]) -> Sequence[Bucket]:
        """Plan buckets of parameters, and watch their gradients."""
        if self._constructed:
            broadcast_from_rank_0(self._collectives, named.values())
            self._agreement.begin_anew()
        plan = super()._add_parameters(named)
        self._agreement.add(named)
        self._reduction.add(plan, named)
        return plan


def _check_backward(watch: ParameterWatch, scale: LossScale) -> None:
    watch.check_kinds()
    scale.check_applied()


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    """Return what a closure returns, which may run backward; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
