"""The agreement of the ranks of a job on a step, and when it is known.

    EveryStep   the means, flags and failures of a step are reduced over all ranks before its update
    ByRound     those of a round of steps are gathered in the background, for nodes that do not wait
                for each other: known when they have arrived, decided on after a bounded delay

Flags, such as requests to stop and to save, count on all ranks after the same step. With rounds of
2 steps and max_staleness 1:

    step            1   2   3   4   5   6
    round 0 ends        sent    decided on
    round 1 ends                sent    decided on
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mntrain.comm.pending import Future
from mntrain.errors import TrainingStoppedError
from mntrain.run.checkpointing import Checkpointing
from mntrain.train.balancing import Balancing
from mntrain.train.consensus import GlobalMeans, LocalTotals, MeanAccumulator
from mntrain.train.failed_step import FailedStep
from mntrain.train.job import TrainingJob
from mntrain.train.step_records import SKIPPING_RANKS, KnownStep, TakenStep
from mntrain.world import World
from zero.norms import NonFiniteReplicaError
from zero.optimizer import ZeroOptimizer

LocalFlags = Callable[[], Mapping[str, float]]  # of this rank, under the same names on all


class StepAgreement(Protocol):
    """The agreement of a step. Methods are called in this order in each step, by all ranks."""

    flags: Mapping[str, float]
    """Sums over all ranks that count after this step, alike on all of them; 0 of what is not known.
    """
    delay: int
    """Steps, at most, from a flag to the step after which it counts."""

    def computing(self) -> AbstractContextManager[None]:
        """Return the context of forward and backward passes, some of which may fail."""

    def before_update(self, step: int) -> None:
        """Agree on the step's means, or note this rank's. Raises if the loss is not finite."""

    def end_if_failed(self, step: int) -> None:
        """Raise what the step has raised on a rank, if all ranks know of it."""

    def after_update(self, taken: TakenStep) -> list[KnownStep]:
        """Return the steps that have become known on this rank, in their order."""

    def settle(self) -> list[KnownStep]:
        """Make all steps known on all ranks, and return those that were not. Collective.

        Called after a step, the same on all ranks.
        """


class EveryStep:
    """Agreement in every step, for which all ranks wait.

    `raises_non_finite` states that a loss that is not finite ends training; `save` saves the last
    completed step.
    """

    delay = 1

    def __init__(
        self,
        world: World,
        means: MeanAccumulator,
        flags: LocalFlags,
        failed_step: FailedStep,
        balancing: Balancing,
        *,
        raises_non_finite: bool,
        save: Callable[[], None],
    ) -> None:
        self._world, self._accumulator, self._local_flags = world, means, flags
        self._failed_step, self._balancing = failed_step, balancing
        self._raises_non_finite, self._save = raises_non_finite, save
        self._means: GlobalMeans  # of this step
        self.flags: Mapping[str, float] = {}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context that keeps an exception until all ranks know of it. Collective."""
        self._failed_step.begin_step()
        with self._failed_step.caught():
            yield

    def before_update(self, step: int) -> None:
        """Reduce the means and flags over all ranks. Collective.

        Raises TrainingStoppedError if the loss is not finite, unless such steps are skipped.
        """
        local = {"failed": self._failed_step.flag, **self._local_flags()}
        # Under any sync schedule over all ranks, since they end and save together.
        self._means = self._accumulator.reduce(self._world.collectives, f"in step {step}", local)
        self.flags = self._means.values
        if self._means.nonfinite and self._raises_non_finite:
            reason = f"in step {step}, the loss is {self._means.nonfinite}"
            raise TrainingStoppedError(reason, self._world.rank)
        self._balancing.after_reduction(step)

    def end_if_failed(self, step: int) -> None:
        """Raise what the step has raised on a rank, when the run is saved. Collective if one has.

        It is saved as it was before the step.
        """
        if self.flags["failed"]:
            self._failed_step.end_job(step, self._save)

    def after_update(self, taken: TakenStep) -> list[KnownStep]:
        """Return the step."""
        return [(taken, self._means)]

    def settle(self) -> list[KnownStep]:
        """Return nothing: all steps are known."""
        return []


class _Gathered(NamedTuple):
    """The totals and flags that a rank sends of a round."""

    totals: list[LocalTotals]  # by step
    skipped: list[bool]
    flags: Mapping[str, float]


@dataclass
class _Round:
    """A round whose values are on their way."""

    taken: Sequence[TakenStep]
    gathered: Future[list[_Gathered]]
    saves: int  # `Checkpointing.progress` when it was sent
    known: bool = field(default=False)  # whether its steps were returned


