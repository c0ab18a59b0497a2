"""The optimizer step of data-parallel training: wait, mean, clip, update, publish."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero.buckets import StepReduction
from zero.collectives import Collectives, broadcast_from_rank_0
from zero.comm_hooks import CommHook, make_hook, restore_hook_state, saved_hook_state
from zero.kernels import Kernels
from zero.layout import MIB, Bucket
from zero.master_weights import OptimizerShard
from zero.norms import FiniteCheck, NonFiniteGradientError, find_non_finite, global_norm
from zero.param_groups import Named, check_sharding, check_trainable, hyperparameters
from zero.precision import LossScale, check_travel_dtype, is_positive
from zero.sharded_optimizer import ShardedOptimizer
from zero.state import StateSlice, check_groups
from zero.sync_schedule import EveryStep, SyncSchedule


class StepResult(NamedTuple):
    """Figures of one step, the same on every rank."""

    grad_norm: float  # of the mean gradient, before clipping
    clip_coef: float  # factor of the gradient: 1.0 if it was not clipped, 0.0 if skipped
    clipped_norm: float  # after clipping
    weight: float  # samples (or tokens, or ranks) that the mean is over
    skipped: bool  # whether the gradient was not finite, and nothing was updated


class ZeroOptimizer(ShardedOptimizer):
    """Any torch optimizer over gradients that are reduced across ranks, at a ZeRO stage.

    `parameters` are pairs (name, parameter), as `model.named_parameters()` yields, or parameter
    groups whose "params" are such pairs. `optimizer_class(groups, **kwargs)` makes the update.
    Stage 0 shards nothing, 1 the optimizer state, 2 the gradients too. `partition` "element" makes
    shards equal to within an element, and may cut parameters; "parameter" deals whole ones to
    ranks, for optimizers that need matrices.

    Construction, `start` and `step` are collective; `start` is called once. Autograd hooks launch a
    bucket as soon as backward has filled it, so a rank runs backward once a step, except under
    `no_sync`. From stage 1 on parameters become views of flat memory, so move the model first.

    The gradient is the mean over all samples of the step. A rank states what its gradient stands
    for in one of three ways: `loss.backward()` alone gives every rank the same weight; `share(n)`
    before it declares the accumulated gradient a mean over n samples; `backward(loss, weight=n)`,
    once a micro-batch, declares each loss a mean over n samples.

    - `max_grad_norm`, `norm_type`: the limit to which the gradient's norm is clipped.
    - `non_finite`: "stop" raises for a gradient that is not finite, "skip" updates nothing.
    - `loss_scale`: None, a number, or "dynamic" (`zero.precision.LossScale`), for fp16.
    - `wire_dtype`: bf16 or fp16, in which sums of wider gradients travel between nodes.
    - `comm_hook`: a name in `zero.comm_hooks.names()` or a `CommHook`, instead of `wire_dtype`.
    - `gather_dtype`: bf16 or fp16, to which updated parameters that are wider are rounded at stages
      1 and 2, so that their all-gather sends fewer bytes; owners keep them as master weights.
    - `schedule`: over which ranks a step is averaged (`zero.sync_schedule`); by default all.
    - `bucket_bytes`: maximum size of a bucket; small models get smaller ones.
    - `buffers`: tensors that are overwritten with rank 0's after every step.
    - `order`: names of parameters in the order of forward; by default that of `parameters`.
    - `model`: its modules wait for the parameters that the last step sent, so that all-gathers
      overlap the next forward; without it `step` waits. `start` also broadcasts its buffers.
    - `kernels`: widen 16-bit gradients, and sum squares on a device; by default torch's.

    Parameters of 16 bits have fp32 master weights in the owner's shard; what is written into the
    parameters between steps is copied to them.

    Raises ValueError for an option that does not exist, for parameters as `check_trainable` does,
    and for an optimizer that needs whole parameters under partition "element".
    """

    def __init__(
        self,
        parameters: Iterable[Named] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        collectives: Collectives,
        *,
        stage: int = 0,
        partition: Literal["element", "parameter"] = "element",
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        non_finite: Literal["stop", "skip"] = "stop",
        loss_scale: float | Literal["dynamic"] | None = None,
        wire_dtype: torch.dtype | None = None,
        gather_dtype: torch.dtype | None = None,
        comm_hook: str | CommHook | None = None,
        schedule: SyncSchedule | None = None,
        bucket_bytes: int = 25 * MIB,
        buffers: Iterable[Tensor] = (),
        order: Iterable[str] | None = None,
        model: nn.Module | None = None,
        kernels: Kernels | None = None,
        **kwargs: Any,
    ) -> None:
        check_sharding(stage, partition, optimizer_class)
        check_travel_dtype("gather_dtype", gather_dtype)
        if non_finite not in ("stop", "skip"):
            raise ValueError(f"non_finite is {non_finite!r}: choose stop or skip")
        if not is_positive(norm_type):
            raise ValueError(f"norm_type is {norm_type!r}: give a number above 0, or math.inf")
        if max_grad_norm is not None and not is_positive(max_grad_norm):
            raise ValueError(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None")
        groups = check_trainable(parameters, sharded=stage > 0)
        self._collectives, self._kernels = collectives, kernels or Kernels()
        self._norm_type = float(norm_type)
        self._max_norm = math.inf if max_grad_norm is None else float(max_grad_norm)
        self._skips, self._scale = non_finite == "skip", LossScale(loss_scale)
        self._buffers, self._model = tuple(buffers), model
        self._hook = make_hook(comm_hook, wire_dtype)
        self.schedule: SyncSchedule = schedule or EveryStep(collectives)
        owned = OptimizerShard(stage, self.schedule.sharding, model, gather_dtype)
        # Only an error message reads it, and with one rank the sums tell as much.
        finite = FiniteCheck(enabled=not self._skips and collectives.size > 1)
        self._reduction = StepReduction(owned.gradients, self._hook, self.schedule, stage, finite)
        make_inner = partial(optimizer_class, **kwargs)
        super().__init__(
            groups, make_inner, owned, order=order, bucket_bytes=bucket_bytes, partition=partition
        )

    def start(self) -> None:
        """Overwrite parameters and buffers with rank 0's. Collective."""
        buffers = self._buffers if self._model is None else self._model.buffers()
        broadcast_from_rank_0(self._collectives, [*self._named.values(), *buffers])
        self._owned.copy_from_parameters()

    @property
    def group(self) -> Collectives:
        """The ranks over which the current step is averaged."""
        return self._reduction.group

    def share(self, count: float | None) -> None:
        """State that the gradient of the coming backward is a mean over `count` samples. Local.

        A count of 0 makes this rank's gradient zero, whatever its values. None takes back a
        statement that no backward has followed. Shares of accumulated micro-batches add up: that is
        exact if they are equal and the gradient is their mean; `backward` is exact for any.
        """
        self._reduction.weight.state(count)

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss times the loss scale, for a call of its `backward`. Local."""
        return loss if self._scale.value == 1.0 else loss * self._scale.value

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run backward of a loss that is a mean over `weight` samples or tokens, scaled if needed.

        Local, except for the buckets that it launches. Called once a micro-batch, all but the last
        under `no_sync`. A rank without samples in a step calls `share(0)` instead.
        """
        factor = self._reduction.weight.add(weight)
        if factor:  # the mean over no samples is NaN, and 0 * NaN is NaN
            self.scale(loss * factor).backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Enclose a micro-batch that is not the last of its step.

        Gradients only accumulate; at stage 2 they are reduced, and their owners accumulate them.
        """
        return self._reduction.buckets.no_sync()

    def synchronize(self) -> None:
        """Launch the buckets that backward has not launched, and wait for all. Collective.

        `step` calls it. Call it first if other collectives run between backward and `step`, which
        must be in the same order on every rank: ranks differ in what backward has launched.
        """
        self._reduction.synchronize(self._named, self._scale.value)

    @torch.no_grad()
    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Wait for the sums, clip, divide, update, publish. Collective.

        Raises NonFiniteGradientError on all ranks, before anything is updated, and ValueError for a
        closure, or if the weights of all ranks sum to 0.
        """
        if closure is not None:
            raise ValueError("step() takes no closure: ranks might run backward unequally often")
        self.synchronize()
        weight, divisor, unused = self._reduction.take()
        norm = self._agreed_norm(divisor)
        finite = math.isfinite(norm)
        coef = min(1.0, self._max_norm / (norm + 1e-6)) if finite else 0.0
        self.wait_for_parameters()
        if finite:
            self._update(coef / divisor, unused)  # the only division: sums to clipped means
        else:
            self._skip_or_raise(norm)
        self._publish(updated=finite)
        self._reduction.end_step()
        return StepResult(norm, coef, norm * coef if finite else 0.0, weight, skipped=not finite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients: parameters have None, or zeros without `set_to_none`.

        At stage 2 they have None either way. From stage 1 on `step` does so itself. If backward
        has launched buckets, call `step` before the next backward, as the other ranks do.
        """
        self._reduction.buckets.clear(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices, the hyperparameters and the rest of the state. Local.

        Plain containers and tensors of the optimizer's own memory. The "slices" (`zero.state`) of
        all ranks together are the whole state; "comm_hook" is of this rank only.
        """
        return {
            "slices": [piece._asdict() for piece in self.slices()],
            "param_groups": self._named_groups(),
            "loss_scale": self._scale.state_dict(),
            "comm_hook": saved_hook_state(self._hook, self.schedule.sharding, self._owned.plan),
            "steps": self._reduction.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, here or at any stage and number of ranks. Local.

        The slices must cover what this rank owns; others are ignored. "comm_hook" and "steps" may
        be absent. Raises ValueError, before anything is changed, for a state that does not fit.
        """
        groups = check_groups(state_dict, self._named_groups())
        self.load_slices(StateSlice(**piece) for piece in state_dict["slices"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(hyperparameters(saved)))
        self._scale.load_state_dict(state_dict["loss_scale"])
        hook_state = state_dict.get("comm_hook")
        restore_hook_state(self._hook, self.schedule.sharding, self._owned.plan, hook_state)
        self._reduction.steps = state_dict.get("steps", self._reduction.steps)

    def close(self) -> None:
        """Remove the hooks from the model. Local."""
        self._reduction.buckets.close()
        super().close()

    def _agreed_norm(self, divisor: float) -> float:
        """Return the norm of the mean gradient of this rank's group. Collective.

        Not finite if that of any group is not, so that all ranks skip or stop together.
        """
        shards = [shard for _, shard in self._owned.shards()]
        norm = global_norm(self.group, shards, self._norm_type, self._kernels) / divisor
        if self.group.size == self._collectives.size:
            return norm
        total = torch.tensor([norm], dtype=torch.float64)
        self._collectives.all_reduce(total).wait()
        return norm if math.isfinite(total) else float(total)

    def _update(self, factor: float, unused: frozenset[str]) -> None:
        """Let the torch optimizer update this rank's slices by their sums times `factor`. Local."""
        self._owned.sync_from_parameters()
        self._owned.set_gradients(factor, unused, self._kernels)
        self._inner_step()
        self._owned.restore_gradients()
        self._scale.note_good_step()

    def _skip_or_raise(self, norm: float) -> None:
        """Reduce the loss scale, skip the update, or raise NonFiniteGradientError. Collective."""
        if not self._scale.shrink() and not self._skips:
            shards, finite = self._owned.shards(), self._reduction.finite
            where = find_non_finite(self._collectives, shards, self._named, finite)
            self._reduction.end_step()
            raise NonFiniteGradientError(f"the gradient's norm is {norm}: {where}")

    def _publish(self, *, updated: bool) -> None:
        """Exchange what the schedule asks for, and send updated shards to other ranks. Collective.

        The all-gathers are still in flight on return.
        """
        updated_tensors = [own.tensor for own in self._owned.pieces]
        exchanged = self.schedule.after_update(self._reduction.steps, updated_tensors)
        broadcast_from_rank_0(self.group, self._buffers)
        if updated or exchanged:
            self._owned.copy_to_parameters()
            self._owned.parameters.launch()

    def _add_parameters(self, named: dict[str, Parameter]) -> Sequence[Bucket]:
        """Plan buckets of parameters, and watch their gradients."""
        if self._constructed:
            broadcast_from_rank_0(self._collectives, named.values())
        plan = super()._add_parameters(named)
        self._reduction.add(plan, named)
        return plan
