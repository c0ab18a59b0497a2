"""The optimizer step of data-parallel training: wait, mean, clip, update, publish."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero.buckets import GradientBuckets
from zero.collectives import Collectives
from zero.finite_check import FiniteCheck
from zero.kernels import Kernels, TorchKernels
from zero.layout import MIB, Bucket, ParameterSpec, plan_buckets
from zero.master_weights import OptimizerShard
from zero.memory import Memory, predict_for_plan, state_bytes
from zero.non_finite import describe_non_finite
from zero.norms import global_norm
from zero.param_groups import (
    Named,
    by_name,
    check_partition,
    check_trainable,
    difference,
    hyperparameters,
    is_positive,
    named_groups,
    refuse_shared_memory,
    unnamed,
)
from zero.precision import LossScale
from zero.replicas import broadcast_from_rank_0
from zero.stages import make_stage
from zero.state import StateSlice, gathered_slices, own_slices, take_slices
from zero.step_consensus import StepConsensus, StepTotals
from zero.step_weights import BatchWeight
from zero.tensor_views import nbytes


class StepResult(NamedTuple):
    """What one step did; the same numbers on every rank."""

    grad_norm: float  # norm of the mean gradient, before clipping
    clip_coef: float  # by which clipping multiplied the gradient: 1.0 when it did not
    clipped_norm: float  # the norm after it
    weight: float  # samples (or tokens, or ranks) that the mean is over
    skipped: bool  # whether the gradient was not finite, and nothing was updated


class NonFiniteGradientError(ArithmeticError):
    """The gradient holds an infinity or a NaN. Raised by every rank alike; nothing was updated."""


class ZeroOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, over gradients that are reduced across ranks, at a ZeRO stage.

    `parameters` are pairs (name, parameter), or parameter groups whose "params" are such pairs:
    `model.named_parameters()` will do. `optimizer_class(groups, **kwargs)` makes the update. Stage
    0 shards nothing; 1 shards its state over ranks, 2 the gradients too (`zero.stages`). With
    `partition` "element" shards are equal to within an element, and cut parameters anywhere; with
    "parameter" whole ones are dealt to ranks, for optimizers that look at matrices.

    Parameters of 16 bits are updated through fp32 masters, which exist in the shard only and heed
    what is written into the parameters between steps.
    `loss_scale` (for fp16) is None, a number, or "dynamic": see `zero.precision.LossScale`.
    The gradient is clipped to `max_grad_norm` in its `norm_type`-norm. `non_finite` says what a
    step does with a gradient that is not finite: "stop" raises, "skip" updates nothing.
    `wire_dtype` (fp16 or bf16) is what sums of wider gradients travel in between nodes.
    `buffers` (BatchNorm's statistics, say) are kept equal to rank 0's after every step; those of
    `model` are made so by `start`.

    Gradients live in buckets of at most `bucket_bytes` bytes, and of about an eighth of the model
    where that is less. Construction is collective, since the ranks of a node may share the memory
    of buckets: construct on all ranks alike. Then call `start`, once, and `step` and `zero_grad`
    once a step: `start` and `step` are collective too. Hooks launch a bucket as soon as
    backward has filled it. `order` names the parameters in the order of the model, which backward
    reverses; by default that of `parameters`. From stage 1 on, parameters are views into flat
    memory (in a world of one they stay in theirs), so move the model first. With `model` given, the
    last step's parameters arrive during the next forward, and what asks the model's modules for
    them waits; without it `step` waits. `kernels` (torch's by default) widen 16-bit gradients, and
    take the norm on a device other than the CPU.

    The gradient is the mean over the whole step's samples, whatever each rank's share of them.
    What a rank's gradient stands for is stated in one of three ways: call `loss.backward()` alone,
    and every rank counts the same; call `share(n)` before it, where the gradient that accumulates
    is a mean over n samples; or call `backward(loss, weight=n)`, once a micro-batch, where each
    loss is a mean over n samples. Collectives sum; the one division into a mean is in `step`.

    Raises ValueError for what does not exist (stage, partition, norm, scale, wire dtype), for
    parameters on different devices, without names of their own or sharing memory, for an optimizer
    that needs whole parameters under partition "element", and when there is nothing to train.
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
        bucket_bytes: int = 25 * MIB,
        buffers: Iterable[Tensor] = (),
        order: Iterable[str] | None = None,
        model: nn.Module | None = None,
        kernels: Kernels | None = None,
        **kwargs: Any,
    ) -> None:
        if non_finite not in ("stop", "skip"):
            raise ValueError(f"non_finite is {non_finite!r}: choose stop or skip")
        if not is_positive(norm_type):
            raise ValueError(f"norm_type is {norm_type!r}: give a number above 0, or math.inf")
        if max_grad_norm is not None and not is_positive(max_grad_norm):
            raise ValueError(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None")
        self._collectives, self._kernels = collectives, kernels or TorchKernels()
        self._make_inner, self._stage_number = partial(optimizer_class, **kwargs), stage
        self._max_grad_norm, self._norm_type = max_grad_norm, float(norm_type)
        self._skips = non_finite == "skip"
        self._bucket_bytes = bucket_bytes
        self._buffers, self._model = tuple(buffers), model
        self._scale = LossScale(loss_scale)
        self._stage = make_stage(stage, collectives, model, wire_dtype)
        groups = check_trainable(parameters, sharded=self._stage.sharded)
        self._named: dict[str, Parameter] = {}
        named = by_name(groups)
        if order is not None:
            named = {name: named[name] for name in order if name in named}
        check_partition(partition, optimizer_class, sharded=self._stage.sharded)
        self._deals_whole = partition == "parameter"
        narrow = torch.float16 in {wire_dtype, *(p.dtype for p in named.values())}
        self._share = BatchWeight(1 if narrow else collectives.size)
        every = self._stage.every_micro_batch
        self._roll = StepConsensus(collectives, self._share, every_micro_batch=every)
        announce = self._roll.announce if every else None
        # Only an error tells whose gradient it was; who is alone knows.
        self._finite = FiniteCheck(asked=not self._skips and collectives.size > 1)
        gradients = self._stage.gradients
        self._buckets = GradientBuckets(gradients, self._share, self._finite, announce)
        self._plan: list[Bucket] = []
        self._owned = OptimizerShard()
        self._begun = False
        self._totals: StepTotals | None = None  # what `synchronize` has learned, and `step` uses
        self._divisor = 0.0  # by which the sum of gradients becomes a mean, likewise
        self._unused: frozenset[str] = frozenset()  # by any rank, likewise
        self._lay(named)
        mine = [unnamed(group) for group in groups]
        try:
            self._inner = self._make_inner(self._owned.groups(mine))
            super().__init__(mine, self._inner.defaults)
        except BaseException:
            self.close()
            raise
        self.state = self._inner.state
        self._begun = True

    def start(self) -> None:
        """Overwrite parameters and buffers with rank 0's. Collective."""
        buffers = self._buffers if self._model is None else self._model.buffers()
        broadcast_from_rank_0(self._collectives, [*self._named.values(), *buffers])
        self._owned.refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters (of layers that were frozen, say): pairs in "params". Collective.

        Between steps; rank 0's values are taken. Raises as construction does.
        """
        if not self._begun:  # torch's own constructor adds the first ones
            super().add_param_group(param_group)
            return
        (group,) = named_groups([param_group])
        named = by_name([group])
        if known := [name for name in named if name in self._named]:
            raise ValueError(f"the optimizer has parameters named {', '.join(known)} already")
        if far := [name for name, p in named.items() if p.device != self._owned.device]:
            raise ValueError(
                f"parameters lie on different devices ({', '.join(far)} not on "
                f"{self._owned.device}): move the model to one"
            )
        if self._stage.sharded:
            refuse_shared_memory(named)
        self._stage.settle()
        if named:
            self._lay(named)
        if any(p.dtype == torch.float16 for p in named.values()):
            self._share.ranks = 1
        mine = unnamed(group)
        super().add_param_group(mine)
        self._inner.add_param_group(self._owned.groups([mine])[0])
        broadcast_from_rank_0(self._collectives, named.values())
        self._owned.refresh()

    def share(self, count: float | None) -> None:
        """State that the gradient of the coming backward is a mean over `count` samples. Local.

        A count of 0 makes this rank's gradient zero, whatever it is. None takes back a statement
        that no backward has followed. Of accumulated micro-batches the shares add up: exact where
        they are equal and the gradient is their mean; `backward` is exact for any.
        """
        self._share.state(count)

    def scale(self, loss: Tensor) -> Tensor:
        """A loss times the loss scale: call backward of that when there is one. Local."""
        return loss if self._scale.value == 1.0 else loss * self._scale.value

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run backward of a loss that is a mean over `weight` samples or tokens, scaled if need be.

        Local, but for the buckets that it launches. Call it once a micro-batch, all but the last
        under `no_sync`; a rank that has no samples in a step calls `share(0)` instead.
        """
        factor = self._share.add(weight)
        if factor:  # a mean over nothing is NaN, and so would be 0 times it
            self.scale(loss * factor).backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Hold one micro-batch that is not the step's last.

        Its gradients only accumulate; at stage 2 they go to their owners, and accumulate there.
        """
        return self._buckets.no_sync()

    def synchronize(self) -> None:
        """Launch what backward left, and wait until every bucket is reduced. Collective.

        `step` does so by itself. Call it first when other collectives are to run between backward
        and `step`: ranks differ in how much backward has launched, and order matters.
        """
        if self._totals is not None:
            return
        self._buckets.finish_round()
        self._totals = self._roll.done(self._buckets.missing, self._buckets.answer_round)
        self._stage.gradients.finish()
        self._unused = frozenset()
        if self._totals.missing:
            self._unused = self._roll.unused(self._named, self._buckets.used)
        self._divisor = self._totals.divisor / self._share.unit * self._scale.value
        self._share.reset(usual=self._totals.divisor / self._collectives.size)

    @torch.no_grad()
    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Wait for the sums, divide, clip, update, publish. Collective.

        Raises NonFiniteGradientError (all ranks alike, before anything is updated), and ValueError
        for a closure, or when the weights of all ranks sum to nothing.
        """
        if closure is not None:
            raise ValueError(
                "step() takes no closure: one would run backward, and so communicate, a number of "
                "times that each rank decides for itself"
            )
        self.synchronize()
        assert self._totals is not None
        weight, divisor, self._totals = self._totals.weight, self._divisor, None
        if not divisor > 0:
            raise ValueError(f"the ranks' weights sum to {weight}: at least one needs a sample")
        shards, p = self._shards(), self._norm_type
        norm = global_norm(self._collectives, shards, p, self._kernels) / divisor
        if not math.isfinite(norm):
            return self._without_update(norm, weight)
        coef = 1.0
        if self._max_grad_norm is not None:
            coef = min(1.0, self._max_grad_norm / (norm + 1e-6))
        self._stage.settle()
        self._owned.heed()
        # The sum becomes the clipped mean: the one division.
        factor = coef / divisor
        self._owned.feed(self._stage.gradients, factor, self._unused, self._kernels)
        self._update()
        self._owned.write_back()
        broadcast_from_rank_0(self._collectives, self._buffers)
        self._stage.publish()
        self._end_step()
        self._scale.note_good_step()
        return StepResult(norm, coef, norm * coef, weight, skipped=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients: parameters have none, or zeros without `set_to_none`, as in torch.

        At stage 2 they have none either way. Gradients of zeros cost a pass over memory more. Once
        after every step; from stage 1 on a step has done so already. Buckets that were
        launched must be stepped on before more gradients come, since other ranks take part: this
        throws their content away, not their turn.
        """
        self._buckets.zero(set_to_none)

    def wait_for_parameters(self) -> None:
        """Return when all parameters are what the last step made of them. Local.

        The modules of a `model` that was given wait by themselves. Who has parameters from
        elsewhere, and reads them after a step, calls this first: from `param_groups`, from a list
        made before, in a module that keeps its children's weights in a list.
        """
        self._stage.settle()

    @property
    def sharded(self) -> bool:
        """Whether a rank has the state of a part of the elements only."""
        return self._stage.sharded

    def state_dict(self) -> dict[str, Any]:
        """This rank's slices of the state, the hyperparameters and the loss scale. Local.

        Plain containers and tensors of the optimizer's own memory, by parameter name and element
        range; see `zero.state`. Slices that `gather_slices` gave may stand in for "slices".
        """
        groups = [
            {**hyperparameters(group), "params": names}
            for group, names in zip(self.param_groups, self._names_by_group(), strict=True)
        ]
        slices = [piece._asdict() for piece in self.slices()]
        return {"slices": slices, "param_groups": groups, "loss_scale": self._scale.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, here or at any stage and number of ranks. Local.

        The slices must cover what this rank owns; more than that is passed over. ValueError for a
        state of another model or other groups, naming each mismatch; then nothing is changed.
        """
        if lacking := {"slices", "param_groups", "loss_scale"} - state_dict.keys():
            raise ValueError(
                f"this is no state_dict of a ZeroOptimizer: it lacks {', '.join(sorted(lacking))}"
            )
        groups, mine = state_dict["param_groups"], self._names_by_group()
        theirs = [list(group["params"]) for group in groups]
        if mine != theirs:
            raise ValueError(f"the state's groups differ: {difference(theirs, mine)}")
        self.load_slices(StateSlice(**piece) for piece in state_dict["slices"])
        for group, other in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(hyperparameters(other)))
        self._scale.load_state_dict(state_dict["loss_scale"])

    def slices(self) -> Iterator[StateSlice]:
        """The state of what this rank owns, a slice a piece. Local; tensors are not copied."""
        return own_slices(self._owned, self._inner.state)

    def gather_slices(self, root: int = 0) -> Iterator[StateSlice]:
        """The whole state, a slice a parameter, on rank `root`; nothing on the others. Collective.

        Every rank has to exhaust it: `for piece in optimizer.gather_slices(): ...`. Root holds the
        state of one bucket at a time, besides its own. ValueError for a root that is no rank.
        """
        if not 0 <= root < self._collectives.size:
            raise ValueError(f"root {root} is no rank: 0 to {self._collectives.size - 1}")
        if not self._stage.sharded:
            return self.slices() if self._collectives.rank == root else iter(())
        return gathered_slices(self._collectives, self._plan, self._owned, self._inner.state, root)

    def load_slices(self, slices: Iterable[StateSlice]) -> None:
        """Take the state of what this rank owns from slices, cut in any way, in any order. Local.

        They are looked at one by one; all that this rank owns must be covered. ValueError for a
        state of another model, naming each mismatch; then nothing is changed.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self._named.items()}
        take_slices(self._owned, self._inner, slices, shapes)
        self.state = self._inner.state

    def memory(self) -> Memory:
        """What this optimizer holds on this rank, at its peak, by role. Local."""
        gradients = self._stage.gradients
        return Memory(
            parameters=sum(nbytes(parameter) for parameter in self._named.values()),
            gradients=gradients.peak_kept,
            buckets=gradients.working,
            master=self._owned.master_bytes,
            state=state_bytes(self._inner.state.values()),
        )

    def expected_memory(self) -> Memory:
        """What `memory` is to become once a step has been taken, by the plan alone. Local."""
        groups = zip(self._names_by_group(), self.param_groups, strict=True)
        options = {name: hyperparameters(group) for names, group in groups for name in names}
        slot = self._collectives.slot(self._collectives.rank)
        return predict_for_plan(self._plan, self._make_inner, self._stage_number, slot, options)

    def close(self) -> None:
        """Remove the hooks from the model, which is the caller's again. Local."""
        self._buckets.close()
        self._stage.close()

    def _names_by_group(self) -> list[list[str]]:
        names = {parameter: name for name, parameter in self._named.items()}
        return [[names[p] for p in group["params"]] for group in self.param_groups]

    def _lay(self, named: dict[str, Parameter]) -> None:
        """Lay parameters into buckets, and own this rank's part of them."""
        specs = [ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in named.items()]
        size = self._collectives.size
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

    def _shards(self) -> Iterator[Tensor]:
        """The sums of this rank's shard of every bucket, whatever the stage keeps of it.

        Piece by piece at every stage, so that a norm has the same bits.
        """
        slot = self._collectives.slot(self._collectives.rank)
        for index, bucket in enumerate(self._plan):
            for piece in bucket.pieces(*bucket.shard(slot)):
                yield self._stage.gradients.part(index, piece)

    def _update(self) -> None:
        """Let the torch optimizer update this rank's pieces, under this optimizer's groups.

        Schedulers and users change these groups, and some optimizers keep counts in theirs.
        """
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(hyperparameters(mine))
        self._inner.step()
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update(hyperparameters(inner))

    def _end_step(self) -> None:
        """Forget what a sharded step has used up; at stage 0 the mean stays, to be looked at."""
        if self._stage.sharded:
            self._buckets.zero()
        else:
            self._buckets.reset()

    def _without_update(self, norm: float, weight: float) -> StepResult:
        """Answer a gradient that is not finite. Collective."""
        if self._scale.forgives():
            self._scale.shrink()
        elif not self._skips:
            gradients, finite = self._stage.gradients, bool(self._finite)
            who = describe_non_finite(
                self._collectives, self._owned, gradients, self._named, finite=finite
            )
            self._end_step()
            raise NonFiniteGradientError(f"the gradient's norm is {norm}: {who}")
        self._end_step()
        broadcast_from_rank_0(self._collectives, self._buffers)
        return StepResult(norm, 0.0, 0.0, weight, skipped=True)
