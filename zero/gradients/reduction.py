"""The reduction of a step's gradients over ranks."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch.nn import Parameter

from zero.collectives import Collectives, CompletedWork, SingleProcessCollectives, Work
from zero.comm_hooks import CommHook, ReducibleBucket
from zero.comm_hooks.node_levels import NodeLevels
from zero.exchange.schedule import SyncSchedule
from zero.gradients.buckets import GradientBuckets
from zero.gradients.weights import BatchWeight
from zero.kernels import Kernels, rescale
from zero.layout import Bucket
from zero.norms import FiniteCheck, global_norm
from zero.parameter_watch import ParameterWatch
from zero.precision import LossScale
from zero.shard import OptimizerShard
from zero.step_message import StepMessage


class StepReduction:
    """The reduction of gradients: buckets, batch weights, and the consensus on them.

    A `StepMessage` ends a reduction, with the ranks' weights and what others have put into it. At
    stage 2 every micro-batch is reduced by itself, and ranks may have different numbers of them. So
    a rank announces each one by the same message, and ranks that have finished contribute zeros
    until every rank is done:

        rank 0   announce   buckets   announce   buckets   done
        rank 1   announce   buckets   done       zeros     done
    """

    def __init__(
        self,
        owned: OptimizerShard,
        hook: CommHook,
        schedule: SyncSchedule,
        levels: NodeLevels | None,
        scale: LossScale,
        *,
        world_size: int,
    ) -> None:
        self._gradients, self._hook, self._schedule = owned.gradients, hook, schedule
        self._levels, self._scale = levels, scale
        self._sharded, every_micro_batch = owned.sharded, owned.stage == 2
        self._world_size, alone = world_size, world_size == 1
        self.steps = 0  # taken, skipped ones included
        self._small_range = hook.wire_dtype == torch.float16  # so addends are as large as means
        self.weight = BatchWeight(
            self._counted_ranks,
            every_micro_batch=every_micro_batch,
            alone=alone,
            whole=self._whole,
        )
        self.finite = FiniteCheck(enabled=not alone)  # of this rank's gradients
        announce = self._announce if every_micro_batch else None
        self._message = self._begin_message()
        self.buckets = GradientBuckets(
            self._gradients,
            self.weight,
            self.finite,
            reduce=self._reduce,
            announce=announce,
            finish=self.finish,
            check=partial(_check_backward, owned.watch, scale),
            dropped=partial(hook.end_step, taken=False),
        )
        self._parameters: dict[str, Parameter] = {}
        self._count = 0  # of buckets
        self.used = set[str]()  # parameters with a gradient so far, where a hook keeps some of it
        self._finished_weight: float | None = None  # of what was reduced since the last step
        self._left = False  # whether it has left gradients: it leaves none if no rank used any
        self.waited_s = 0.0  # in `finish`
        self.before_finish: Callable[[], None] | None = None  # called when it begins

    @property
    def group(self) -> Collectives:
        """The ranks over which the current step is averaged."""
        return self._schedule.group(self.steps)

    @property
    def loss_weight(self) -> float:
        """The weight of this rank's loss in the running or coming backward."""
        return self.weight.latest if self.buckets.in_backward else self.weight.coming

    @property
    def _counted_ranks(self) -> int:
        return 1 if self._small_range else self.group.size

    @property
    def _whole(self) -> bool:
        return self.group.size == self._world_size

    @property
    def message(self) -> StepMessage:
        """The message that ends the current or coming reduction."""
        if self._message.sent:
            self._message = self._begin_message()
        return self._message

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Add buckets of parameters by name. Collective, between steps."""
        self.buckets.add(buckets, parameters)
        self._parameters |= parameters
        self._count += len(buckets)
        if any(bucket.dtype == torch.float16 for bucket in buckets) and not self._small_range:
            self._small_range = True
            self.weight.begin_group(1, whole=self._whole)

    @torch.no_grad()
    def finish(self) -> None:
        """Launch the remaining buckets, wait for all, and make means of the sums. Collective.

        Raises ValueError if the weights of all ranks sum to 0, and RuntimeError if their batches
        differ.
        """
        start = time.perf_counter()
        if self.before_finish is not None:
            self.before_finish()
        try:
            self._finish()
        finally:
            self.waited_s += time.perf_counter() - start

    @torch.no_grad()
    def clip_own(self, max_norm: float, norm_type: float, kernels: Kernels) -> None:
        """Scale this rank's own mean gradient to a norm of at most `max_norm`. Local.

        Before its reduction. One that is not finite stays, so that the step finds it.
        """
        multiplied, own = self.weight.multiplied, self._gradients.own()
        if not multiplied:
            return
        factor = (
            self.weight.unit / multiplied / self._scale.value
        )  # of what is summed, for the mean
        norm = global_norm(SingleProcessCollectives(), own, norm_type, kernels) * factor
        if math.isfinite(norm):
            rescale(own, min(1.0, max_norm / (norm + 1e-6)))

    def _finish(self) -> None:
        self.weight.finish()
        self.buckets.begin()
        self.buckets.launch_remaining()
        totals = self._totals()
        weight, divisor = totals["weight"], totals["divisor"]
        unused = self._unused() if totals["missing"] else frozenset()
        if self._levels is not None and self._levels.count > 1:
            # The hook also sends what it has not sent before.
            self.used |= self._parameters.keys() - unused
            unused -= self.used
        if not divisor > 0:
            if self._whole:
                self.refuse_weight(weight)
            unused = frozenset(self._parameters)  # this group has no sample
        self._gradients.finish(self.weight.unit / divisor if divisor > 0 else 0.0, unused)
        self._left = self._gradients.exist
        if divisor > 0:
            self._hook.end_reduction(divisor)
        late = bool(totals["late"])
        self.buckets.end(again=late)
        if late:
            self._finish()
            return
        self._finished_weight = (self._finished_weight or 0.0) + weight
        self.weight.reset(usual=divisor / self.group.size)

    def synchronize(self) -> None:
        """Finish, unless backward has done so since the last step or `zero_grad`. Collective.

        Also if the gradients that it left are gone. Raises RuntimeError if the last backward was
        interrupted.
        """
        self.buckets.check_ended()
        self.buckets.forget_dropped()
        dropped = self._left and not self._gradients.exist
        if self._finished_weight is None or self.buckets.begun or dropped:
            self.finish()

    def finish_interrupted(self) -> None:
        """Finish a backward that raised an exception, with gradients of any values. Collective."""
        self.buckets.resume()
        if self._finished_weight is None or self.buckets.begun:
            self.weight.discard()
            self.weight.state(1.0)  # the sum over ranks must not be 0
            self.finish()

    def begin_weighted(self) -> None:
        """Prepare for a loss that is multiplied by its weight: held means are not. Local."""
        self.buckets.forget_dropped()
        if self.buckets.begun:
            return
        if self._gradients.exist and not self._gradients.held:
            raise RuntimeError(
                "a gradient was assigned before optimizer.backward(loss, weight=...), which would "
                "weigh it too: call share(n) and loss.backward()"
            )
        if not self._sharded:
            self._gradients.collect()
            self._gradients.set_aside()

    def pass_backward(self) -> None:
        """Do what ends a backward, for a loss without weight. Collective outside of `no_sync`."""
        self.buckets.begin()
        self.weight.begin_backward()
        if self.buckets.syncing:
            self.finish()

    @property
    def finished_weight(self) -> float:
        """The weight of what was reduced since the last step, in samples."""
        return self._finished_weight or 0.0

    def refuse_weight(self, weight: float) -> NoReturn:
        """Discard all gradients, and raise ValueError for the sum of all ranks' weights."""
        self.clear(set_to_none=True)
        raise ValueError(f"the ranks' weights sum to {weight:g}: at least one needs a sample")

    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients."""
        self.buckets.clear(set_to_none)
        self._finished_weight = None
        self._hook.end_step(taken=False)

    def resume(self, steps: int) -> None:
        """Continue after so many steps. Local; the same on all ranks."""
        group = self.group
        self.steps = steps
        if self.group is not group:
            self.weight.begin_group(self._counted_ranks, whole=self._whole)

    def end_step(self, *, taken: bool) -> float:
        """Begin another step; return the weight of this one, in samples. Local.

        Without `taken`, this step has updated nothing.
        """
        self._hook.end_step(taken=taken)
        weight, self._finished_weight = self.finished_weight, None
        group = self.group
        self.steps += 1
        if self.group is not group:  # units must be the same on all of its ranks
            self.weight.begin_group(self._counted_ranks, whole=self._whole)
        self.weight.end_step()
        self.finite.reset()
        return weight

    def _reduce(self, index: int, layout: Bucket) -> Work:
        """Start the communication hook on a bucket, which owns its memory until it has finished."""
        group = self.group
        if group.size == 1:
            return CompletedWork()
        flat = self._gradients.flat(index)
        # Several sharding groups together need the whole sum, of which each rank keeps its shard.
        sharded = self._sharded and group.size == self._schedule.sharding.size
        multiplier = self.weight.unit / self._scale.value
        bucket = ReducibleBucket(
            index,
            layout,
            flat,
            group,
            sharded,
            self._levels,
            multiplier,
            last=index == self._count - 1,
            parameters=self._parameters,
        )
        return self._hook(bucket)

    def _begin_message(self) -> StepMessage:
        """Return a message with this rank's part of a reduction. Local."""
        message, weight = StepMessage(), self.weight
        message.put("running", 0.0)
        message.put("weight", lambda: weight.weight)
        message.put("divisor", lambda: weight.divisor)
        message.put("missing", lambda: self.buckets.missing)
        message.put("late", lambda: self.buckets.late)
        message.put("checked", lambda: weight.has_digest)
        message.put("digest", lambda: weight.digest)
        message.put("squared digest", lambda: weight.digest**2)
        return message

    def _announce(self) -> None:
        """Announce a micro-batch. Collective; does not wait."""
        self.message.announce(self.group, "running")

    def _totals(self) -> dict[str, float]:
        """Wait until all ranks have finished, and return sums over them. Collective.

        Of the samples ("weight"), the divisors of the sum of gradients, the parameters without a
        gradient ("missing"), and the gradients that need another reduction ("late").
        """
        message = self.message
        while True:
            message.send(self.group)
            totals = message.read()
            if not totals["running"]:
                break
            self.buckets.contribute_zeros()
        if totals["checked"] * totals["squared digest"] != totals["digest"] ** 2:
            raise RuntimeError(
                "the ranks drew different samples for one global batch: seed the sampler alike on "
                "all ranks"
            )
        return totals

    def _unused(self) -> frozenset[str]:
        """Return the names of parameters that no rank has used. Collective."""
        flags = torch.tensor(
            [n in self.buckets.used for n in self._parameters], dtype=torch.float64
        )
        if self.group.size > 1:
            self.group.all_reduce(flags).wait()
        by_name = zip(self._parameters, flags.tolist(), strict=True)
        return frozenset(name for name, ranks in by_name if not ranks)


def _check_backward(watch: ParameterWatch, scale: LossScale) -> None:
    watch.check_kinds()
    scale.check_applied()
