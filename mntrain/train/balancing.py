"""Speeds of the ranks while a job trains: revisions of their shares, and ranks that are slow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from mntrain.balance.cadence import Cadence
from mntrain.balance.own_pace import INTERVAL, BatchNumber, OwnPace, Pace
from mntrain.balance.shares import Shares
from mntrain.metrics.registry import StepTimer
from mntrain.metrics.report import Reporter
from mntrain.train.job_data import JobData
from mntrain.world import World

SLOW, RECOVERED = 1.5, 1.25  # times the median of the other ranks
LASTING = 2  # intervals for which a rank must be slow, or no longer slow, to be named


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow from step `since` to `until`; None: it still is."""

    rank: int
    since: int
    ratio: float  # its seconds per sample, in medians of the other ranks, when it was named
    phase: str  # with the largest part of the difference
    until: int | None = None


class Stragglers:
    """The slow ranks of a job of `size` ranks. Every rank holds an equal one; local."""

    def __init__(self, size: int) -> None:
        self.found: list[Straggler] = []  # by the step at which they were named
        self._intervals = [0] * size  # for which a rank's state has contradicted what was said

    def update(self, step: int, by_rank: Sequence[Pace]) -> list[Straggler]:
        """Take the ranks' paces of an interval that ends at a step; return what has changed.

        A rank without samples in the interval is passed over.
        """
        changed = []
        for rank, pace in enumerate(by_rank):
            others = [other for other in by_rank if other is not pace and other.samples]
            if not pace.samples or not others:
                continue
            usual = median(other.seconds / other.samples for other in others)
            ratio = pace.seconds / pace.samples / usual if usual > 0 else 1.0
            named = next((s for s in self.found if s.rank == rank and s.until is None), None)
            contradicts = ratio < RECOVERED if named else ratio > SLOW
            self._intervals[rank] = self._intervals[rank] + 1 if contradicts else 0
            if self._intervals[rank] < LASTING:
                continue
            self._intervals[rank] = 0
            began = step - LASTING * INTERVAL
            if named:
                latest = replace(named, until=began)
                self.found[self.found.index(named)] = latest
            else:
                latest = Straggler(rank, began + 1, ratio, _slowest_phase(rank, by_rank))
                self.found.append(latest)
            changed.append(latest)
        return changed


def _slowest_phase(rank: int, by_rank: Sequence[Pace]) -> str:
    per_sample = [
        {phase: seconds / pace.samples for phase, seconds in (pace.phases or {}).items()}
        for pace in by_rank
        if pace.samples
    ]
    own = {
        phase: seconds / by_rank[rank].samples
        for phase, seconds in (by_rank[rank].phases or {}).items()
    }
    usual = {phase: median(other.get(phase, 0.0) for other in per_sample) for phase in own}
    return max(own, key=lambda phase: own[phase] - usual[phase])


