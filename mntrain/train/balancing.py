"""Speeds of the ranks while a job trains: revisions of their shares, and ranks that are slow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from mntrain.balance.cadence import Cadence
from mntrain.balance.own_pace import INTERVAL, BatchNumber, OwnPace, Pace
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
                latest = Straggler(rank, began + 1, ratio, _slowest_phase(pace, others))
                self.found.append(latest)
            changed.append(latest)
        return changed


def _slowest_phase(slow: Pace, others: Sequence[Pace]) -> str:
    def lost_s(phase: str) -> float:
        own, *usual = (
            (pace.phases or {}).get(phase, 0.0) / pace.samples for pace in (slow, *others)
        )
        return own - median(usual)

    return max(slow.phases or {}, key=lost_s)


class Balancing:
    """Collects the ranks' speeds every few steps, names slow ranks, and revises their parts.

    Speeds are those of `OwnPace`. Plans of parts are those of `data`, if they may change; those
    that begin after `last_step` are not reported. All ranks wait for each other `every` few steps.
    With a cadence, `world.batch_counts` is set in each step.
    """

    def __init__(
        self, world: World, data: JobData, reporter: Reporter, last_step: int, every: int
    ) -> None:
        self._world, self._data, self._reporter = world, data, reporter
        self._last_step, self._rarest = last_step, max(INTERVAL, every)
        self._own = OwnPace(world.waits)
        self._stragglers = Stragglers(world.size)
        # The latest step after which ranks could compare their speeds; None before the first.
        self._compared: int | None = None

    @contextmanager
    def computing(self, step: int, timer: StepTimer) -> Iterator[None]:
        """Measure the loading and computing of a step. Local; does not wait for a device."""
        if isinstance(self._data.plans, Cadence):
            self._world.batch_counts = self._data.batch_counts(step)
        self._own.begin()
        yield
        phases, rest = timer.times(), "forward"
        host = {"data": phases["data"], "backward": phases["backward"]}
        if self._world.device.type == "cuda":  # computes behind its host
            host, rest = {"data": phases["data"]}, "forward and backward"
        self._own.end(self._data.own_samples(step), host, rest)

    def after_reduction(self, step: int) -> None:
        """Note that all ranks have the result of this step, and `compare`. Collective."""
        self._own.reduced()
        self.compare(step)

    def compare(self, step: int) -> None:
        """Exchange speeds, if that is due after this step, which all ranks have taken. Collective.

        It is after each multiple of `INTERVAL` steps, or in the first call after one.
        """
        before = step - 1 if self._compared is None else self._compared
        self._compared = step
        if self._world.size == 1 or step // INTERVAL == before // INTERVAL:
            return
        plans = self._data.plans
        paces = self._world.gather(self._own.take(plans.drawn if plans else BatchNumber(0, 0)))
        for straggler in self._stragglers.update(step, paces):
            self._report(straggler)
        plan = plans.revise(paces) if plans else None
        if plans and plan and plan.first.batch < self._last_step:
            self._reporter.note(f"balance: from step {plan.first.batch + 1}, {plans.describe()}")

    def slow_ranks(self, step: int) -> dict[str, float]:
        """Return the ratio of each rank that is slow, by "rank/phase": see `Straggler`. Local.

        None of them in steps in which ranks no longer compare their speeds.
        """
        if self._compared is None or step > self._compared + self._rarest:
            return {}
        slow = (straggler for straggler in self._stragglers.found if straggler.until is None)
        return {f"{one.rank}/{one.phase}": round(one.ratio, 2) for one in slow}

    def by_rank(self) -> list[dict[str, Any]]:
        """Return the samples of each rank in this job, and its own seconds. Collective."""
        self._own.settle()
        return self._world.gather({"samples": self._own.samples, "own_s": self._own.seconds})

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json: slow ranks, and the plans of parts. Local."""
        found = self._stragglers.found
        entries: dict[str, Any] = {"stragglers": [asdict(straggler) for straggler in found]}
        if plans := self._data.plans:
            begun = (plan for plan in plans.plans if plan.first.batch < self._last_step)
            entries[plans.name] = [entry for plan in begun if (entry := plans.entry(plan))]
        return entries

    def _report(self, straggler: Straggler) -> None:
        place = self._world.places[straggler.rank]
        name = f"rank {straggler.rank} on {place.host}"
        if straggler.until is not None:
            self._reporter.note(f"{name} is no longer slow after step {straggler.until}")
            return
        fix = ""
        if not self._data.plans and not self._data.stream:
            fix = "; --balance.mode throughput would give it a smaller part of each batch"
        self._reporter.warn(
            f"since step {straggler.since}, {name} takes {straggler.ratio:.1f} times as long for a "
            f"sample as the other ranks (median), mostly in {straggler.phase}{fix}"
        )
