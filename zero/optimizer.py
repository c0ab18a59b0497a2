"""The optimizer step of data-parallel training: wait, mean, clip, update, publish."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero.buckets import BucketReducer, GradientBuckets
from zero.collectives import Collectives, broadcast_from_rank_0
from zero.comm_hooks import CommHook, make_hook, restore_hook_state, saved_hook_state
from zero.kernels import Kernels, TorchKernels
from zero.layout import MIB, Bucket, ParameterSpec, plan_buckets
from zero.master_weights import OptimizerShard
from zero.memory import Memory, predict_for_plan, state_bytes
from zero.norms import Clipping, FiniteCheck, NonFiniteGradientError, find_non_finite
from zero.param_groups import (
    Named,
    by_name,
    check_added,
    check_partition,
    check_trainable,
    hyperparameters,
    unnamed,
)
from zero.precision import LossScale
from zero.stages import make_stage
from zero.state import (
    StateSlice,
    check_groups,
    gathered_slices,
    load_groups,
    load_slices,
    own_slices,
)
from zero.step_weights import BatchWeight, StepConsensus, StepTotals
from zero.sync_schedule import EveryStep, SyncSchedule
from zero.tensor_views import nbytes


class StepResult(NamedTuple):
    """Figures of one step, the same on every rank."""

    grad_norm: float  # of the mean gradient, before clipping
    clip_coef: float  # factor of the gradient: 1.0 if it was not clipped, 0.0 if skipped
    clipped_norm: float  # after clipping
    weight: float  # samples (or tokens, or ranks) that the mean is over
    skipped: bool  # whether the gradient was not finite, and nothing was updated


class ZeroOptimizer(torch.optim.Optimizer):
    """Any torch optimizer over gradients that are reduced across ranks, at a ZeRO stage.

    `parameters` are pairs (name, parameter), as `model.named_parameters()` yields, or parameter
    groups whose "params" are such pairs. `optimizer_class(groups, **kwargs)` makes the update.
    Stage 0 shards nothing, 1 the optimizer state, 2 the gradients too (`zero.stages`). `partition`
    "element" makes shards equal to within an element, and may cut parameters; "parameter" deals
    whole ones to ranks, for optimizers that need matrices.

    Construction, `start` and `step` are collective; `start` is called once. Autograd hooks launch a
    bucket as soon as backward has filled it, so a rank runs backward once a step, except under
    `no_sync`. From stage 1 on parameters become views of flat memory, so move the model first.

    The gradient is the mean over all samples of the step. A rank states what its gradient stands
    for in one of three ways: `loss.backward()` alone gives every rank the same weight; `share(n)`
    before it declares the accumulated gradient a mean over n samples; `backward(loss, weight=n)`,
    once a micro-batch, declares each loss a mean over n samples. Collectives sum, and the one
    division is in `step`.

    - `max_grad_norm`, `norm_type`: the limit to which the gradient's norm is clipped.
    - `non_finite`: "stop" raises for a gradient that is not finite, "skip" updates nothing.
    - `loss_scale`: None, a number, or "dynamic" (`zero.precision.LossScale`), for fp16.
    - `wire_dtype`: bf16 or fp16, in which sums of wider gradients travel between nodes.
    - `comm_hook`: a name in `zero.comm_hooks.names()` or a `CommHook`, instead of `wire_dtype`.
    - `gather_dtype`: bf16 or fp16, to which updated parameters that are wider are rounded at stages
      1 and 2, so that their all-gather sends fewer bytes; owners keep them as master weights.
    - `schedule`: over which ranks a step is averaged (`zero.sync_schedule`); by default all.
    - `bucket_bytes`: the most that a bucket has; small models have buckets of an eighth of them.
    - `buffers`: tensors that are overwritten with rank 0's after every step.
    - `order`: names of parameters in the order of forward; by default that of `parameters`.
    - `model`: its modules wait for the parameters that the last step sent, so that all-gathers
      overlap the next forward; without it `step` waits. `start` also broadcasts its buffers.
    - `kernels`: widen 16-bit gradients, and sum squares on a device; by default torch's.

    Parameters of 16 bits have fp32 master weights in the owner's shard; what is written into the
    parameters between steps is copied to them.

    Raises ValueError for an option that does not exist, for parameters on different devices,
    without unique names or sharing memory, for an optimizer that needs whole parameters under
    partition "element", and when there is nothing to train.
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
        if non_finite not in ("stop", "skip"):
            raise ValueError(f"non_finite is {non_finite!r}: choose stop or skip")
        self._collectives, self._kernels = collectives, kernels or TorchKernels()
        self.schedule: SyncSchedule = schedule or EveryStep(collectives)
        self._steps = 0  # taken, skipped ones included
        self._make_inner, self._stage_number = partial(optimizer_class, **kwargs), stage
        self._clipping = Clipping(max_grad_norm, norm_type, self._kernels)
        self._skips, self._scale = non_finite == "skip", LossScale(loss_scale)
        self._bucket_bytes, self._deals_whole = bucket_bytes, partition == "parameter"
        self._buffers, self._model = tuple(buffers), model
        self._hook = make_hook(comm_hook, wire_dtype)
        self._stage = make_stage(stage, self.schedule.sharding, model, gather_dtype)
        groups = check_trainable(parameters, sharded=self._stage.sharded)
        named = by_name(groups)
        if order is not None:
            named = {name: named[name] for name in order if name in named}
        check_partition(partition, optimizer_class, sharded=self._stage.sharded)
        fp16 = torch.float16 in {self._hook.wire_dtype, *(p.dtype for p in named.values())}
        self._weight = BatchWeight(1 if fp16 else self.group.size)
        self._make_buckets()
        self._named: dict[str, Parameter] = {}
        self._plan: list[Bucket] = []
        self._owned = OptimizerShard(self._stage.gather_dtype)
        self._totals: StepTotals | None = None  # of the step that `synchronize` has reduced
        self._divisor = 0.0  # which makes its sums means
        self._unused: frozenset[str] = frozenset()  # parameters without a gradient on any rank
        self._constructed = False
        self._add_parameters(named)
        plain_groups = [unnamed(group) for group in groups]
        try:
            self._inner = self._make_inner(self._owned.groups(plain_groups))
            super().__init__(plain_groups, self._inner.defaults)
        except BaseException:
            self.close()
            raise
        self.state = self._inner.state
        self._constructed = True

    def start(self) -> None:
        """Overwrite parameters and buffers with rank 0's. Collective."""
        buffers = self._buffers if self._model is None else self._model.buffers()
        broadcast_from_rank_0(self._collectives, [*self._named.values(), *buffers])
        self._owned.copy_from_parameters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters, of layers that were frozen, say. Collective, between steps.

        "params" are pairs (name, parameter), whose values are taken from rank 0. Raises ValueError
        as construction does.
        """
        if not self._constructed:  # called by torch's constructor
            super().add_param_group(param_group)
            return
        group, named = check_added(
            param_group, self._named, self._owned.device, sharded=self._stage.sharded
        )
        self.wait_for_parameters()
        if named:
            self._add_parameters(named)
        if any(p.dtype == torch.float16 for p in named.values()):
            self._weight.ranks = 1
        plain_group = unnamed(group)
        super().add_param_group(plain_group)
        self._inner.add_param_group(self._owned.groups([plain_group])[0])
        broadcast_from_rank_0(self._collectives, named.values())
        self._owned.copy_from_parameters()

    @property
    def group(self) -> Collectives:
        """The ranks over which the current step is averaged."""
        return self.schedule.group(self._steps)

    def share(self, count: float | None) -> None:
        """State that the gradient of the coming backward is a mean over `count` samples. Local.

        A count of 0 makes this rank's gradient zero, whatever its values. None takes back a
        statement that no backward has followed. Shares of accumulated micro-batches add up: that is
        exact if they are equal and the gradient is their mean; `backward` is exact for any.
        """
        self._weight.state(count)

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss times the loss scale, for a call of its `backward`. Local."""
        return loss if self._scale.value == 1.0 else loss * self._scale.value

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run backward of a loss that is a mean over `weight` samples or tokens, scaled if needed.

        Local, except for the buckets that it launches. Called once a micro-batch, all but the last
        under `no_sync`. A rank without samples in a step calls `share(0)` instead.
        """
        factor = self._weight.add(weight)
        if factor:  # the mean over no samples is NaN, and 0 * NaN is NaN
            self.scale(loss * factor).backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Enclose a micro-batch that is not the last of its step.

        Gradients only accumulate; at stage 2 they are reduced, and their owners accumulate them.
        """
        return self._buckets.no_sync()

    def synchronize(self) -> None:
        """Launch the buckets that backward has not launched, and wait for all. Collective.

        `step` calls it. Call it first if other collectives run between backward and `step`, which
        must be in the same order on every rank: ranks differ in what backward has launched.
        """
        if self._totals is not None:
            return
        self._buckets.finish_round()
        self._totals = self._consensus.finish(self._buckets.missing, self._buckets.contribute_zeros)
        self._stage.gradients.finish()
        self._unused = frozenset()
        if self._totals.missing:
            self._unused = self._consensus.unused(self._named, self._buckets.used)
        self._divisor = self._totals.divisor / self._weight.unit * self._scale.value
        self._weight.reset(usual=self._totals.divisor / self.group.size)

    @torch.no_grad()
    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Wait for the sums, clip, divide, update, publish. Collective.

        Raises NonFiniteGradientError on all ranks, before anything is updated, and ValueError for a
        closure, or if the weights of all ranks sum to 0.
        """
        if closure is not None:
            raise ValueError("step() takes no closure: ranks might run backward unequally often")
        weight, divisor = self._wait_for_sums()
        norm = self._clipping.norm(self.group, self._shards(), divisor)
        finite = math.isfinite(norm)
        coef = self._clipping.coefficient(norm) if finite else 0.0
        self.wait_for_parameters()
        if finite:
            self._update(coef / divisor)  # the only division: sums become clipped means
        else:
            self._skip_or_raise(norm)
        self._publish(updated=finite)
        self._end_step()
        return StepResult(norm, coef, norm * coef if finite else 0.0, weight, skipped=not finite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients: parameters have None, or zeros without `set_to_none`.

        At stage 2 they have None either way. From stage 1 on `step` does so itself. Buckets that
        backward has launched must be stepped on before more gradients come, since other ranks take
        part in them: this discards their values only.
        """
        self._buckets.clear(set_to_none)

    def wait_for_parameters(self) -> None:
        """Wait until all parameters hold the last update. Local.

        The modules of `model` do so by themselves. Code that reads parameters after a step by other
        ways calls it first: from `param_groups`, from a list that it has made before, in a module
        that holds its children's weights in a list.
        """
        self._stage.wait_for_parameters()

    @property
    def sharded(self) -> bool:
        """Whether a rank holds the state of some elements only."""
        return self._stage.sharded

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices, the hyperparameters and the rest of the state. Local.

        Plain containers and tensors of the optimizer's own memory, by parameter name and element
        range (`zero.state`). Slices from `gather_slices` may replace "slices". "comm_hook" is of
        this rank only, and "steps" is the number of steps taken.
        """
        groups = [
            {**hyperparameters(group), "params": names}
            for group, names in zip(self.param_groups, self._names_by_group(), strict=True)
        ]
        return {
            "slices": [piece._asdict() for piece in self.slices()],
            "param_groups": groups,
            "loss_scale": self._scale.state_dict(),
            "comm_hook": saved_hook_state(self._hook, self.schedule.sharding, self._plan),
            "steps": self._steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, here or at any stage and number of ranks. Local.

        The slices must cover what this rank owns; others are ignored. "comm_hook" and "steps" may
        be absent. Raises ValueError, before anything is changed, for a state of another model or
        other groups, naming each mismatch.
        """
        groups = check_groups(state_dict, self._names_by_group())
        self.load_slices(StateSlice(**piece) for piece in state_dict["slices"])
        load_groups(self.param_groups, groups)
        self._scale.load_state_dict(state_dict["loss_scale"])
        hook_state = state_dict.get("comm_hook")
        restore_hook_state(self._hook, self.schedule.sharding, self._plan, hook_state)
        self._steps = state_dict.get("steps", self._steps)

    def slices(self) -> Iterator[StateSlice]:
        """Yield the state of what this rank owns. Local; tensors are not copied."""
        return own_slices(self._owned, self._inner.state)

    def gather_slices(self, root: int = 0) -> Iterator[StateSlice]:
        """Yield the whole state on rank `root`, a slice a parameter. Collective.

        Every rank has to exhaust the iterator. Root holds the state of one bucket at a time, beside
        its own. Raises ValueError for a root that is no rank.
        """
        ranks = self.schedule.sharding
        if not 0 <= root < ranks.size:
            raise ValueError(f"root {root} is no rank: 0 to {ranks.size - 1}")
        if not self._stage.sharded:
            return self.slices() if ranks.rank == root else iter(())
        return gathered_slices(ranks, self._plan, self._owned, self._inner.state, root)

    def load_slices(self, slices: Iterable[StateSlice]) -> None:
        """Load the state of what this rank owns from slices of any extent, in any order. Local.

        They are read one by one. Raises ValueError, before anything is changed, if they are of
        another model or do not cover what this rank owns.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self._named.items()}
        load_slices(self._owned, self._inner, slices, shapes)
        self.state = self._inner.state

    def memory(self) -> Memory:
        """Return the bytes that this optimizer has held on this rank, at the peak. Local."""
        gradients = self._stage.gradients
        return Memory(
            parameters=sum(nbytes(parameter) for parameter in self._named.values()),
            gradients=gradients.peak_bytes,
            buckets=gradients.working_bytes + self._stage.gather_bytes,
            master=self._owned.master_bytes,
            state=state_bytes(self._inner.state.values()),
        )

    def expected_memory(self) -> Memory:
        """Return what `memory` will be after a step, from the plan alone. Local."""
        groups = zip(self._names_by_group(), self.param_groups, strict=True)
        options = {name: hyperparameters(group) for names, group in groups for name in names}
        stage, gather_dtype = self._stage_number, self._stage.gather_dtype
        return predict_for_plan(
            self._plan, self._make_inner, stage, self._slot(), options, gather_dtype=gather_dtype
        )

    def close(self) -> None:
        """Remove the hooks from the model. Local."""
        self._buckets.close()
        self._stage.close()

    def _make_buckets(self) -> None:
        """Connect gradient storage, communication hook and consensus."""
        current_group, stage = partial(getattr, self, "group"), self._stage
        every = stage.every_micro_batch
        self._consensus = StepConsensus(current_group, self._weight, every_micro_batch=every)
        # Only the error message reads it, and with one rank the sums tell as much.
        self._finite = FiniteCheck(enabled=not self._skips and self._collectives.size > 1)
        self._buckets = GradientBuckets(
            stage.gradients,
            self._weight,
            self._finite,
            BucketReducer(self._hook, current_group, sharded=stage.sharded),
            self._consensus.announce if every else None,
        )

    def _add_parameters(self, named: dict[str, Parameter]) -> None:
        """Plan buckets of parameters, and own this rank's part of them."""
        specs = [ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in named.items()]
        size = self.schedule.sharding.size
        loads = [
            sum(bucket.bounds[slot + 1] - bucket.bounds[slot] for bucket in self._plan)
            for slot in range(size)
        ]
        plan = plan_buckets(specs, self._bucket_bytes, size, loads if self._deals_whole else None)
        flats = self._stage.add(plan, named)
        self._buckets.add(plan, named)
        for index, (bucket, flat) in enumerate(zip(plan, flats, strict=True), len(self._plan)):
            self._owned.add(index, bucket, self._stage.owned(bucket), named, flat)
        self._plan.extend(plan)
        self._named |= named

    def _names_by_group(self) -> list[list[str]]:
        names = {parameter: name for name, parameter in self._named.items()}
        return [[names[p] for p in group["params"]] for group in self.param_groups]

    def _slot(self) -> int:
        return self.schedule.sharding.slot(self.schedule.sharding.rank)

    def _shards(self) -> Iterator[Tensor]:
        """Yield the sums of this rank's shards, slice by slice.

        The same slices at every stage, so that the norm has the same bits.
        """
        for index, bucket in enumerate(self._plan):
            for piece in bucket.pieces(*bucket.shard(self._slot())):
                yield self._stage.gradients.reduced(index, piece)

    def _wait_for_sums(self) -> tuple[float, float]:
        """Wait until every bucket is reduced; return the step's weight and divisor. Collective."""
        self.synchronize()
        assert self._totals is not None
        weight, self._totals = self._totals.weight, None
        if not self._divisor > 0:
            raise ValueError(f"the ranks' weights sum to {weight}: at least one needs a sample")
        return weight, self._divisor

    def _update(self, factor: float) -> None:
        """Let the torch optimizer update this rank's slices by their sums times `factor`. Local.

        It uses the hyperparameters of this optimizer's groups, which schedulers change, and may
        change some itself.
        """
        self._owned.sync_from_parameters()
        self._owned.set_gradients(self._stage.gradients, factor, self._unused, self._kernels)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(hyperparameters(group))
        self._inner.step()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(hyperparameters(inner))
        self._owned.restore_gradients()
        self._scale.note_good_step()

    def _skip_or_raise(self, norm: float) -> None:
        """Reduce the loss scale, skip the update, or raise NonFiniteGradientError. Collective."""
        if self._scale.can_shrink:
            self._scale.shrink()
        elif not self._skips:
            reduced = self._owned.reduced(self._stage.gradients)
            where = find_non_finite(
                self.group, reduced, self._named, local_finite=bool(self._finite)
            )
            self._end_step()
            raise NonFiniteGradientError(f"the gradient's norm is {norm}: {where}")

    def _publish(self, *, updated: bool) -> None:
        """Exchange what the schedule asks for, and send updated shards to other ranks. Collective.

        The all-gathers go on after the return.
        """
        exchanged = self.schedule.after_update(self._steps, self._owned.tensors)
        broadcast_from_rank_0(self.group, self._buffers)
        if updated or exchanged:
            self._owned.copy_to_parameters()
            self._stage.publish()

    def _end_step(self) -> None:
        """Discard gradients that are sharded; at stage 0 parameters keep the clipped mean."""
        self._steps += 1
        if self._stage.sharded:
            self._buckets.clear()
        else:
            self._buckets.reset()
