"""The agreement of the ranks of a job on a step, and the end of one that fails on some rank.

The means, flags and failures of a step travel in the `StepMessage` that ends the reduction of its
gradients. Steps that a node takes alone, between two exchanges (`zero.exchange.exchange`), have the
means of the node. What all ranks need is gathered at the end of such a round of steps: requests to
stop and to save, the losses of the round, and what each rank has measured. It counts after the same
step on all of them: at once, or, with rounds of 2 steps and max_staleness 1,

    step            1   2   3   4   5   6
    round 0 ends        sent    counts
    round 1 ends                sent    counts

In a step of all ranks, a rank that raises an exception takes part in the rest of it, so that all
reach its end and learn of it there. Nothing has been updated by then: the run is saved as it was
before the step. In a step of a node alone, it ends the job at once.
"""

import math
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from mntrain.alike.naming import naming
from mntrain.checkpoint import random_states, set_random_states
from mntrain.comm.engine import Future
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.errors import AgreedError, RemoteRankError, TrainingStoppedError
from mntrain.metrics.registry import PER_RANK
from mntrain.run.signals import REQUESTS
from mntrain.train.job import TrainingJob
from mntrain.train.step_means import GlobalMeans, PartCounts, StepMeans
from mntrain.world import World
from zero.agreement import DifferentWeightsError
from zero.collectives import Collectives
from zero.norms import NonFiniteGradientError
from zero.step_message import StepMessage

_LOSS, _ITEMS = "loss of a round", "items of a round"  # among the flags of a round
_PATIENCE_S = 5.0  # until a failed rank prints its error, if others have not ended the step


@contextmanager
def errors_stop(world: World, step: int) -> Iterator[None]:
    """Raise TrainingStoppedError in place of the block's errors of all ranks: of the optimizer."""
    try:
        yield
    except NonFiniteGradientError as error:
        raise TrainingStoppedError(f"in step {step}, {error}", world.rank) from None
    except DifferentWeightsError as error:
        raise TrainingStoppedError(str(error), world.rank) from None


