"""Hooks tick gradients off as backward makes them; a full bucket is launched while it goes on.

The life of a bucket within a round, which is a micro-batch (stage 2) or a whole step:

    filling      backward makes gradients; hooks tick the parameters off
    full         the last one arrived (or `finish_round` was called): launched, in fixed order
    in flight    the collective owns it
    reduced      `finish` has waited for it
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zero.finite_check import FiniteCheck
from zero.gradients import Gradients
from zero.layout import Bucket, BucketEntry
from zero.step_weights import BatchWeight


class GradientBuckets:
    """The buckets of one model, the hooks that launch them, and the order in which they leave.

    `gradients` is the memory that they lie in; `share` says by what one is multiplied before it is
    summed; `finite` looks at what is. `announce` is called before the first launch of each round;
    None: a step has one round, and no_sync only accumulates. With it every backward is a round of
    its own.

    Buckets are launched in one fixed order, whatever the order in which backward fills them, so
    that all ranks agree even when some parameters get no gradient on some ranks. A parameter
    without a gradient counts as zeros.
    """

    def __init__(
        self,
        gradients: Gradients,
        share: BatchWeight,
        finite: FiniteCheck,
        announce: Callable[[], None] | None,
    ) -> None:
        self._gradients, self._share, self._announce = gradients, share, announce
        self._finite = finite
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._count = 0  # of parameters that have elements
        self._launched = 0  # buckets of this round
        self._missing: list[set[str]] = []  # in this round, by bucket
        self._last = True  # whether the micro-batch under way is the step's last
        self._begun = False  # whether a gradient has arrived in this round
        self.used: set[str] = set()  # the parameters that got a gradient here, since `reset`

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Watch more parameters, by name, which lie in these buckets. Between steps."""
        for index, bucket in enumerate(buckets, len(self._buckets)):
            for entry in bucket.entries:
                if entry.spec.numel:  # an empty gradient changes nothing, whenever it arrives
                    hook = partial(self._on_gradient, index, entry)
                    parameter = parameters[entry.spec.name]
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._buckets.extend(buckets)
        self._count = sum(e.spec.numel > 0 for b in self._buckets for e in b.entries)
        self._gradients.add(buckets, parameters)
        self._start_round()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold a micro-batch that is not the step's last."""
        before, self._last = self._last, False
        try:
            yield
            if self._announce:
                self.finish_round()
        finally:
            self._last = before

    def finish_round(self) -> None:
        """Launch what backward left unlaunched. Collective, as every launch is.

        Where every backward is a round, nothing happens unless a gradient has arrived in this one.
        """
        if self._announce and not self._begun:
            for index in range(len(self._buckets)):
                self._take_strays(index)
        if self._begun or not self._announce:
            while self._launched < len(self._buckets):
                self._launch(self._launched)
        self._start_round()

    def answer_round(self) -> None:
        """Take part, with zeros, in a round that other ranks have announced. Collective."""
        for index in range(len(self._buckets)):
            self._send(index)

    @property
    def missing(self) -> int:
        """How many parameters, of those that have elements, got no gradient here."""
        return self._count - len(self.used)

    def reset(self) -> None:
        """Start a new step."""
        self.used = set()
        self._finite.reset()
        self._gradients.release()

    def zero(self, set_to_none: bool = True) -> None:
        """Forget all gradients. Waits for what is in flight."""
        self._gradients.zero(set_to_none)
        self._share.discard()
        self.reset()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _start_round(self) -> None:
        self._launched, self._begun = 0, False
        self._missing = [{e.spec.name for e in b.entries if e.spec.numel} for b in self._buckets]

    def _on_gradient(self, index: int, entry: BucketEntry, parameter: Tensor) -> None:
        self._share.use()
        summing = self._last or self._announce is not None
        taken = summing and entry.spec.name not in self._missing[index]
        if index < self._launched or taken:
            raise RuntimeError(
                f"parameter {entry.spec.name} got a gradient after its last one of this step: "
                "backward ran twice without a step() between; put each but the last one into a "
                "`with optimizer.no_sync():` of its own"
            )
        self._begun = True
        self.used.add(entry.spec.name)
        if not summing:
            self._gradients.hold(index, entry)
            return
        self._take(index, entry)
        self._missing[index].discard(entry.spec.name)
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            self._launch(self._launched)

    def _take_strays(self, index: int) -> None:
        """Count the gradients that were assigned, which no hook has seen."""
        for entry in self._buckets[index].entries:
            name = entry.spec.name
            if name in self._missing[index] and self._gradients.has_stray(index, entry):
                self.used.add(name)
                self._begun = True

    def _launch(self, index: int) -> None:
        if self._announce and not index:
            self._announce()
        self._send(index)
        self._launched = index + 1

    def _send(self, index: int) -> None:
        self._take_strays(index)
        for entry in self._buckets[index].entries:
            if entry.spec.name in self._missing[index]:
                self._take(index, entry)
        self._gradients.launch(index)

    def _take(self, index: int, entry: BucketEntry) -> None:
        scale = self._share.latest if self._announce else self._share.scale
        taken = self._gradients.take(index, entry, scale)
        if taken is not None:
            self._finite.look(taken)
