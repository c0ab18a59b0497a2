"""Gradient buckets: autograd hooks fill them, and full ones are reduced during backward.

The life of a bucket in a round, which is a micro-batch (stage 2) or a whole accumulation:

    filling      autograd hooks take gradients as backward makes them
    launched     its last gradient has arrived, or backward has ended
    in flight    it belongs to the communication hook
    reduced      `Gradients.finish` has waited for it

A reduction ends with the backward that is not under `no_sync`, inside `backward()`, as in DDP.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.variable import Variable
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zero.collectives import Work
from zero.gradients.sums import Gradients
from zero.gradients.weights import BatchWeight
from zero.layout import Bucket, ParameterSlice
from zero.norms import FiniteCheck
from zero.parameter_watch import accumulation_node

INTERRUPTED = (
    "the last backward through this optimizer's parameters did not end: it raised an exception, "
    "after which optimizer.zero_grad() is needed, and a new job if gradients were sent; or all of "
    "the model lies in reentrant checkpoints: then call torch.utils.checkpoint with "
    "use_reentrant=False"
)
COMPILED = (
    "torch._dynamo.config.compiled_autograd is on: compiled autograd does not tell when a backward "
    "ends, so gradients cannot be averaged; leave it off, torch.compile compiles backward without"
)


class GradientBuckets:
    """The buckets of a model, with the hooks that fill and launch them.

    Buckets are launched in a fixed order, whatever the order in which backward fills them, so all
    ranks agree even if some parameters get no gradient on some ranks. A parameter without a
    gradient counts as zeros.

    Gradients are stored in `gradients`, multiplied by `weight` and checked by `finite`, and
    `reduce` starts the sum of a full bucket over ranks. `announce` is called before the first
    launch of a round, where every micro-batch is a round. None: under `no_sync` gradients only
    accumulate. `finish` is called when a backward that is not under `no_sync` ends, `check` when
    one begins, and `dropped` when gradients are found to have been dropped before a step, as by
    model.zero_grad().
    """

    def __init__(
        self,
        gradients: Gradients,
        weight: BatchWeight,
        finite: FiniteCheck,
        *,
        reduce: Callable[[int, Bucket], Work],
        announce: Callable[[], None] | None,
        finish: Callable[[], None],
        check: Callable[[], None],
        dropped: Callable[[], None],
    ) -> None:
        self._gradients, self._weight, self._finite = gradients, weight, finite
        self._reduce, self._announce, self._finish = reduce, announce, finish
        self._check, self._dropped = check, dropped
        self._buckets: list[Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._nodes: list[Any] = []  # autograd keeps them, and so their hooks, only while in use
        self._weighing: list[RemovableHandle] = []  # hooks that run before a gradient is added
        self._launched = 0  # buckets in this round
        self._missing: list[set[str]] = []  # gradients to come in this round, by bucket
        self._late: list[tuple[int, ParameterSlice, Tensor]] = []  # that came after the last one
        self._last_micro_batch = True
        # If given, nothing is launched before a reduction ends; it is called when all is taken.
        self.before_launch: Callable[[], None] | None = None
        self.begun = False  # a gradient of this reduction has arrived
        self._round_begun = False  # a gradient of this round has arrived
        self._tasks: set[int] = set()  # autograd's numbers of the backward that is running
        self.used: set[str] = set()  # names of parameters that got a gradient in this reduction
        self.sparse: set[str] = set()  # names of parameters that ever got a sparse gradient

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Add buckets, and hooks on their parameters, by name. Between steps."""
        for index, bucket in enumerate(buckets, len(self._buckets)):
            for entry in bucket.entries:
                if entry.numel:  # backward may skip empty parameters
                    node = accumulation_node(parameters[entry.spec.name])
                    self._nodes.append(node)
                    self._hooks.append(node.register_hook(partial(self._on_gradient, index, entry)))
        self._buckets.extend(buckets)
        self._gradients.add(buckets, parameters)
        self._start_round()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enclose micro-batches that are not the last of an accumulation."""
        before, self._last_micro_batch = self._last_micro_batch, False
        try:
            yield
        finally:
            self._last_micro_batch = before

    @property
    def syncing(self) -> bool:
        """True outside of `no_sync`."""
        return self._last_micro_batch

    def forget_dropped(self, arriving: str = "") -> None:
        """Begin anew if all gradients of an accumulation were dropped, as by model.zero_grad().

        `arriving` names a parameter that has a new gradient. Raises RuntimeError if some were
        dropped that this rank has passed on (stage 2).
        """
        dropped = [name for name in self.used if self._gradients.dropped(name)]
        if arriving in self.used and not self._gradients.keeps(arriving):
            dropped.append(arriving)
        if not self.begun or not dropped:
            return
        if len(dropped) == len(self.used):
            self._dropped()
            self._gradients.forget()
            self._discard()
        elif self._announce:
            raise RuntimeError(
                f"the gradients of {', '.join(sorted(dropped)[:3])} were dropped within an "
                "accumulation, but at stage 2 they have been added: drop all, or use stage 0 or 1"
            )
        else:
            self.used.difference_update(dropped)

    @property
    def in_backward(self) -> bool:
        """True in a backward of which a gradient has arrived."""
        return bool(self._tasks)

    def weigh_arrivals(self) -> None:
        """Multiply gradients by the weight's `factor` before autograd adds them to earlier ones.

        Until the reduction ends. Only where the factor may not be 1: a hook takes time.
        """
        if not self._weighing:
            self._weighing = [node.register_prehook(self._weigh) for node in self._nodes]

    def interrupt(self) -> None:
        """Note that a backward raised."""
        self._tasks.add(-1)

    def resume(self) -> None:
        """Take what an interrupted backward has left for its whole result."""
        self._tasks.clear()

    def check_ended(self) -> None:
        """Raise RuntimeError if the last backward was interrupted."""
        if self._tasks:
            raise RuntimeError(INTERRUPTED)

    def begin(self) -> None:
        """Begin a reduction, unless one has begun."""
        if not self.begun:
            self.begun = True
            if self._gradients.all_dropped:
                self._dropped()
            self._gradients.begin()

    def launch_remaining(self) -> None:
        """Launch the buckets that backward has not launched. Collective.

        If every micro-batch is a round, a round without any gradient launches nothing.
        """
        if self._announce and not self._round_begun:
            for index in range(len(self._buckets)):
                self._note_assigned(index)
        if self._round_begun or not self._announce:
            if self.before_launch is not None:
                self._take_all()
                self.before_launch()
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

    @property
    def late(self) -> int:
        """The number of gradients that have come after those that this reduction has taken."""
        return len(self._late)

    def end(self, *, again: bool) -> None:
        """End a reduction; with `again`, begin another one with the gradients that came late."""
        self.used, self.begun = set(), False
        self._stop_weighing()
        if not again:
            return
        self._gradients.set_aside()
        late, self._late = self._late, []
        for index, entry, gradient in late:
            self._gradients.put(entry, gradient)
            self._take_or_keep(index, entry)

    def clear(self, set_to_none: bool = True) -> None:
        """Discard all gradients and their weights. Waits for reductions in flight.

        Also those of a backward that was interrupted, unless it has launched buckets.
        """
        self._gradients.clear(set_to_none)
        self._discard()
        if not self._launched:
            self._tasks.clear()
            self._start_round()

    def close(self) -> None:
        """Remove the hooks, and leave `parameter.grad` to others. Once."""
        self._stop_weighing()
        self._gradients.close(self.used if self.begun else ())
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    def _discard(self) -> None:
        """Forget what is known of gradients that were discarded."""
        self._weight.discard()
        self._late.clear()
        self._finite.reset()
        self.used, self.begun = set(), False

    def _start_round(self) -> None:
        self._launched, self._round_begun = 0, False
        self._missing = [{e.spec.name for e in b.entries if e.numel} for b in self._buckets]

    def _stop_weighing(self) -> None:
        for hook in self._weighing:
            hook.remove()
        self._weighing.clear()

    # Autograd calls these three also within compiled code, which must not compile them.
    @_disable_dynamo
    def _weigh(self, arriving: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        """Return the gradient that backward has just made, times its micro-batch's weight."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._begin_backward(task)
            if not self._weight.multiplied:
                self._gradients.void()
        factor = self._weight.factor
        if factor == 1:
            return None
        if factor:
            return tuple(None if g is None else g * factor for g in arriving)
        return tuple(None if g is None else torch.zeros_like(g) for g in arriving)

    @_disable_dynamo
    def _on_gradient(
        self, index: int, entry: ParameterSlice, _: Any, arrived: Sequence[Tensor | None]
    ) -> None:
        """Take the gradient that backward has just made, and launch full buckets."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._begin_backward(task, entry.spec.name)
        if arrived[0] is not None and arrived[0].is_sparse:
            self.sparse.add(entry.spec.name)
        self._take_or_keep(index, entry)

    def _begin_backward(self, task: int, arriving: str = "") -> None:
        """Note a backward that has begun, or another one nested in it or around it."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise RuntimeError(COMPILED)
        if self._tasks and task > max(self._tasks) and not _is_nested():
            raise RuntimeError(INTERRUPTED)
        first = not self._tasks
        if first:
            self._check()
        self._tasks.add(task)
        if first:
            self.forget_dropped(arriving)
            self._weight.begin_backward()
        Variable._execution_engine.queue_callback(self._on_end_of_backward)

    def _take_or_keep(self, index: int, entry: ParameterSlice) -> None:
        """Take a gradient into its bucket; keep it for later where that is not possible."""
        self.begin()
        name = entry.spec.name
        self.used.add(name)
        if self.before_launch is not None or not (self._last_micro_batch or self._announce):
            self._gradients.accumulate(index, entry)
        elif self._gradients.hides and name not in self._missing[index]:
            # Its layer lies in several reentrant checkpoints.
            self._late.append((index, entry, self._gradients.pop(entry)))
        else:
            self._round_begun = True
            self._take(index, entry)
            self._missing[index].discard(name)
            while self._launched < len(self._buckets) and not self._missing[self._launched]:
                self._launch_next()

    @_disable_dynamo
    def _on_end_of_backward(self) -> None:
        """Finish what a backward leaves, when the outermost one ends."""
        if not self._tasks:
            return  # a second call for the same backward
        complete = self._last_micro_batch and self._launched == len(self._buckets)
        if _is_nested() and not complete:
            return
        self._tasks.clear()
        if self._last_micro_batch:
            self._finish()
        elif self._announce:
            self.launch_remaining()

    def _note_assigned(self, index: int) -> None:
        """Count the gradients that were assigned, which no hook has seen."""
        for entry in self._buckets[index].entries:
            name = entry.spec.name
            if name in self._missing[index] and self._gradients.has_gradient(entry):
                self.used.add(name)
                self._round_begun = True

    def _take_all(self) -> None:
        """Take all gradients into their buckets, before any bucket is launched."""
        for index, bucket in enumerate(self._buckets):
            self._note_assigned(index)
            for entry in bucket.entries:
                if entry.spec.name in self._missing[index]:
                    self._take(index, entry)
            self._missing[index].clear()

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
        self._gradients.launched(index, self._reduce(index, self._buckets[index]))

    def _take(self, index: int, entry: ParameterSlice) -> None:
        taken = self._gradients.take(index, entry, self._weight.scale)
        if taken is not None:
            self._finite.add(taken)


def _is_nested() -> bool:
    """Return whether the running backward was started by a node of another one.

    So does reentrant checkpointing: backward of torch.autograd.Function calls backward.
    """
    frame, engines = sys._getframe(1), 0
    while frame is not None:
        code = frame.f_code
        engines += code.co_name == "_engine_run_backward"
        within = code.co_name == "apply" and code.co_filename == torch.autograd.function.__file__
        if engines > 1 or (engines and within):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