class Balancing:
    """Collects the ranks' speeds every few steps, names slow ranks, and revises their shares.

    Speeds are those of `OwnPace`. Shares or a cadence are those of `data`, if they may
    change. `steps` are those of this job. With a cadence, `world.batch_counts` is set in each step.
    """

    def __init__(
        self,
        world: World,
        data: JobData,
        reporter: Reporter,
        steps: range,
    ) -> None:
        self._world, self._data, self._reporter = world, data, reporter
        self._end_step = steps.stop
        self._own = OwnPace(world.waits)
        self._shares: Shares | None = data.shares
        self._cadence: Cadence | None = data.cadence
        self._stragglers = Stragglers(world.size)
        self._compared = 0  # the latest step after which ranks may compare their speeds
        self._revisions: list[dict[str, Any]] = []
        if data.shares is not None and data.shares.planned:
            counts = data.shares.counts(data.full_batch)
            self._revisions.append({"step": steps.start, "samples": counts})

    @contextmanager
    def computing(self, step: int, timer: StepTimer) -> Iterator[None]:
        """Measure the loading and computing of a step. Local; does not wait for a device."""
        if self._cadence is not None:
            self._world.batch_counts = self._data.batch_counts(step)
        self._own.begin()
        yield
        phases, rest = timer.times(), "forward"
        host = {"data": phases["data"], "backward": phases["backward"]}
        if self._world.device.type == "cuda":  # computes behind its host
            host, rest = {"data": phases["data"]}, "forward and backward"
        self._own.end(self._data.own_samples(step), host, rest)

    def after_reduction(self, step: int) -> None:
        """Exchange speeds, if that is due after this step. Collective."""
        self._own.reduced()
        self._compared = step
        if self._world.size == 1 or step % INTERVAL:
            return
        plans = self._cadence or self._shares
        paces = self._world.gather(self._own.take(plans.drawn if plans else BatchNumber(0, 0)))
        for straggler in self._stragglers.update(step, paces):
            self._report(straggler)
        if self._shares is not None:
            self._revise(self._shares, paces)
        if self._cadence is not None:
            self._revise_cadence(self._cadence, paces)

    def slow_ranks(self, step: int) -> dict[str, float]:
        """Return the ratio of each rank that is slow, by "rank/phase": see `Straggler`. Local.

        None of them in steps in which ranks no longer compare their speeds.
        """
        if step > self._compared + INTERVAL:
            return {}
        slow = (straggler for straggler in self._stragglers.found if straggler.until is None)
        return {f"{one.rank}/{one.phase}": round(one.ratio, 2) for one in slow}

    def by_rank(self) -> list[dict[str, Any]]:
        """Return the samples of each rank in this job, and its own seconds. Collective."""
        self._own.settle()
        return self._world.gather({"samples": self._own.samples, "own_s": self._own.seconds})

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json: slow ranks, and the plans of shares. Local."""
        found = self._stragglers.found
        entries: dict[str, Any] = {"stragglers": [asdict(straggler) for straggler in found]}
        if self._shares is not None:
            entries["shares"] = self._revisions
        if self._cadence is not None:
            plans = [plan for plan in self._cadence.plans if self._begins(plan.first)]
            entries["cadence"] = [
                {
                    "step": plan.first + 1,
                    "anchor": plan.anchor,
                    "batch_counts": list(plan.counts),
                    "overhead": plan.overhead,
                }
                for plan in plans
            ]
        return entries

    def _begins(self, first: int) -> bool:
        """Return whether a step of this job is at or behind one that a plan begins with.

        Steps of plans are counted from 0. A plan may begin behind batches that were drawn ahead.
        """
        return first + 1 < self._end_step

    def _revise(self, shares: Shares, paces: Sequence[Pace]) -> None:
        samples = self._data.full_batch
        first = shares.revise(paces, samples)
        if first is None or not self._begins(first.batch):
            return
        counts = shares.counts(samples)
        self._revisions.append({"step": first.batch + 1, "samples": counts})
        self._reporter.note(
            f"balance: from step {first.batch + 1}, ranks have "
            f"{', '.join(map(str, counts))} of {samples} samples"
        )

    def _revise_cadence(self, cadence: Cadence, paces: Sequence[Pace]) -> None:
        plan = cadence.revise(paces)
        if plan is not None and self._begins(plan.first):
            self._reporter.note(
                f"balance: from step {plan.first + 1}, ranks have "
                f"{', '.join(map(str, plan.counts))} micro-batches of {cadence.micro_batch} "
                f"samples in a step; communication has taken {plan.overhead or 0:.1%} of computing"
            )

    def _report(self, straggler: Straggler) -> None:
        place = self._world.places[straggler.rank]
        name = f"rank {straggler.rank} on {place.host}"
        if straggler.until is not None:
            self._reporter.note(f"{name} is no longer slow after step {straggler.until}")
            return
        fix = ""
        if self._data.balances and not (self._shares or self._cadence):
            fix = "; --balance.mode throughput would give it a smaller part of each batch"
        self._reporter.warn(
            f"since step {straggler.since}, {name} takes {straggler.ratio:.1f} times as long for a "
            f"sample as the other ranks (median), mostly in {straggler.phase}{fix}"
        )
