"""A question of a monitor to all ranks, why something takes so long, and their answers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mntrain.watchdog.diagnosis import UNCONNECTED, Evidence
from mntrain.watchdog.rank_status import RankStatus, process_state

ANSWER_S = 3.0  # for the ranks to answer
_SOON_S = 1.5  # for their nodes to acknowledge the question, which takes no process


@dataclass(frozen=True)
class Member:
    """A rank's process, as all ranks know it from the start."""

    host: str  # by name, which several may have
    host_key: int  # of its memory, the same only for ranks that share it
    pid: int
    pid_namespace: str

    def sees(self, other: "Member") -> bool:
        """Return whether the other one's process has the same number here."""
        return (self.host_key, self.pid_namespace) == (other.host_key, other.pid_namespace)


@dataclass
class Inquiry:
    """One question. `ends`: the job ends with the answers, by exit code `code`.

    `reason` is empty if it is asked for the time that ranks have waited.
    """

    ends: bool
    reason: str
    code: int
    asked: set[int]
    since: float  # on the monotonic clock
    statuses: dict[int, RankStatus] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)  # whose nodes have acknowledged it soon

    def over(self, now: float) -> bool:
        """Return whether all have answered, or the time is over."""
        return self.asked <= self.statuses.keys() or now > self.since + ANSWER_S

    def note_acknowledged(self, ranks: Collection[int], now: float) -> None:
        """Note the ranks whose nodes have acknowledged the question by now."""
        if now <= self.since + _SOON_S:
            self.reached |= set(ranks)

    def evidence(
        self,
        monitor: int,
        members: Sequence[Member],
        left: Collection[int],
        acknowledged: Collection[int],
    ) -> Evidence:
        """Return what `monitor` knows now.

        The nodes of the ranks `acknowledged` have acknowledged the question by now.
        """
        hosts, silent = [member.host for member in members], {}
        for rank, member in enumerate(members):
            if rank in self.statuses or (rank in left and rank not in self.asked):
                continue
            if members[monitor].sees(member):
                silent[rank] = process_state(member.pid)
            elif rank in self.asked and rank not in acknowledged:
                silent[rank] = "nor does its node: the link to it may be down, or the node lost"
            elif rank in self.asked and rank not in self.reached:
                silent[rank] = "its node does only now: the link to it was down, or is slow"
            elif rank in self.asked:
                silent[rank] = "its node does, so its process is stopped, or held in C code"
            else:
                silent[rank] = UNCONNECTED
        return Evidence(len(members), self.statuses, hosts, left, silent)
