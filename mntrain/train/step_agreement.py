"""The agreement of the ranks of a job on a step.

The means, flags and failures of a step travel in the `StepMessage` that ends the reduction of its
gradients; where these are averaged over a node, in another one over all ranks. Steps in which nodes
do not wait for each other (`zero.exchange.exchange`) have the means of their node. Their flags,
requests to stop and to save, are gathered from all ranks at the end of each round of steps, and
count after the same step on all of them: with rounds of 2 steps and max_staleness 1,

    step            1   2   3   4   5   6
    round 0 ends        sent    counts
    round 1 ends                sent    counts
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mntrain.comm.engine import Future
from mntrain.errors import TrainingStoppedError
from mntrain.train.failed_step import FailedStep
from mntrain.train.job import TrainingJob
from mntrain.train.step_means import GlobalMeans, StepMeans
from mntrain.world import World
from zero.collectives import Collectives
from zero.norms import NonFiniteReplicaError
from zero.step_message import StepMessage

Flags = Mapping[str, Callable[[], float]]  # of this rank, under the same names on all


class StepAgreement:
    """The means, flags and failures that the ranks of a job establish together in each step.

    All ranks call `computing`, `before_update`, `end_if_failed` and `after_update`, in this order,
    and then `meet`, where they need each other.

    Construction is collective. `flags` are those of this rank; `save` saves the last completed
    step.
    """

    def __init__(
        self,
        world: World,
        job: TrainingJob,
        means: StepMeans,
        flags: Flags,
        *,
        failed_step: FailedStep,
        save: Callable[[], None],
    ) -> None:
        self._world, self._job, self._accumulator = world, job, means
        self._ask, self._failed_step, self._save = flags, failed_step, save
        skips = job.config.optim.non_finite == "skip" or job.precision.loss_scale == "dynamic"
        self._raises_non_finite = not skips
        self._alone = self._ends_round = False  # this step; alone, its node waits for no other
        # Flags of all ranks on their way, and `RunSaver.progress` when they were sent.
        self._rounds = deque[tuple[Future[list[Mapping[str, float]]], int]]()
        self._group: Collectives = world.collectives  # the ranks of the means
        self._ranks: tuple[int, ...] = ()  # of a node that is alone
        self._node_samples = 0.0
        if job.sync and job.sync.max_staleness:  # made here, since all ranks make it together
            self._node = world.node_collectives
        self._message = StepMessage()  # of this step
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

        It keeps an exception until all ranks know of it. In a step without a wait, one is raised at
        once, which ends the job for all.
        """
        optimizer, world = self._job.optimizer, self._world
        schedule, number = optimizer.schedule, optimizer.accumulation.steps
        self._alone = schedule.independent(number)
        self._ends_round = self._alone and schedule.exchange_due(number)
        carried = self._alone or optimizer.group.size == world.size
        self._message = optimizer.accumulation.message if carried else StepMessage()
        if self._alone:
            nodes = world.topology.nodes
            self._group, self._ranks = self._node, tuple(next(n for n in nodes if world.rank in n))
            self._accumulator.put(self._message, self._ranks)
            self._message.put("node samples", float(self._job.data.own_samples(step)))
            yield
            return
        self._group, self._ranks = world.collectives, ()
        self._message.put("failed", lambda: self._failed_step.flag)
        for name, ask in self._ask.items():
            self._message.put(name, ask)
        self._accumulator.put(self._message)
        self._failed_step.begin_step()
        with self._failed_step.caught(self._message):
            yield

    def before_update(self, step: int) -> None:
        """Establish the means and flags. Collective; in a step without a wait, in the node.

        Unless such steps are skipped, raises for a loss that is not finite: TrainingStoppedError,
        or NonFiniteReplicaError on the ranks of the node.
        """
        where, world = f"in step {step}", self._world
        if not self._message.sent:  # under a sync schedule; all ranks end and save together
            self._message.send(world.collectives)
        sums = self._message.read()
        self.flags = {name: sums.get(name, 0.0) for name in ("failed", *self._ask)}
        if self.flags["failed"]:
            return
        self.means = self._accumulator.take(self._message, self._group, where, self._ranks)
        if self._alone:
            self._node_samples = sums["node samples"]
        if self.means.nonfinite and self._raises_non_finite:
            reason = f"{where}, the loss is {self.means.nonfinite}"
            raise (
                NonFiniteReplicaError(reason)
                if self._alone
                else TrainingStoppedError(reason, world.rank)
            )
        if not self._alone:
            self._job.balancing.after_reduction(step)

    def end_if_failed(self, step: int) -> None:
        """Raise what the step has raised on a rank, when the run is saved. Collective if one has.

        It is saved as it was before the step.
        """
        if self.flags["failed"]:
            self._failed_step.end_job(step, self._save)

    def items(self, step: int) -> int:
        """Return the items of a step, tokens or samples, over all ranks. Local.

        In a step without a wait, those of the node, in proportion to the samples of all nodes.
        """
        if not self._alone:
            return self.means.count
        whole, node = self._job.data.batch_size(step), self._node_samples
        return round(self.means.count * whole / node) if node else 0

    def after_update(self) -> None:
        """Send the flags of a round that ends, and let those of an earlier one count.

        Collective at the end of a round; waits for a round only `max_staleness` later.
        """
        sync = self._job.sync
        if sync is None or not self._ends_round:
            return
        gathered = self._world.gather_later(self._own_flags())
        self._rounds.append((gathered, self._job.checkpointing.progress))
        if len(self._rounds) > sync.max_staleness:
            sent, saves = self._rounds.popleft()
            self.flags = _sums(sent.wait())
            if saves != self._job.checkpointing.progress:  # of another save
                self.flags |= dict.fromkeys(self._job.checkpointing.local_flags(), 0.0)

    def meet(self) -> None:
        """Let the flags count that ranks have now, after a step without a wait. Collective."""
        if self._alone:
            for sent, _ in self._rounds:
                sent.wait()
            self._rounds.clear()
            self.flags = _sums(self._world.gather(self._own_flags()))

    def _own_flags(self) -> Mapping[str, float]:
        return {name: float(ask()) for name, ask in self._ask.items()}


def _sums(by_rank: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: math.fsum(own[name] for own in by_rank) for name in by_rank[0]}
