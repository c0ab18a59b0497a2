"""Detection of links between nodes that become slow while a job trains."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from mntrain.data.shares import INTERVAL, SMOOTHING, Pace
from mntrain.train.stragglers import LASTING, RECOVERED, SLOW, Straggler

COMMUNICATION = "communication"  # the phase
NOTICEABLE = 0.1  # of a step's own time, by which communication must take longer than before


class LinkWatch:
    """The time of communication in a job, compared with what it was before. Local.

    Every rank holds an equal one. `links` are the bytes/s of each node's link at the start, and
    `leaders` the first rank of each node.
    """

    def __init__(self, links: Sequence[float], leaders: Sequence[int]) -> None:
        self._links, self._leaders = links, leaders
        self.found: list[Straggler] = []  # leaders of nodes whose links became slow
        self.ratio = 1.0  # of communication in the latest interval to what was usual before
        self.since: int | None = None  # the step from which on it is slow; None: it is not
        self._usual_s: float | None = None
        self._intervals = 0  # which have contradicted what was said

    def update(self, step: int, paces: Sequence[Pace]) -> Literal["slow", "recovered"] | None:
        """Take the paces of all ranks over an interval that ends at a step; return what is new.

        None if nothing is, and for an interval without communication.
        """
        communication_s = communication_of(paces)
        if communication_s is None:
            return None
        if self._usual_s is None:
            self._usual_s = communication_s
        usual_s = self._usual_s
        self.ratio = communication_s / usual_s if usual_s > 0 else 1.0
        own_s = max(pace.seconds / len(pace.waits) for pace in paces)
        noticeable = communication_s - usual_s > NOTICEABLE * own_s
        if self.since is not None:
            contradicts = self.ratio < RECOVERED or not noticeable
        else:
            contradicts = self.ratio > SLOW and noticeable
            if not contradicts:
                self._usual_s = SMOOTHING * communication_s + (1 - SMOOTHING) * usual_s
        self._intervals = self._intervals + 1 if contradicts else 0
        if self._intervals < LASTING:
            return None
        self._intervals = 0
        began = step - LASTING * INTERVAL
        if self.since is None:
            self.since = began + 1
            return "slow"
        self.since = None
        open_ones = [(i, one) for i, one in enumerate(self.found) if one.until is None]
        for index, one in open_ones:
            self.found[index] = replace(one, until=began)
        return "recovered"

    def compare(self, links: Sequence[float]) -> dict[int, float]:
        """Note the nodes whose links are slower than at the start; return their bytes/s now."""
        slow = {
            node: now
            for node, (before, now) in enumerate(zip(self._links, links, strict=True))
            if now * SLOW < before
        }
        for node, now in slow.items():
            ratio = self._links[node] / now
            since = self.since or 0
            self.found.append(Straggler(self._leaders[node], since, ratio, COMMUNICATION))
        return slow

    def before(self, node: int) -> float:
        """Return the bytes/s of a node's link at the start."""
        return self._links[node]


def communication_of(paces: Sequence[Pace]) -> float | None:
    """Return the seconds of communication in a step: the median over the steps of an interval.

    In each, they are what the rank that has computed longest waits for. None without steps. Pure.
    """
    by_step = list(zip(*(pace.waits for pace in paces), strict=False))
    return median(map(min, by_step)) if by_step else None
