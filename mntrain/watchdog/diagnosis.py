"""Diagnosis of a hang from the statuses of all ranks: pure functions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mntrain.checks.finding import alike
from mntrain.watchdog.rank_status import EXIT, RankStatus, StalledWait

UNCONNECTED = "there is no connection to it"


@dataclass(frozen=True)
class Evidence:
    """All that a monitor knows when it looks at the ranks."""

    size: int
    statuses: Mapping[int, RankStatus]  # of the ranks that have answered
    hosts: Sequence[str]  # by rank
    left: Collection[int]  # ranks that have left the world or ended their script
    silent: Mapping[int, str]  # ranks without an answer, and why

    @property
    def networks(self) -> list[str]:
        """Sentences on nodes that do not answer others, with the fix, each once."""
        found = (self.statuses[rank].network for rank in sorted(self.statuses))
        return list(dict.fromkeys(filter(None, found)))

    def name(self, ranks: Collection[int]) -> str:
        """Return ranks with their hosts in words."""
        return name(ranks, self.hosts)


def name(ranks: Collection[int], hosts: Sequence[str]) -> str:
    """Return ranks with their hosts: "rank 2 on node1", "ranks 0, 3 on a, 1 on b"."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank], []).append(rank)
    parts = [f"{', '.join(map(str, group))} on {host}" for host, group in by_host.items()]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def awaited_by(wait: StalledWait, evidence: Evidence) -> set[int]:
    """Return the ranks that have not begun the collective for which a rank waits.

    Of a broadcast, only the root counts, until it has begun. At the exit, those are waited for that
    have left the world and run on.
    """
    awaited = set(evidence.silent) | (set() if wait.stream == EXIT else set(evidence.left))
    for rank, status in evidence.statuses.items():
        if status.begun.get(wait.stream, wait.number + 1) <= wait.number:
            awaited.add(rank)
    if wait.ranks is not None:
        awaited &= set(wait.ranks)
    return {wait.awaited_rank} if wait.awaited_rank in awaited else awaited


def find_culprits(evidence: Evidence) -> tuple[set[int], set[int]]:
    """Return the ranks that wait for others, and those that these wait for in the end.

    A rank that is waited for and waits itself is no culprit, unless all do; nor is one of which
    nothing is known, unless there is no other. The second set is empty where every rank has begun
    what it waits for: then messages do not arrive. A rank at the exit counts as one that waits only
    if no other rank waits.
    """
    waits = {r: s.wait for r, s in evidence.statuses.items() if s.wait is not None}
    in_calls = {rank: wait for rank, wait in waits.items() if wait.stream != EXIT}
    waits = in_calls or waits
    awaited: set[int] = set()
    for wait in waits.values():
        awaited |= awaited_by(wait, evidence)
    unknown = {rank for rank, why in evidence.silent.items() if why == UNCONNECTED}
    return set(waits), (awaited - set(waits) - unknown) or (awaited - set(waits)) or awaited


def at_exit(evidence: Evidence) -> bool:
    """Return whether the ranks that wait are at the exit."""
    waits = [evidence.statuses[rank].wait for rank in find_culprits(evidence)[0]]
    return any(wait and wait.stream == EXIT for wait in waits)


def headline(evidence: Evidence) -> str:
    """Return who waits for whom in one line."""
    waiting, culprits = find_culprits(evidence)
    waits = [status.wait for rank, status in evidence.statuses.items() if rank in waiting]
    seconds = max((wait.seconds for wait in waits if wait), default=0.0)
    have = (
        f"{evidence.name(waiting)} {'have' if len(waiting) > 1 else 'has'} waited {seconds:.0f} s"
    )
    if at_exit(evidence):
        have += f" at the exit for {evidence.name(culprits)}, which "
        have += f"{'have' if len(culprits) > 1 else 'has'} not reached the end of the job"
    elif culprits:
        have += f" for {evidence.name(culprits)}"
    else:
        have += " in what all ranks have begun: messages between them do not arrive"
    return "; ".join([have, *evidence.networks[:1]])


def details(evidence: Evidence) -> str:
    """Return in what ranks wait, and where those are that they wait for, in several lines."""
    waiting, culprits = find_culprits(evidence)
    waits = {rank: evidence.statuses[rank].wait for rank in waiting}
    words = {rank: _words_of(wait) for rank, wait in waits.items() if wait and wait.stream != EXIT}
    lines = [f"  {evidence.name(group)}: {text}" for text, group in alike(words)]
    for rank in sorted(culprits - waiting):
        lines += [f"  {line}" for line in _culprit(rank, evidence)]
    lines += [f"  {text}" for text in evidence.networks[1:]]
    return "\n".join(lines)


def stacks(evidence: Evidence) -> str:
    """Return the stacks of the training threads of ranks that wait, equal ones once."""
    waiting, _ = find_culprits(evidence)
    texts = {rank: evidence.statuses[rank].stack.rstrip() for rank in waiting}
    parts = [f"stack of {evidence.name(group)}:\n{text}" for text, group in alike(texts)]
    return "\n".join(parts)


def _culprit(rank: int, evidence: Evidence) -> list[str]:
    name = evidence.name([rank])
    if rank in evidence.left and not at_exit(evidence):
        return [f"{name}: has left the world, or ended its script"]
    if rank in evidence.silent:
        why = "" if evidence.networks else f": {evidence.silent[rank]}"  # an answer may be lost
        return [f"{name}: does not answer{why}"]
    status = evidence.statuses[rank]
    held = ", in a debugger" if status.debugged else ""
    lines = [f"{name} (process {status.pid}): in no collective{held}, at {status.place}"]
    return lines + [f"  {line}" for line in status.stack.rstrip().splitlines()]


def _words_of(wait: StalledWait) -> str:
    called = f", called at {wait.site}" if wait.site else ""
    return f"in {wait.what} (collective {wait.number} of {wait.stream}){called}"