class ByRound:
    """Agreement of nodes that do not wait for each other; `EveryStep` as long as they do.

    Rounds are those between two exchanges of the optimizer's schedule, `every` steps. A round is
    waited for after the last step of the round `max_staleness` later, as its exchange is, or by
    `settle`. Until then nothing here waits for another node. In such steps an exception and a loss
    that is not finite are raised on their rank at once, which ends the job for all.
    """

    def __init__(
        self,
        world: World,
        optimizer: ZeroOptimizer,
        means: MeanAccumulator,
        flags: LocalFlags,
        *,
        every_step: EveryStep,
        checkpointing: Checkpointing,
        every: int,
        max_staleness: int,
        raises_non_finite: bool,
    ) -> None:
        self._world, self._optimizer, self._accumulator = world, optimizer, means
        self._local_flags, self._every_step = flags, every_step
        self._checkpointing, self._max_staleness = checkpointing, max_staleness
        self._raises_non_finite = raises_non_finite
        self._totals: LocalTotals = {}  # of this step
        self._alone = self._ends_round = False  # this step
        self._open: list[tuple[TakenStep, LocalTotals]] = []  # of the round that has begun
        self._sent: deque[_Round] = deque()
        self.flags: Mapping[str, float] = {}
        self._longest_delay = (max_staleness + 1) * every
        self.delay = 1

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context, which does nothing in steps without a wait."""
        number, schedule = self._optimizer.steps_taken, self._optimizer.schedule
        self._alone = schedule.independent(number)
        self._ends_round = self._alone and schedule.exchange_due(number)
        self.delay = self._longest_delay if self._alone else 1
        if self._alone:
            yield
            return
        with self._every_step.computing():
            yield

    def before_update(self, step: int) -> None:
        """Note this rank's totals. Local; raises NonFiniteReplicaError for a loss, on this rank."""
        if not self._alone:
            self._every_step.before_update(step)
            return
        self._totals = self._accumulator.take()
        _, loss, _ = self._totals.get("loss", ("mean", 0.0, 0.0))
        if self._raises_non_finite and not math.isfinite(loss):
            rank = self._world.rank
            raise NonFiniteReplicaError(f"in step {step}, the loss is {loss} on rank {rank}")

    def end_if_failed(self, step: int) -> None:
        """Raise as `EveryStep` in synchronous steps; in others, a rank has raised by itself."""
        if not self._alone:
            self._every_step.end_if_failed(step)

    def after_update(self, taken: TakenStep) -> list[KnownStep]:
        """Return the steps of rounds that have arrived. At the end of a round, send and decide.

        Raises TrainingStoppedError, on all ranks, as `MeanAccumulator.combine`.
        """
        if not self._alone:
            self.flags = self._every_step.flags
            return self._every_step.after_update(taken)
        self.flags = dict.fromkeys(self._local_flags(), 0.0)
        self._open.append((taken, self._totals))
        if self._ends_round:
            self._send()
        known = self._arrived()
        if self._ends_round and len(self._sent) > self._max_staleness:
            known += self._decide()
        return known

    def settle(self) -> list[KnownStep]:
        """Send what the current round has so far, and wait for everything. Collective."""
        if self._open:
            self._send()
        known = []
        while self._sent:
            known += self._decide()
        return known

    def _send(self) -> None:
        """Start to gather the open steps, and the flags as they are now. Collective."""
        taken, totals = zip(*self._open, strict=True)
        skipped = [step.update.skipped for step in taken]
        own = _Gathered(list(totals), skipped, self._local_flags())
        gathered = self._world.gather_later(own)
        self._sent.append(_Round(taken, gathered, self._checkpointing.progress))
        self._open = []

    def _arrived(self) -> list[KnownStep]:
        """Return the steps of the rounds that have arrived in order, as far as they are. Local."""
        known: list[KnownStep] = []
        with suppress(TrainingStoppedError):  # all ranks raise it when they decide on the round
            for sent in self._sent:
                if not sent.gathered.done:
                    break
                known += self._known(sent)
        return known

    def _decide(self) -> list[KnownStep]:
        """Wait for the oldest round, let its flags count, and return its steps. Collective."""
        sent = self._sent.popleft()
        own_flags = [rank.flags for rank in sent.gathered.wait()]
        flags = {name: sum(own[name] for own in own_flags) for name in own_flags[0]}
        if sent.saves != self._checkpointing.progress:  # what it says of saves is no longer true
            flags |= dict.fromkeys(self._checkpointing.local_flags(), 0.0)
        self.flags = flags
        return self._known(sent)

    def _known(self, sent: _Round) -> list[KnownStep]:
        """Return a round's steps with their means; none, if they were returned before."""
        if sent.known:
            return []
        by_rank = sent.gathered.wait()
        known = []
        for index, taken in enumerate(sent.taken):
            skipped = sum(rank.skipped[index] for rank in by_rank)
            totals = [rank.totals[index] for rank in by_rank]
            where = f"in step {taken.step}"
            means = self._accumulator.combine(totals, {SKIPPING_RANKS: float(skipped)}, where)
            known.append((taken, means))
        sent.known = True
        return known


def make_agreement(
    world: World,
    job: TrainingJob,
    means: MeanAccumulator,
    flags: LocalFlags,
    *,
    failed_step: FailedStep,
    save: Callable[[], None],
) -> StepAgreement:
    """Return what the ranks of a job agree by. `save` saves the last completed step. Local."""
    config, sync = job.config, job.sync
    skips = config.optim.non_finite == "skip" or job.precision.loss_scale == "dynamic"
    every_step = EveryStep(
        world, means, flags, failed_step, job.balancing, raises_non_finite=not skips, save=save
    )
    if sync is None or not sync.max_staleness:
        return every_step
    return ByRound(
        world,
        job.optimizer,
        means,
        flags,
        every_step=every_step,
        checkpointing=job.checkpointing,
        every=sync.every,
        max_staleness=sync.max_staleness,
        raises_non_finite=not skips,
    )
