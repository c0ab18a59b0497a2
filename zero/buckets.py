"""Gradients live in flat buckets; a full bucket is launched while backward goes on.

The life of a bucket within a step:

    filling      backward adds each gradient into its view; hooks tick the parameters off
    full         the last one arrived (or `launch_rest` was called): launched, in fixed order
    in flight    the collective owns it
    reduced      `reduced` has waited for it: it holds the sum over ranks
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Work
from zero.layout import Bucket, Entry
from zero.share import Share


class GradientBuckets:
    """The flat gradients of one model, and the hooks that launch them.

    `parameters` maps names to parameters that require a gradient; `flats` gives one flat tensor a
    bucket, which the caller owns; `reduce` starts the reduction of one of them; `share` says by
    what a bucket is multiplied before. The gradient of every parameter becomes a view into its
    bucket.

    Buckets are launched in one fixed order, whatever the order in which backward fills them, so
    that all ranks agree even when some parameters get no gradient on some ranks. A parameter
    without a gradient counts as zeros.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        buckets: Sequence[Bucket],
        flats: Sequence[Tensor],
        reduce: Callable[[Tensor], Work],
        share: Share,
    ) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._flats = flats
        self._reduce = reduce
        self._works: list[Work] = []  # of the buckets launched in this step, in order
        self._synchronizes = True
        self._share = share
        self._missing = self._all_missing()
        self._hooks = []
        for index, bucket in enumerate(buckets):
            for entry in bucket.entries:
                parameter = parameters[entry.spec.name]
                parameter.grad = self._view(index, entry)
                if entry.spec.numel:  # an empty gradient changes nothing, whenever it arrives
                    hook = partial(self._on_gradient, index, entry.spec.name)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients that backward makes inside only accumulate: nothing is launched."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def launch_rest(self) -> None:
        """Launch what backward left unlaunched. Collective, as every launch is."""
        for index in range(len(self._works), len(self._buckets)):
            self._launch(index)

    def reduced(self) -> Iterator[Tensor]:
        """Yield each bucket once its reduction is done, in order; all must have been launched.

        When exhausted, the buckets are ready for the next step's gradients.
        """
        for flat, work in zip(self._flats, self._works, strict=True):
            work.wait()
            yield flat
        self._works.clear()
        self._missing = self._all_missing()

    @torch.no_grad()
    def zero(self) -> None:
        """Set all gradients to zero, in place. Waits for what is in flight."""
        for work in self._works:
            work.wait()
        for index, bucket in enumerate(self._buckets):
            self._flats[index].zero_()
            for entry in bucket.entries:
                self._parameters[entry.spec.name].grad = self._view(index, entry)
        self._share.discard()

    def close(self) -> None:
        """Remove the hooks. The gradients stay views into the buckets."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _all_missing(self) -> list[set[str]]:
        return [{e.spec.name for e in b.entries if e.spec.numel} for b in self._buckets]

    def _view(self, index: int, entry: Entry) -> Tensor:
        run = self._flats[index][entry.start : entry.stop]
        parameter = self._parameters[entry.spec.name]
        if parameter.is_contiguous() or not _is_dense(parameter):
            return run.view(entry.spec.shape)
        # torch wants a gradient to lie in memory as its parameter does: channels last, say.
        return run.as_strided(entry.spec.shape, parameter.stride())

    def _on_gradient(self, index: int, name: str, parameter: Tensor) -> None:
        self._share.use()
        if index < len(self._works):
            raise RuntimeError(
                f"parameter {name} got a gradient after its bucket had been launched: backward ran "
                "twice without a step() between; put all but the last one in `with "
                "optimizer.no_sync():`"
            )
        if not self._synchronizes:
            return
        self._missing[index].discard(name)
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            self._launch(len(self._works))

    @torch.no_grad()
    def _launch(self, index: int) -> None:
        for entry in self._buckets[index].entries:
            self._adopt(self._parameters[entry.spec.name], self._view(index, entry))
        flat = self._flats[index]
        scale = self._share.scale
        if scale == 0:
            flat.zero_()  # not a product: a loss over no samples is NaN, and 0 * NaN as well
        elif scale != 1:
            flat.mul_(scale)
        self._works.append(self._reduce(flat))

    @staticmethod
    def _adopt(parameter: Parameter, view: Tensor) -> None:
        """Bring a gradient back that someone else's `zero_grad` took out of its bucket."""
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            view.copy_(gradient.to_dense())
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        parameter.grad = view


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills one run of memory, in whatever order of its dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True
