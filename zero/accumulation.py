"""The accumulation of gradients of a step, from the first backward to the means that `step` takes.

    EMPTY          no backward since the last step or `zero_grad`
    FILLING        autograd hooks take gradients into buckets, as backward makes them; a bucket
                   whose last gradient has arrived belongs to its communication hook
    REDUCING       backward has ended: the rest is launched, and `finish` waits for all
    HELD           every gradient is the mean over ranks; further backward passes add to it
    INTERRUPTED    a backward has raised; `clear` makes it empty, if nothing was sent

A reduction ends with the backward that is not under `no_sync`, inside `backward()`, as in DDP.
Every bucket is launched once for a whole accumulation, or at stage 2 for each micro-batch. These
launches, the running backward, what has arrived since the last reduction, and the facts of the mean
are each an object that is made anew when the next one begins.
"""

import math
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.variable import Variable
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zero.comm_hooks import CommHook, ReducibleBucket
from zero.gradients.buckets import BucketGradients
from zero.gradients.weights import DIGEST_BITS, BatchWeight, DrawnBatch
from zero.kernels import nan_unless_finite, order, power_sum, rescale
from zero.layout import Bucket, ParameterSlice
from zero.losses import RUNNING, ChangedLoss
from zero.parameter_watch import accumulation_node, first_after_accumulation
from zero.precision import LossScale
from zero.shard import OptimizerShard
from zero.step_message import StepMessage
from zero.sync_schedule import EveryStep

INTERRUPTED = (
    "the last backward through this optimizer's parameters did not end: it raised an exception, "
    "after which optimizer.zero_grad() is needed, and a new job if gradients were sent"
)
COMPILED = (
    "torch._dynamo.config.compiled_autograd is on: compiled autograd does not tell when a backward "
    "ends, so gradients cannot be averaged; leave it off, torch.compile compiles backward without"
)
EVALUATES = (
    "this backward is in a pass over world.shard that began while gradients were disabled, as "
    "under torch.no_grad(), and so counts as an evaluation: give world.shard(loader, train=True) "
    "to train on its batches, or train=False if they are not of this backward"
)


class Phase(Enum):
    """Progress of the gradients of a step."""

    EMPTY = "empty"
    FILLING = "filling"
    REDUCING = "reducing"
    HELD = "held"
    INTERRUPTED = "interrupted"


@dataclass
class Means:
    """Facts of the mean of a step, of which a part may be reduced already."""

    weight: float = 0.0  # of what was reduced, in samples
    scaled_by_others: bool = False  # a loss, by another loss scale than this optimizer's
    weighed_by_others: bool = False  # a loss, otherwise than it counts in this mean
    unused: bool = False  # it has left no gradient, since no rank has used a parameter
    # At stages 1 and 2, a number of what it is made of: the reductions so far, and the parameters
    # that have kept their means. Ranks differ in it if some alone have dropped a gradient.
    kept: int = 0
    # The weight that another optimizer has given to the only loss that is not reduced yet; 0 if
    # none has, and NaN for one of several.
    weighed: float = 0.0
    # NaN if a gradient of this one of several ranks was not finite before the sum over them: it
    # tells on which rank a step has failed.
    finite_flag: float | Tensor = 0.0


@dataclass
class _Arrived:
    """Gradients that have come since the last reduction."""

    used: set[str] = field(default_factory=set)  # names of their parameters
    # Those that came after the last one of their parameter, each with what multiplies it.
    late: list[tuple[int, ParameterSlice, Tensor, float]] = field(default_factory=list)


@dataclass
class _Launches:
    """The launches of all buckets, in order."""

    missing: list[set[str]]  # gradients to come, by bucket
    begun: bool = False  # a gradient has arrived
    done: int = 0  # buckets that were launched


