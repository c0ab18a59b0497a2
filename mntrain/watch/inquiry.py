"""A question of a monitor to all ranks, why something takes so long, and their answers."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mntrain.watch.diagnosis import Evidence
from mntrain.watch.rank_status import RankStatus, process_state

ANSWER_S = 3.0  # for the ranks to answer


@dataclass(frozen=True)
class Member:
    """A rank's process, as all ranks know it from the start."""

    host: str
    pid: int


@dataclass
class Inquiry:
    """One question. `ends`: the job ends with the answers, by exit code `code`.

    `reason` is empty if it is asked for the time that ranks have waited.
    """

    ends: bool
    reason: str
    code: int
    asked: set[int]
    since: float = field(default_factory=time.monotonic)
    statuses: dict[int, RankStatus] = field(default_factory=dict)

    def over(self, now: float) -> bool:
        """Return whether all have answered, or the time is over."""
        return self.asked <= self.statuses.keys() or now > self.since + ANSWER_S

    def evidence(self, monitor: int, members: Sequence[Member], left: Collection[int]) -> Evidence:
        """Return what `monitor` knows now."""
        hosts, silent = [member.host for member in members], {}
        for rank, member in enumerate(members):
            if rank in self.statuses or rank in left:
                continue
            if member.host == hosts[monitor]:
                silent[rank] = process_state(member.pid)
            elif rank in self.asked:
                silent[rank] = "its node does, so its process is stopped, or held in C code"
            else:
                silent[rank] = "there is no connection to it"
        return Evidence(len(members), self.statuses, hosts, left, silent)
