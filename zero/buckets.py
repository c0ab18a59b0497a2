"""Gradient buckets: autograd hooks fill them, and full ones are reduced during backward.

The life of a bucket in a round, which is a micro-batch (stage 2) or a whole step:

    filling      autograd hooks take gradients as backward makes them
    launched     its last gradient has arrived, or `finish_round` was called
    in flight    it belongs to the communication hook
    reduced      `Gradients.finish` has waited for it
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zero.collectives import Collectives, CompletedWork, Work
from zero.comm_hooks import CommHook, ReducibleBucket
from zero.gradients import Gradients
from zero.layout import Bucket, ParameterSlice
from zero.norms import FiniteCheck
from zero.step_weights import BatchWeight
from zero.sync_schedule import SyncSchedule


class GradientBuckets:
    """The buckets of a model, with the hooks that fill and launch them.

    Buckets are launched in a fixed order, whatever the order in which backward fills them, so all
    ranks agree even if some parameters get no gradient on some ranks. A parameter without a
    gradient counts as zeros.

    Gradients are stored in `gradients`, multiplied by `weight` and checked by `finite`, and
    `reduce` starts the sum of a full bucket over ranks. `announce` is called before the first
    launch of a round, where every micro-batch is a round. None: a step is one round, and under
    `no_sync` gradients only accumulate.
    """

    def __init__(
        self,
        gradients: Gradients,
        weight: BatchWeight,
        finite: FiniteCheck,
        reduce: Callable[[int, Bucket, Tensor], Work],
        announce: Callable[[], None] | None,
    ) -> None:
        self._gradients, self._weight, self._finite = gradients, weight, finite
        self._reduce, self._announce = reduce, announce
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._launched = 0  # buckets in this round
        self._missing: list[set[str]] = []  # gradients to come in this round, by bucket
        self._last_micro_batch = True
        self._round_begun = False  # a gradient has arrived
        self.used: set[str] = set()  # names of parameters that got a gradient since `reset`

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Add buckets, and hooks on their parameters, by name. Between steps."""
        for index, bucket in enumerate(buckets, len(self._buckets)):
            for entry in bucket.entries:
                if entry.numel:  # backward may skip empty parameters
                    hook = partial(self._on_gradient, index, entry)
                    parameter = parameters[entry.spec.name]
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._buckets.extend(buckets)
        self._gradients.add(buckets, parameters)
        self._start_round()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enclose a micro-batch that is not the last of its step."""
        before, self._last_micro_batch = self._last_micro_batch, False
        try:
            yield
            if self._announce:
                self.finish_round()
        finally:
            self._last_micro_batch = before

    def finish_round(self) -> None:
        """Launch the buckets that backward has not launched. Collective.

        If every micro-batch is a round, a round without any gradient launches nothing.
        """
        if self._announce and not self._round_begun:
            for index in range(len(self._buckets)):
                self._note_assigned(index)
        if self._round_begun or not self._announce:
            while self._launched < len(self._buckets):
                self._launch_next()
        self._start_round()

    def contribute_zeros(self) -> None:
        """Take part with zeros in a round that other ranks have announced. Collective."""
        for index in range(len(self._buckets)):
            self._send(index)

    @property
    def missing(self) -> int:
        """The number of parameters that got no gradient on this rank, between two rounds."""
        return sum(map(len, self._missing)) - len(self.used)

    def reset(self) -> None:
        """Start a new step."""
        self.used = set()
        self._finite.reset()

    def clear(self, set_to_none: bool = True) -> None:
        """Discard all gradients and their weights. Waits for reductions in flight."""
        self._gradients.clear(set_to_none)
        self._weight.discard()
        self.reset()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _start_round(self) -> None:
        self._launched, self._round_begun = 0, False
        self._missing = [{e.spec.name for e in b.entries if e.numel} for b in self._buckets]

    def _on_gradient(self, index: int, entry: ParameterSlice, parameter: Tensor) -> None:
        """Take the gradient that backward has just made, and launch full buckets."""
        self._weight.note_gradient()
        reducing = self._last_micro_batch or self._announce is not None
        taken = reducing and entry.spec.name not in self._missing[index]
        if index < self._launched or taken:
            raise RuntimeError(
                f"parameter {entry.spec.name} got a gradient after its last one of this step: "
                "backward ran twice without a step() between; put each but the last one into a "
                "`with optimizer.no_sync():` of its own"
            )
        self._round_begun = True
        self.used.add(entry.spec.name)
        if not reducing:
            self._gradients.take(index, entry, 1.0)
            return
        self._take(index, entry)
        self._missing[index].discard(entry.spec.name)
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            self._launch_next()

    def _note_assigned(self, index: int) -> None:
        """Count the gradients that were assigned, which no hook has seen."""
        for entry in self._buckets[index].entries:
            name = entry.spec.name
            if name in self._missing[index] and self._gradients.has_assigned(index, entry):
                self.used.add(name)
                self._round_begun = True

    def _launch_next(self) -> None:
        if self._announce and not self._launched:
            self._announce()
        self._send(self._launched)
        self._launched += 1

    def _send(self, index: int) -> None:
        """Take the gradients that a bucket still lacks, and start its reduction."""
        self._note_assigned(index)
        for entry in self._buckets[index].entries:
            if entry.spec.name in self._missing[index]:
                self._take(index, entry)
        work = self._reduce(index, self._buckets[index], self._gradients.flat(index))
        self._gradients.launched(index, work)

    def _take(self, index: int, entry: ParameterSlice) -> None:
        taken = self._gradients.take(index, entry, self._weight.scale)
        if taken is not None:
            self._finite.add(taken)


class StepReduction:
    """The reduction of a step's gradients: buckets, batch weights, and the consensus on them.

    A small all-reduce of the ranks' weights ends a step. At stage 2 every micro-batch is reduced by
    itself, and ranks may have different numbers of them. So a rank announces each one by the same
    all-reduce, and ranks that have finished contribute zeros until every rank is done:

        rank 0   announce   buckets   announce   buckets   done
        rank 1   announce   buckets   done       zeros     done
    """

    def __init__(
        self,
        gradients: Gradients,
        hook: CommHook,
        schedule: SyncSchedule,
        stage: int,
        finite: FiniteCheck,
    ) -> None:
        self._gradients, self._hook, self._schedule = gradients, hook, schedule
        self._sharded, every_micro_batch = stage > 0, stage == 2
        self.steps = 0  # taken, skipped ones included
        ranks = 1 if hook.wire_dtype == torch.float16 else self.group.size
        self.weight = BatchWeight(ranks, every_micro_batch=every_micro_batch)
        self.finite = finite  # of this rank's gradients
        announce = self._announce if every_micro_batch else None
        self.buckets = GradientBuckets(gradients, self.weight, finite, self._reduce, announce)
        self._reduced: tuple[float, float, frozenset[str]] | None = None  # what `take` returns

    @property
    def group(self) -> Collectives:
        """The ranks over which the current step is averaged."""
        return self._schedule.group(self.steps)

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Add buckets of parameters by name. Collective, between steps."""
        self.buckets.add(buckets, parameters)
        if any(bucket.dtype == torch.float16 for bucket in buckets):
            self.weight.limit_to_means()

    def synchronize(self, names: Collection[str], loss_scale: float) -> None:
        """Launch the remaining buckets, and wait for all; once a step. Collective.

        `names` are those of all parameters.
        """
        if self._reduced is not None:
            return
        self.buckets.finish_round()
        weight, divisor, missing = self._totals()
        self._gradients.finish()
        unused = self._unused(names) if missing else frozenset()
        self._reduced = weight, divisor / self.weight.unit * loss_scale, unused
        self.weight.reset(usual=divisor / self.group.size)

    def take(self) -> tuple[float, float, frozenset[str]]:
        """Return the results of `synchronize`, and start a new step.

        They are the weight of the step in samples, the divisor that makes sums of gradients means,
        and the names of parameters that got no gradient on any rank. Raises ValueError if the
        weights of all ranks sum to 0.
        """
        assert self._reduced is not None, "synchronize first"
        (weight, divisor, unused), self._reduced = self._reduced, None
        if not divisor > 0:
            raise ValueError(f"the ranks' weights sum to {weight}: at least one needs a sample")
        return weight, divisor, unused

    def end_step(self) -> None:
        """Discard gradients that are sharded; at stage 0 parameters keep the clipped mean."""
        self.steps += 1
        if self._sharded:
            self.buckets.clear()
        else:
            self.buckets.reset()

    def _reduce(self, index: int, layout: Bucket, flat: Tensor) -> Work:
        """Start the communication hook on a bucket, which owns `flat` until it has finished."""
        group = self.group
        if group.size == 1:
            return CompletedWork()
        return self._hook(ReducibleBucket(index, layout, flat, group, self._sharded))

    def _announce(self) -> None:
        """Announce a micro-batch. Collective; does not wait."""
        self.group.all_reduce(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))

    def _totals(self) -> tuple[float, float, float]:
        """Wait until all ranks have finished, and return three sums over them. Collective.

        The samples, the divisor of the sum of gradients, and the parameters without a gradient.
        """
        own = [0, self.weight.weight, self.weight.divisor, self.buckets.missing]
        while True:
            counts = torch.tensor(own, dtype=torch.float64)
            self.group.all_reduce(counts).wait()
            running, weight, divisor, missing = counts.tolist()
            if not running:
                return weight, divisor, missing
            self.buckets.contribute_zeros()

    def _unused(self, names: Collection[str]) -> frozenset[str]:
        """Return the names of parameters that no rank has used. Collective."""
        flags = torch.tensor([name in self.buckets.used for name in names], dtype=torch.float64)
        self.group.all_reduce(flags).wait()
        used = flags.tolist()
        return frozenset(name for name, ranks in zip(names, used, strict=True) if not ranks)