class StepAgreement:
    """The means, flags and failures that the ranks of a job establish together in each step.

    All ranks call `computing`, `before_update`, `end_if_failed` and `after_update`, in this order,
    and then `meet_if_needed`. Forward and backward add to `losses`, and take the
    weights of their parts from `counts`.

    Construction is collective. `save` saves the last completed step, or returns why that failed.
    """

    def __init__(
        self,
        world: World,
        job: TrainingJob,
        save: Callable[[], AgreedError | None],
    ) -> None:
        self._world, self._job, self._save = world, job, save
        self.losses = StepMeans(world.rank)
        self.counts = PartCounts(job.task, job.config.task, self._averaged_over, world.waits)
        skips = job.config.optim.non_finite == "skip" or job.precision.loss_scale == "dynamic"
        self._raises_non_finite = not skips
        self._alone = self._ends_round = False  # this step
        # What ranks have sent after a round, and `Checkpoints.progress` then.
        self._rounds = deque[tuple[Future[list[Mapping[str, float]]], int]]()
        self._losses = dict.fromkeys((_LOSS, _ITEMS), 0.0)  # sums of this node's, in this round
        self._group: Collectives = world.collectives  # the ranks of the means
        self._ranks: tuple[int, ...] = ()  # of a node that is alone
        self._node_samples = 0.0
        if job.sync:  # made here, since all ranks make it together
            self._node = world.node_collectives
        self._message = StepMessage()  # of this step
        self._error: Exception | None = None  # of this rank in this step
        self._failed = False  # this step, on any rank
        self._states = random_states(world.device)  # before this step
        self.measured: dict[str, float] = {}  # by this rank in the step before, for all to know
        self.by_rank: dict[str, Any] = {}  # what all ranks have measured, by rank
        self.round_loss: float | None = None  # the mean over all nodes, where a round counts
        self.means: GlobalMeans  # of this step, over all ranks or over the node
        self.flags: Mapping[str, float] = {}
        """Sums over all ranks that count after this step, alike on all; 0 of what is not known."""

    @property
    def delay(self) -> int:
        """The most steps from a flag to the step after which it counts."""
        sync = self._job.sync
        return (sync.max_staleness + 1) * sync.every if self._alone and sync else 1

    @contextmanager
    def computing(self, step: int) -> Iterator[None]:
        """Return the context of forward and backward passes. Collective.

        It keeps an exception until all ranks know of it, unless they know it already, or it comes
        later than the message that tells of it: of all ranks as well, or of a hook after backward.
        In a step of the node alone, one is raised at once, which ends the job for all.
        """
        optimizer, world = self._job.optimizer, self._world
        schedule, number = optimizer.schedule, optimizer.accumulation.steps
        self._alone = schedule.alone(number)
        self._ends_round = self._alone and schedule.exchange_due(number)
        self._message, self.round_loss = optimizer.accumulation.message, None
        if self._alone:
            nodes = world.topology.nodes
            self._group, self._ranks = self._node, tuple(next(n for n in nodes if world.rank in n))
            self.losses.put(self._message, self._ranks)
            self._message.put("node samples", float(self._job.data.own_samples(step)))
            yield
            return
        self._group, self._ranks = world.collectives, ()
        self._message.put("failed", lambda: float(self._error is not None))
        for name in self._own_flags():
            self._message.put(name, partial(self._own_flag, name))
        for name, value in self.measured.items():
            self._message.put(name, value, "max")
        self.losses.put(self._message)
        self._states = random_states(world.device)
        try:
            yield
        except (AgreedError, RemoteRankError):
            raise
        except Exception as error:
            if self._message.sent:
                raise
            self._error = error
            self._finish_failed(error)

    def _own_flags(self) -> dict[str, float]:
        """Return what this rank asks for; sums over all ranks count after the step. Local."""
        return {
            **self._job.requests.local_flags(self.delay),
            **self._job.checkpoints.local_flags(),
        }

    def _own_flag(self, name: str) -> float:
        return self._own_flags()[name]

    def _averaged_over(self) -> WorldCollectives:
        """Return the ranks that the current step is averaged over, for more than gradients."""
        whole = self._job.optimizer.group.size == self._world.size
        return self._world.collectives if whole else self._world.node_collectives

    def _finish_failed(self, error: Exception) -> None:
        """Take part in the rest of the step. Collective.

        If that takes long, the error is printed, since a rank that hangs may be the reason.
        """
        timer = threading.Timer(_PATIENCE_S, traceback.print_exception, [error])
        timer.daemon = True
        timer.start()
        try:
            self.counts.finish_interrupted()
            self._job.optimizer.accumulation.finish_interrupted()
        except Exception:
            raise error from None  # communication has failed, too
        finally:
            timer.cancel()

    def before_update(self, step: int) -> None:
        """Wait for the gradients, means and flags. Collective in the ranks of the step.

        Unless such steps are skipped, raises TrainingStoppedError for a loss that is not finite; in
        a step of the node alone, the exchange raises.
        """
        where, world = f"in step {step}", self._world
        self.counts.end_step()
        self._job.optimizer.synchronize()
        sums = self._message.read()
        self.flags = {name: sums.get(name, 0.0) for name in self._own_flags()}
        names = () if self._alone else self.measured
        self.by_rank = {name: self._message.by_rank(name) for name in names}
        self._failed = bool(sums.get("failed"))
        if self._failed:
            return
        self.means = self.losses.take(self._message, self._group, where, self._ranks)
        if self._alone:
            self._node_samples = sums["node samples"]
        if self.means.nonfinite and self._raises_non_finite:
            reason = f"{where}, the loss is {self.means.nonfinite}"
            if not self._alone:
                raise TrainingStoppedError(reason, world.rank)
            self._job.optimizer.refuse_step(reason)
        if not self._alone:
            self._job.balancing.after_reduction(step)

    def end_if_failed(self, step: int) -> None:
        """If a rank has failed, save, then raise the exception on the first one. Collective then.

        The random generators are as they were before the step. The other ranks raise a
        RemoteRankError.
        """
        if not self._failed:
            return
        world = self._world
        failed = [r for r, error in enumerate(world.gather(self._error is not None)) if error]
        if world.master and len(failed) > 1:
            text = f"mntrain: step {step} failed on {naming('rank', failed)}: the report is of one"
            print(text, file=sys.stderr)
        set_random_states(self._states, world.device)
        if why := self._save():
            self._job.reporter.warn(str(why))
        if self._error is not None and world.rank == failed[0]:
            raise self._error
        while True:
            world.barrier()  # which the failed rank does not reach

    def items(self, step: int) -> int:
        """Return the items of a step, tokens or samples, over all ranks. Local.

        In a step of the node alone, its own, in proportion to the samples of all nodes.
        """
        if not self._alone:
            return self.means.count
        whole, node = self._job.data.batch_size(step), self._node_samples
        return round(self.means.count * whole / node) if node else 0

    def after_update(self, step: int) -> None:
        """Send what all ranks need of a round that ends, and let that of an earlier one count.

        Collective at the end of a round; waits for a round only `max_staleness` later.
        """
        sync, saves, means = self._job.sync, self._job.checkpoints, self.means
        if sync is None or not self._alone:
            return
        self._losses[_LOSS] += means.loss * means.count if means.count else 0.0
        self._losses[_ITEMS] += means.count
        if not self._ends_round:
            return
        own = {**self._own_flags(), **self.measured, **self._losses}
        self._losses = dict.fromkeys(self._losses, 0.0)
        self._rounds.append((self._world.gather_later(own), saves.progress))
        if len(self._rounds) > sync.max_staleness:
            sent, progress = self._rounds.popleft()
            self._take_round(sent.wait())
            if progress != saves.progress:  # of another save
                self.flags = {**self.flags, **dict.fromkeys(saves.local_flags(), 0.0)}
        if self._waits:
            self._job.balancing.compare(step)

    def _take_round(self, ranks: list[Mapping[str, float]]) -> None:
        """Let what ranks have sent after a round count. Local."""
        sums = _sums(ranks)
        items, loss = sums.pop(_ITEMS), sums.pop(_LOSS)
        self.round_loss = loss / items if items else None
        self.flags = {name: sums[name] for name in self._own_flags()}
        self.by_rank = {
            name: {str(rank): own[name] for rank, own in enumerate(ranks)}
            for name in PER_RANK
            if name in ranks[0]
        }

    @property
    def _waits(self) -> bool:
        """Whether all ranks wait for each other at the end of this step's round."""
        return self._ends_round and self._job.optimizer.schedule.waits

    def meet_if_needed(self, step: int) -> None:
        """Let the flags count that ranks have now, where all need each other. Collective then.

        They do after a step at which an evaluation or a save follows, or the job ends. Only steps
        of a node alone leave flags of others unknown.
        """
        job, flags = self._job, self.flags
        needed = (
            step == job.last_step
            or job.evaluates(step)
            or job.timeline.meets_after(step)
            or any(flags[name] for name in REQUESTS)
            or job.checkpoints.acts(step, flags)
        )
        if needed and self._alone and not self._waits:
            for sent, _ in self._rounds:
                sent.wait()
            self._rounds.clear()
            self.flags = _sums(self._world.gather(self._own_flags()))


def _sums(by_rank: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: math.fsum(own[name] for own in by_rank) for name in by_rank[0]}