@dataclass
class _Backward:
    """The running backward, with those that are nested in it."""

    # By autograd's number, a function that returns None if that backward has raised.
    tasks: dict[int, Callable[[], object]] = field(default_factory=dict)
    joining: list[RemovableHandle] = field(default_factory=list)  # on nodes that run in the outer
    arrived: set[str] = field(default_factory=set)  # names of parameters that got a gradient
    began_s: float = 0.0  # when the first gradient came
    # By what part of the weight that another optimizer gives to its loss the mean is another one:
    # NaN if it is not of this loss alone, 0 if its weight is stated here, or no matter.
    counts: float = 1.0


class Accumulation:
    """The state of an accumulation, with the autograd hooks that fill buckets and launch them.

    Buckets are launched in a fixed order, whatever the order in which backward fills them, so all
    ranks agree even if some parameters get no gradient on some ranks. A parameter without a
    gradient counts as zeros.

    A `StepMessage` ends a reduction, with the ranks' weights and what others have put into it. At
    stage 2 every micro-batch is reduced by itself, and ranks may have different numbers of them. So
    a rank announces each one by the same message, and ranks that have finished contribute zeros
    until every rank is done:

        rank 0   announce   buckets   announce   buckets   done
        rank 1   announce   buckets   done       zeros     done
    """

    def __init__(
        self,
        shard: OptimizerShard,
        hook: CommHook,
        sync_schedule: EveryStep,
        scale: LossScale,
    ) -> None:
        self._shard, self._gradients, self._slots = shard, shard.gradients, shard.gradients.slots
        self._hook, self._sync_schedule, self._scale = hook, sync_schedule, scale
        self._world_size = sync_schedule.sharding.size * sync_schedule.replicas
        self.group = sync_schedule.group(0)
        """The ranks over which the current step is averaged."""
        self.announces = shard.stage == 2  # every micro-batch; others accumulate under `no_sync`
        self.steps = 0  # taken so far, skipped ones included: the number of the current one
        alone = self._world_size == 1
        self.weight = BatchWeight(
            self.group.size,
            every_micro_batch=self.announces and not alone,
            alone=alone,
            whole=self._whole,
        )
        self._message = self._begin_message()
        self._hooks: list[RemovableHandle] = []
        self._nodes: list[Any] = []  # autograd keeps them, and so their hooks, only while in use
        self._weighing: list[RemovableHandle] = []  # hooks that run before a gradient is added
        # The limit of the norm of each rank's own mean: then nothing leaves in backward.
        self.own_limit: float | None = None
        self.waited_s = 0.0  # seconds so far in `finish`
        # Is told of what has ended in the step: a name, and its start by `time.perf_counter`.
        self.observe: Callable[[str, float], None] = lambda name, start: None
        self.evaluations: Set[object] = frozenset()
        """Passes over batches in progress that do not train: while there are any, none may."""
        self._unsent = set[str]()  # parameters of which a hook between nodes may keep a gradient
        self._syncing = True  # outside of `no_sync`
        self._phase = Phase.EMPTY  # or that before a backward that is interrupted
        self._backward = _Backward()
        self._arrived, self.means = _Arrived(), Means()
        self._names: list[frozenset[str]] = []  # of the parameters that get a gradient, by bucket
        self._begin_launches()

    @property
    def phase(self) -> Phase:
        """The progress of the gradients."""
        tasks = self._backward.tasks
        interrupted = tasks and not any(running() for running in tasks.values())
        return Phase.INTERRUPTED if interrupted else self._phase

    @property
    def loss_weight(self) -> float:
        """The weight of this rank's loss in the running or coming backward, beside other ranks'.

        0 where this rank has no sample.
        """
        return self.weight.mean.latest if self._backward.tasks else self.weight.coming

    @property
    def message(self) -> StepMessage:
        """The message that ends the current or coming reduction."""
        if self._message.sent:
            self._message = self._begin_message()
        return self._message

    @property
    def _whole(self) -> bool:
        return self.group.size == self._world_size

    # Between backward passes.

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Add the shard's last buckets, of parameters by name. Collective."""
        every = self._shard.buckets
        for index, bucket in enumerate(buckets, len(every) - len(buckets)):
            for entry in bucket.entries:
                if entry.numel:  # backward may skip empty parameters
                    parameter = parameters[entry.spec.name]
                    node = accumulation_node(parameter)
                    self._nodes.append(node)
                    hook = partial(self._on_gradient, index, entry)
                    if self._shard.sharded:  # `p.grad` is refused in hooks, as after backward
                        self._hooks.append(first_after_accumulation(parameter, hook))
                    else:
                        self._hooks.append(node.register_hook(hook))
        self._gradients.add(buckets, parameters)
        self.weight.in_fp16 |= any(bucket.dtype == torch.float16 for bucket in buckets)
        self._names += [frozenset(e.spec.name for e in b.entries if e.numel) for b in buckets]
        self._begin_launches()
        self._stop_weighing()  # hooks that lack the new parameters
        self._weigh_if_needed()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enclose micro-batches that are not the last of an accumulation."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def synchronize(self) -> None:
        """Finish, unless backward has done so since the last step or `zero_grad`. Collective.

        Also if the gradients that it left are gone. Raises RuntimeError if the last backward was
        interrupted.
        """
        if self._backward.tasks:
            raise RuntimeError(INTERRUPTED)
        self._forget_dropped()
        if self.phase is Phase.HELD and not (self.means.unused or self._slots.filled):
            self._enter(Phase.EMPTY)
        if self.phase is not Phase.HELD:
            self.finish()

    def expect(self, batch: DrawnBatch) -> None:
        """Note a batch that was drawn. Local.

        It weighs the backward passes that follow, until one follows the next batch. If batches that
        differ were drawn ahead, backward raises RuntimeError; so do ranks with different digests of
        the samples of the whole batch.
        """
        self.weight.expect(batch)
        self._weigh_if_needed()

    def clip_own(self, max_norm: float | None) -> None:
        """Clip this rank's own mean in every reduction that follows; None: no longer. Local."""
        self.own_limit = max_norm
        self._weigh_if_needed()

    def _weigh_if_needed(self) -> None:
        """Let hooks run before gradients are added, where the factor may not be 1.

        Or where each reduction is clipped by itself. Nowhere else, since a hook takes time.
        """
        if (self.weight.may_change or self.own_limit) and not self._weighing:
            self._weighing = [node.register_prehook(self._weigh) for node in self._nodes]

    def state_weight(self, weight: float, multiplier: float) -> None:
        """State the weight of the coming backward in the mean over all samples of the step. Local.

        Its gradient is multiplied by `multiplier`, and means that are held are set aside. Raises
        RuntimeError if the step has gradients that are not in such a mean.
        """
        self._forget_dropped()
        self._forget_held()
        begins = not self._pending
        if begins and self._slots.filled and not self._gradients.held:
            raise RuntimeError(
                "a gradient was assigned before optimizer.backward(loss, weight=...), which would "
                "weigh it too: call share(n) and loss.backward()"
            )
        self.weight.state(weight, multiplier)
        self._weigh_if_needed()
        self._set_held_aside()

    def _set_held_aside(self) -> None:
        """Let the coming backward not add to means that are held, as at stages 1 and 2."""
        if (
            self._gradients.held
            and self._slots.filled
            and not (self._pending or self._shard.sharded)
        ):
            self._gradients.collect()
            self._gradients.separate()

    def pass_backward(self) -> None:
        """Count a backward that makes no gradient here. Collective outside of `no_sync`."""
        self._enter(Phase.FILLING)
        if self.evaluations:
            raise RuntimeError(EVALUATES)
        self.weight.begin_backward()
        if self._syncing:
            self.finish()

    def interrupt(self) -> None:
        """Note that a backward has raised."""
        self._backward.tasks = {-1: lambda: None}

    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients and their weights. Waits for reductions in flight.

        Also those of a backward that was interrupted, unless it has launched buckets.
        """
        self._gradients.clear(set_to_none)
        self.weight.discard()
        self._enter(Phase.EMPTY)
        if not self._launches.done or self.group.size == 1:
            self._end_backward()
            self._begin_launches()
        self._hook.end_step(taken=False)

    def resume(self, steps: int) -> None:
        """Continue after so many steps. Local; the same on all ranks."""
        self.steps = steps
        if self._sync_schedule.replicas == 1:
            return
        before, self.group = self.group, self._sync_schedule.group(steps)
        if self.group is not before:  # units must be the same on all of its ranks
            self.weight.begin_group(self.group.size, whole=self._whole)

    def end_step(self, *, taken: bool) -> None:
        """Begin another step; without `taken`, this one has updated nothing. Local."""
        self._hook.end_step(taken=taken)
        self._enter(Phase.EMPTY)
        self.resume(self.steps + 1)
        self.weight.end_step()

    def hook_state(self) -> dict[str, Any]:
        """Return the state of the communication hook on this rank, and what it is of. Local."""
        state, used = self._hook.state_dict(), sorted(self._unsent)
        return {"context": self._hook_context, "state": state, "used": used}

    def load_hook_state(self, saved: dict[str, Any] | None) -> None:
        """Restore what `hook_state` returned; warn if its hook, ranks or buckets differ. Local.

        Without a state that fits, the hook starts anew.
        """
        saved = saved or {"state": {}, "context": None}
        # A rank that owns no lane has no state, and knows the names too.
        fits, used = saved["context"] == self._hook_context, saved.get("used", ())
        self._hook.load_state_dict(saved["state"] if fits else {})
        self._unsent = set(used if fits else ())
        if not fits and (saved["state"] or used) and self._sync_schedule.sharding.rank == 0:
            warnings.warn(
                "the state is of another comm_hook, size or layout: the hook starts anew",
                stacklevel=3,
            )

    @property
    def _hook_context(self) -> list[Any]:
        """The hook, the rank and size, buckets, nodes, and parameters in another memory order."""
        orders = [(name, order(parameter)) for name, parameter in self._shard.named.items()]
        turned = [[name, *dims] for name, dims in orders if list(dims) != sorted(dims)]
        buckets = [[bucket.numel, *bucket.bounds] for bucket in self._shard.buckets]
        nodes = [[*map(list, self._hook.levels.nodes)]] if self._hook.levels else []
        ranks = self._sync_schedule.sharding
        own = [type(self._hook).__name__, ranks.rank, ranks.size]
        return [*own, buckets, *nodes, *([turned] if turned else [])]

    def close(self) -> None:
        """Remove the hooks, and leave `parameter.grad` to others. Once."""
        self._stop_weighing()
        self._slots.close(self._arrived.used)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    @property
    def _pending(self) -> bool:
        """True while gradients are not reduced yet."""
        return self._phase in (Phase.FILLING, Phase.REDUCING)

    def _enter(self, phase: Phase) -> None:
        """Begin a phase, with new objects for what it begins. Nothing else changes the phase."""
        if phase in (Phase.FILLING, Phase.REDUCING) and not self._pending:
            self._forget_held()
            self._gradients.begin()
            if isinstance(self._gradients, BucketGradients) and self._shard.sharded:
                names = self._gradients.aside
                kept = zlib.crc32(repr((self.means.kept, names)).encode()) if names else 0
                self.means.kept = kept % (1 << DIGEST_BITS)
        elif phase is Phase.EMPTY:
            self._arrived, self.means = _Arrived(), Means()
        elif phase is Phase.HELD:
            self._arrived = _Arrived()
        self._phase = phase

    def _forget_held(self) -> None:
        """Forget what was reduced, if means are held, and all of them were dropped."""
        if self._gradients.held and not any(map(self._slots.keeps, self._shard.named)):
            self._hook.end_step(taken=False)
            self.weight.held, self.means = None, Means()

    def _forget_dropped(self, arriving: str = "") -> None:
        """Begin anew if all gradients of an accumulation were dropped, as by model.zero_grad().

        `arriving` names a parameter that has a new gradient. Raises RuntimeError if some were
        dropped that this rank has passed on (stage 2).
        """
        used = self._arrived.used
        dropped = [name for name in used if self._slots.dropped(name)]
        if arriving in used and not self._slots.keeps(arriving):
            dropped.append(arriving)
        if not dropped:
            return
        if len(dropped) == len(used):
            self._hook.end_step(taken=False)
            self._gradients.forget()
            self.weight.discard()
            self._enter(Phase.EMPTY)
        elif self.announces:
            raise RuntimeError(
                f"the gradients of {', '.join(sorted(dropped)[:3])} were dropped within an "
                "accumulation, but at stage 2 they have been added: drop all, or use stage 0 or 1"
            )
        else:
            used.difference_update(dropped)

    def _stop_weighing(self) -> None:
        for hook in self._weighing:
            hook.remove()
        self._weighing.clear()

    # During backward. Autograd calls those that are marked also within compiled code, which
    # must not compile them.

    @_disable_dynamo
    def _weigh(self, arriving: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        """Return the gradient that backward has just made, times its micro-batch's weight.

        Before autograd adds it to earlier ones.
        """
        task = torch._C._current_graph_task_id()
        if task not in self._backward.tasks:
            if self.own_limit:
                self._set_held_aside()
            self._begin_backward(task)
            if not (self.weight.multiplied or self._shard.sharded):
                self._slots.void()
        factor = self.weight.factor
        if factor == 1:
            return None
        if factor:
            return tuple(None if g is None else g * factor for g in arriving)
        return tuple(None if g is None else torch.zeros_like(g) for g in arriving)

    @_disable_dynamo
    def _on_gradient(self, index: int, entry: ParameterSlice, *_: object) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._backward.tasks:
            self._begin_backward(task, entry.spec.name)
        self._take_or_keep(index, entry)
        self._backward.arrived.add(entry.spec.name)

    def _begin_backward(self, task: int, arriving: str = "") -> None:
        """Note a backward that has begun, or another one nested in it or around it."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise RuntimeError(COMPILED)
        if self.phase is Phase.INTERRUPTED:
            raise RuntimeError(INTERRUPTED)
        tasks, changed = self._backward.tasks, RUNNING.get(task)
        if first := not tasks:
            self._backward.began_s = time.perf_counter()
            self._shard.watch.check_kinds()
            # That of a backward around this one, too.
            if self._scale.scales and all(each.scale is None for each in list(RUNNING.values())):
                self._scale.expect_applied()
        at_end = partial(self._on_end_of_backward, task)
        tasks[task] = ref(at_end)  # autograd keeps it until then, or until an exception
        if first:
            self._forget_dropped(arriving)
            if self.evaluations:
                raise RuntimeError(EVALUATES)
            self._forget_held()
            several = self.weight.mean.begun or self.weight.held is not None
            alike = self.weight.stated or self._world_size == 1
            self._backward.counts = math.nan if several else 0.0 if alike else 1.0
            self.weight.begin_backward()
            self._enter(Phase.FILLING)
            self.means.weighed = math.nan if self.means.weighed else 0.0
        if changed is not None:
            self._note_changes(changed)
        Variable._execution_engine.queue_callback(at_end)

    def _note_changes(self, changed: ChangedLoss) -> None:
        """Note what optimizers have done to the loss of the running backward."""
        if changed.scale is not None:
            self._scale.applied = True
            self.means.scaled_by_others |= changed.scale != self._scale.value
        owner, weight = changed.weighed or (self, 0.0)
        if owner is not self:
            self.means.weighed = weight * self._backward.counts

    def _take_or_keep(self, index: int, entry: ParameterSlice, scale: float | None = None) -> None:
        if self._phase is not Phase.FILLING:
            self._enter(Phase.FILLING)
        name, arrived, launches = entry.spec.name, self._arrived, self._launches
        if not self._slots.has_gradient(name):  # a hook that came before has dropped it
            arrived.used.discard(name)
            return
        arrived.used.add(name)
        if self.own_limit or not (self._syncing or self.announces):
            self._gradients.accumulate(index, entry)
        elif self._slots.hides and name not in launches.missing[index]:
            # Its layer lies in several reentrant checkpoints.
            gradient = self._slots.pop(name)
            assert gradient is not None, "backward has just made it"
            # At stage 2, that of its own micro-batch.
            late_scale = self.weight.scale if scale is None else scale
            arrived.late.append((index, entry, gradient, late_scale))
        else:
            if not launches.begun:
                launches.begun = True
                self._agree_on_unit()
            self._take(index, entry, scale)
            launches.missing[index].discard(name)
            while launches.done < len(launches.missing) and not launches.missing[launches.done]:
                self._launch_next()

    @_disable_dynamo
    def _on_end_of_backward(self, task: int) -> None:
        """Finish what a backward leaves, when the outermost one ends."""
        if task not in self._backward.tasks:
            return  # the gradients were discarded within it
        if (outer := torch._C._current_autograd_node()) is not None:
            # A node of another backward has started this one, as in reentrant checkpointing. The
            # other may have no gradient for this optimizer, so it is joined where it goes on.
            self._backward.tasks[task] = lambda: self
            following = (node for node, _ in outer.next_functions if node is not None)
            self._backward.joining += [node.register_prehook(self._join) for node in following]
            return
        if min(self._backward.tasks) < task:  # nested ones have larger numbers
            raise RuntimeError(INTERRUPTED)
        self._check_hooks()
        self._scale.applied = False
        began_s = self._backward.began_s
        self._end_backward()
        if self._syncing:
            self.finish()
        elif self.announces:
            self._launch_remaining()
        self.observe("backward", began_s)

    @_disable_dynamo
    def _join(self, *_: object) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._backward.tasks:
            self._begin_backward(task)

    def _check_hooks(self) -> None:
        """Raise RuntimeError if a hook has set a gradient that was taken from it before."""
        if not self._shard.sharded:
            return
        changed = [name for name in self._backward.arrived if not self._slots.keeps(name)]
        if changed:
            raise RuntimeError(
                f"a hook has set the gradient of {', '.join(sorted(changed)[:3])} in backward, but "
                f"at stage {self._shard.stage} it was taken before, to be sharded: change it by "
                "parameter.register_hook, which gets it earlier, or use stage 0"
            )

    def _end_backward(self) -> None:
        for hook in self._backward.joining:
            hook.remove()
        self._backward = _Backward()

    # The reduction.

    @torch.no_grad()
    def finish(self) -> None:
        """Launch the remaining buckets, wait for all, and make means of the sums. Collective.

        Raises ValueError if the weights of all ranks sum to 0, and RuntimeError if their batches
        differ.
        """
        start = time.perf_counter()
        try:
            late = False
            while late := self._reduce(late=late):
                pass
        finally:
            self.waited_s += time.perf_counter() - start
            self.observe("reduce_wait", start)

    def _reduce(self, *, late: bool) -> bool:
        """Reduce what has arrived, or came `late`; return whether any rank has more of these."""
        self.weight.finish()
        self._enter(Phase.REDUCING)
        self._agree_on_unit()
        self._launch_remaining()
        totals = self._totals()
        # In a mean over samples, a rank without a backward has none; else it is one of the ranks.
        absent = 0.0 if totals["averages"] else totals["absent"]
        weight, divisor = totals["weight"] + absent, totals["divisor"] + absent
        # Of the mean over all samples that is held, to which this one is added.
        held = (self.weight.held or 0.0) if totals["averages"] else 0.0
        unused = self._unused() if totals["missing"] else frozenset()
        if self._hook.several_nodes:
            # The hook also sends what it has not sent before.
            self._unsent |= self._shard.named.keys() - unused
            unused -= self._unsent
        if not divisor > 0:
            if self._whole and not held:
                self.clear(set_to_none=True)
                text = f"the ranks' weights sum to {weight:g}: at least one needs a sample"
                raise ValueError(text)
            unused = frozenset(self._shard.named)  # this group has no sample
        total = held + divisor
        factor = self.weight.unit / total if divisor > 0 else 0.0
        # What came late is added to a mean in which those that were held have their part.
        of_held = held / total if held and not late else 1.0
        self._gradients.finish(factor, unused, of_held=of_held)
        if divisor > 0:
            self._hook.end_reduction(total)
        came_late = self._arrived.late
        self._enter(Phase.HELD)
        self._stop_weighing()
        if totals["late"]:
            self._gradients.separate()
            for index, entry, gradient, scale in came_late:
                self._slots.put(entry.spec.name, gradient)
                self._take_or_keep(index, entry, scale)
            return True
        before, left = self.means, self._slots.filled
        # A rank that weighs nothing here must weigh nothing there, and has no ratio.
        weighed = totals["weighing"] * totals["squared weighed"], totals["weighed"] ** 2
        self.means = Means(
            weight=before.weight + weight,
            scaled_by_others=totals["scaled by others"] > 0,
            weighed_by_others=before.weighed_by_others or not math.isclose(*weighed),
            unused=not left,
            kept=before.kept,
            finite_flag=before.finite_flag,
        )
        total = total if totals["averages"] else 0.0
        self.weight.reset(divisor / self.group.size, total if left else None)
        self._weigh_if_needed()
        return False

    def _agree_on_unit(self) -> None:
        """Let the weights of all ranks in this mean set the unit, for fp16. Collective."""
        small_range = self.weight.in_fp16 or self._hook.wire_dtype == torch.float16
        if self.group.size == 1 or self.weight.agreed or not small_range:
            return
        divisor = torch.tensor([self.weight.divisor], dtype=torch.float64, device="cpu")
        self.group.all_reduce(divisor).wait()
        self.weight.agree_on(divisor.item())

    def _begin_launches(self) -> None:
        self._launches = _Launches([set(names) for names in self._names])

    def _launch_remaining(self) -> None:
        """Launch the buckets that backward has not launched. Collective.

        If every micro-batch is reduced, one without any gradient launches nothing.
        """
        missing = self._launches.missing
        if self.announces and not self._launches.begun:
            for index in range(len(missing)):
                self._note_assigned(index)
        if self._launches.begun or not self.announces:
            if self.own_limit:
                for index, names in enumerate(missing):
                    self._take_missing(index)
                    names.clear()
                self._clip_own(self.own_limit)
            while self._launches.done < len(missing):
                self._launch_next()
        self._begin_launches()

    def _clip_own(self, max_norm: float) -> None:
        weight, own = self.weight, self._gradients.own()
        divisor = weight.divisor if weight.mean.averages else weight.multiplied
        if not divisor:
            return
        # Of what is summed, for the mean.
        factor = weight.unit / divisor / self._scale.value
        norm = math.pow(float(power_sum(own, 2)), 0.5) * factor
        if math.isfinite(norm):
            rescale(own, min(1.0, max_norm / (norm + 1e-6)))

    def _launch_next(self) -> None:
        if not self._launches.done:
            self.means.kept += self._shard.sharded
            if self.announces:
                self.message.announce(self.group, "running")
        self._send(self._launches.done)
        self._launches.done += 1

    def _send(self, index: int) -> None:
        """Start the communication hook on a bucket, which owns its memory until it has finished."""
        self._take_missing(index)
        group, gradients, buckets = self.group, self._gradients, self._shard.buckets
        if group.size == 1 or not isinstance(gradients, BucketGradients):
            return
        bucket = ReducibleBucket(
            index,
            buckets[index],
            gradients.flat(index),
            group,
            # Several sharding groups together need the whole sum, and each rank keeps its shard.
            self._shard.sharded and group.size == self._shard.sharding.size,
            self.weight.unit / self._scale.value,
            last=index == len(buckets) - 1,
            parameters=self._shard.named,
        )
        gradients.launched(index, self._hook(bucket))

    def _take_missing(self, index: int) -> None:
        self._note_assigned(index)
        for entry in self._shard.buckets[index].entries:
            if entry.spec.name in self._launches.missing[index]:
                self._take(index, entry)

    def _note_assigned(self, index: int) -> None:
        """Count the gradients that were assigned, which no hook has seen."""
        for entry in self._shard.buckets[index].entries:
            name = entry.spec.name
            if name in self._launches.missing[index] and self._slots.has_gradient(name):
                self._arrived.used.add(name)
                self._launches.begun = True

    def _take(self, index: int, entry: ParameterSlice, scale: float | None = None) -> None:
        scale = self.weight.scale if scale is None else scale
        taken = self._gradients.take(index, entry, scale)
        if taken is not None and self._world_size > 1:
            self.means.finite_flag = self.means.finite_flag + nan_unless_finite(taken)

    def _begin_message(self) -> StepMessage:
        message, weight = StepMessage(), self.weight
        message.put("running", 0.0)
        message.put("weight", lambda: weight.weight)
        message.put("divisor", lambda: weight.divisor)
        message.put("absent", lambda: weight.mean.absent)
        message.put("averages", lambda: weight.mean.averages)
        message.put(
            "missing", lambda: sum(map(len, self._launches.missing)) - len(self._arrived.used)
        )
        message.put("late", lambda: len(self._arrived.late))
        message.put("scaled by others", lambda: self.means.scaled_by_others)
        message.put("weighing", lambda: weight.divisor > 0)
        message.put("weighed", self._ratio)
        message.put("squared weighed", lambda: self._ratio() ** 2)
        message.put_same("digest", lambda: weight.mean.digest)
        message.put_same("micro-batches", lambda: weight.micro_batches)
        message.put_same("kept", lambda: self.means.kept)
        return message

    def _ratio(self) -> float:
        """Return by how much more another optimizer weighs this rank's loss; 0 if none does."""
        weighed = self.means.weighed
        return weighed / (self.weight.divisor or math.nan) if weighed else 0.0

    def _totals(self) -> dict[str, float]:
        """Wait until all ranks have finished, and return sums over them. Collective.

        Under the names that `_begin_message` gives. Raises RuntimeError on all ranks if they differ
        in the samples of a batch, the number of micro-batches, or the gradients that they keep.
        """
        message = self.message
        while True:
            message.send(self.group)
            totals = message.read()
            if not totals["running"]:
                break
            self.means.kept += 1
            for index in range(len(self._launches.missing)):  # zeros, in the micro-batch of others
                self._send(index)
        if not message.same("digest"):
            raise RuntimeError(
                "the ranks drew different samples for one global batch: seed the sampler alike on "
                "all ranks, and leave out a batch, or end a loop, on all of them or on none"
            )
        if not message.same("micro-batches"):
            raise RuntimeError(
                "the ranks have different numbers of micro-batches in a step, by which share(n) "
                "weighs, and at stage 2 each is reduced before its rank knows the number: call "
                "optimizer.backward(loss, weight=n) for every one, or use stage 0 or 1"
            )
        if not message.same("kept"):
            raise RuntimeError(
                "a gradient was dropped on some ranks alone, as by zero_grad(), after parts of it "
                f"were sent to others (stage {self._shard.stage}): drop it on all ranks or on none"
            )
        return totals

    def _unused(self) -> frozenset[str]:
        flags = torch.tensor(
            [n in self._arrived.used for n in self._shard.named], dtype=torch.float64, device="cpu"
        )
        if self.group.size > 1:
            self.group.all_reduce(flags).wait()
        by_name = zip(self._shard.named, flags.tolist(), strict=True)
        return frozenset(name for name, ranks in by_name if not ranks)
