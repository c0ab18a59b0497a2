"""The gradients of an optimizer: their weights, their reduction by backward, and access to them."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from zero.agreement import StepAgreement, agree
from zero.collectives import Collectives
from zero.gradients.reduction import StepReduction
from zero.gradients.weights import BatchSource
from zero.kernels import Kernels
from zero.norms import global_norm
from zero.precision import LossScale, is_positive
from zero.sharded_optimizer import ShardedOptimizer
from zero.step_message import StepMessage
from zero.sync_batchnorm import layers_below


class ReducingOptimizer(ShardedOptimizer):
    """The part of `ZeroOptimizer` between two steps: what backward leaves, and changes to it."""

    _agreement: StepAgreement
    _collectives: Collectives
    _kernels: Kernels
    _model: nn.Module | None
    _reduction: StepReduction
    _scale: LossScale

    @property
    def group(self) -> Collectives:
        """The ranks over which the current step is averaged."""
        return self._reduction.group

    @property
    def steps_taken(self) -> int:
        """The number of the current step: steps so far, skipped ones included."""
        return self._reduction.steps

    @property
    def step_message(self) -> StepMessage:
        """The message that ends the current or coming reduction, to put more numbers into.

        If it `announces`, before the first backward of a step.
        """
        return self._reduction.message

    @property
    def announces(self) -> bool:
        """True if ranks announce each micro-batch to each other, as at stage 2."""
        return self._owned.stage == 2

    @property
    def loss_weight(self) -> float:
        """The weight of this rank's loss in the running or coming backward, beside other ranks'.

        1 for a loss that was multiplied by its weight, 0 where this rank has no sample. Local.
        """
        return self._reduction.loss_weight

    @property
    def lacks_tokens(self) -> bool:
        """True if this rank's samples weigh 0, by `weight` of their loader. Local."""
        return self._reduction.weight.lacks_tokens

    @property
    def waited_s(self) -> float:
        """Seconds so far in which backward and `step` finished reductions of gradients."""
        return self._reduction.waited_s

    def call_after_backward(self, action: Callable[[], None] | None) -> None:
        """Call `action` whenever backward has computed all gradients, before it waits for others.

        Local. None: no longer.
        """
        self._reduction.before_finish = action

    def share(self, count: float | None) -> None:
        """State that the gradient of the coming backward is a mean over `count` samples. Local.

        A count of 0 makes this rank's gradient zero, whatever its values. None takes back a
        statement that no backward has followed. The shares of accumulated micro-batches must be
        equal, or backward raises RuntimeError; `backward` takes any weights.
        """
        self._check_open()
        self._reduction.weight.state(count)

    def expect_batch(
        self,
        own: float,
        total: float | None,
        digest: int | None = None,
        source: BatchSource | None = None,
    ) -> None:
        """State that a batch was drawn, of which this rank has `own` of `total` samples. Local.

        A `total` of None is not known to this rank.
        It weighs the backward passes that follow, until one follows the next batch. An `own` of 0
        is a stand-in, which counts nothing. `share` and `backward` state another weight. If batches
        that differ were drawn ahead, backward raises RuntimeError. `digest`: of the samples of the
        whole batch, in 16 bits; ranks with different ones raise RuntimeError. A `source` tells
        several optimizers of its batches, and counts them in `drawn` before.
        """
        weight = self._reduction.weight
        weight.expect(own, total, digest, source)
        if weight.may_change:
            self._reduction.buckets.weigh_arrivals()

    def assume_batch(self, own: float, total: float | None, source: BatchSource) -> None:
        """State what the backward passes up to the next batch use. Local.

        For an optimizer that is made when the latest batch of a source has been drawn, and may have
        been used by other optimizers.
        """
        self._reduction.weight.assume(own, total, source)

    def forget_batches(self, *, drawn: bool = True) -> None:
        """Forget the batch of the last backward; with `drawn` also those not used yet. Local."""
        self._reduction.weight.forget(drawn=drawn)

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss times the loss scale, for a call of its `backward`. Local."""
        self._scale.applied = True
        return loss if self._scale.value == 1.0 else loss * self._scale.value

    @_disable_dynamo
    def backward(self, loss: Tensor, weight: float) -> None:
        """Run backward of a loss that is a mean over `weight` samples or tokens, scaled if needed.

        Collective outside of `no_sync`. Called once a micro-batch, all but the last under
        `no_sync`. A rank without samples in a step calls `share(0)` instead. The loss is multiplied
        by a factor, for other optimizers too; if it trains several, call `share` of each.
        """
        self._check_open()
        self._scale.applied = True
        self._reduction.begin_weighted()
        factor = self._reduction.weight.add(weight)
        layers, zeros = ([], []) if factor else layers_below(loss)
        if not factor and not layers:
            self._reduction.pass_backward()  # the mean over no samples is NaN, and 0 * NaN is NaN
            return
        try:
            if factor:
                self.scale(loss * factor).backward()
            else:  # only what lies below layers in which other ranks wait
                torch.autograd.backward(layers, zeros)
        except BaseException:
            self._reduction.buckets.interrupt()
            raise

    def no_sync(self) -> AbstractContextManager[None]:
        """Enclose the backward passes of an accumulation but the last.

        Gradients only accumulate; at stage 2 they are reduced, and their owners accumulate them.
        """
        self._check_open()
        return self._reduction.buckets.no_sync()

    @_disable_dynamo
    def synchronize(self) -> None:
        """Make sure that the gradients are means over ranks. Collective.

        Backward has done so, except on a rank that had none since the last step. Such a rank calls
        this, or `step`, while the others run backward.
        """
        self._check_open()
        self._reduction.synchronize()

    def finish_interrupted(self) -> None:
        """Let other ranks end the backward that raised an exception on this one. Collective.

        Takes part in its remaining collectives, outside of `no_sync`. All ranks must discard the
        gradients afterwards: no sum has a meaning.
        """
        self._reduction.finish_interrupted()

    def clip_each_rank(self, max_norm: float | None, norm_type: float = 2.0) -> None:
        """Scale each rank's own mean gradient to a norm of at most `max_norm` before the reduction.

        Local; between steps, and with the same limit on all ranks. None: no longer. The norm is
        known when the last backward of a step ends: gradients are sent then, not during backward.
        Raises ValueError for a limit that is not above 0, and at stage 2, where ranks reduce the
        gradient of each micro-batch by itself.
        """
        self._check_open()
        if max_norm is None:
            self._reduction.buckets.before_launch = None
            return
        if not is_positive(max_norm):
            raise ValueError(f"max_norm is {max_norm!r}: give a number above 0, or None")
        if self._owned.stage == 2:
            raise ValueError(
                "at stage 2, no rank has the whole of its own gradient, so it cannot be clipped: "
                "use stage 0 or 1"
            )
        clip = partial(self._reduction.clip_own, float(max_norm), float(norm_type), self._kernels)
        self._reduction.buckets.before_launch = clip

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradient in place so that its norm is at most `max_norm`. Collective.

        Returns the norm before, of the whole model, as a 0-dim fp64 tensor on the CPU. The same as
        `torch.nn.utils.clip_grad_norm_` at stage 0. Raises ValueError for a limit below 0.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm is {max_norm!r}: give 0 or a number above")
        self._prepare()
        norm = self._agreed_norm(norm_type)
        if max_norm < norm < math.inf:  # otherwise `step` stops or skips
            self._owned.gradients.scale_(max_norm / (norm + 1e-6))
        return torch.tensor(norm, dtype=torch.float64)

    @_disable_dynamo
    @torch.no_grad()
    def scale_gradients_(self, factor: float) -> None:
        """Multiply the gradient in place. Collective, with the same factor on every rank."""
        self._prepare()
        self._owned.gradients.scale_(factor)

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
        if name in self._prepare():
            return None
        return self._owned.full_gradient(name, parameter).div_(self._scale.value)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients: those of parameters become None, or zeros without `set_to_none`.

        None stays None; from stage 1 on, only `full_gradient` shows the zeros. Without a call, the
        next backward adds to what `step` has used, as in torch. Local; waits for reductions in
        flight. A closed optimizer does what those of torch do.
        """
        if self.closed:
            super().zero_grad(set_to_none)
        else:
            self._reduction.clear(set_to_none)

    def _prepare(self) -> frozenset[str]:
        """Make sure that the gradients are means, with the user's changes. Collective.

        Returns the names of parameters without a gradient.
        """
        self._check_open()
        self._check_groups()
        self._reduction.synchronize()
        self._watch.check()
        return self._owned.gradients.collect()

    def _agreed_norm(self, norm_type: float, without: frozenset[str] | None = None) -> float:
        """Return the norm of the mean gradient of this rank's group. Collective.

        Not finite if that of any group is not, so that all ranks skip or stop together. Raises
        ValueError on all ranks if no group has a sample. Neither if groups are independent. If the
        names of parameters `without` a gradient are given, a step begins: raises RuntimeError
        unless ranks have the same hyperparameters and update the same.
        """
        shards = [shard for _, shard in self._owned.shards()]
        sharding = self._owned.sharding  # each of the group's has the whole mean
        step, groups = self._reduction.steps, self.param_groups
        figures = None
        if without is not None and sharding.size > 1:
            figures = self._agreement.figures(groups, without, step)
        norm = global_norm(sharding, shards, norm_type, self._kernels, figures) / self._scale.value
        differ = figures is not None and not agree(figures)
        alone = self.schedule.independent(step) or self.group.size == self._collectives.size
        if alone and differ:
            self._agreement.compare(sharding, groups, without or frozenset(), step)
        if alone:
            return norm
        totals = torch.tensor(
            [norm, self._reduction.finished_weight, float(differ)], dtype=torch.float64
        )
        if without is not None:
            totals = torch.cat([totals, self._agreement.figures_of_replica(groups, step)])
        self._collectives.all_reduce(totals).wait()
        total, weight, differing = totals[:3].tolist()
        if without is not None and (differing or not agree(totals[3:])):
            self._agreement.compare(self._collectives, groups, without, step)
        if not weight > 0:
            self._reduction.refuse_weight(weight)
        return norm if math.isfinite(total) else total
