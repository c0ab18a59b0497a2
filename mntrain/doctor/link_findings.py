"""Judgement of the links between nodes."""

from collections.abc import Sequence
from operator import itemgetter
from statistics import median

from mntrain.checks.finding import Finding, passed, worst
from mntrain.comm.links import LinkSpeed

_SLOW = 0.5  # of the fastest direction's rate
_FAR_BELOW, _BELOW = 0.5, 0.7  # of the expected rate
_LOST, _LEAST_LOST = 0.005, 2  # of the segments of small messages, which no queue drops

# One direction of a pair of ranks: MB/s, latency in us, sender, receiver.
_Way = tuple[float, float, int, int]
_rate = itemgetter(0)


def slowest_node(links: Sequence[LinkSpeed]) -> int | None:
    """Return the leader that sends or receives slowest by the median; None for fewer than three."""
    sides = _sides(_ways(links))
    if len({rank for rank, _ in sides}) < 3:
        return None
    return min(sides, key=lambda side: sides[side])[0]


def judge(
    links: Sequence[LinkSpeed], hosts: Sequence[str], expected: tuple[str, float] | None = None
) -> Finding:
    """Name the slowest direction between nodes, and what is wrong with the links. Pure.

    `hosts` is by rank. `expected` is a rate in words and in MB/s.
    """
    if not links:
        return passed("there is one node")
    ways = _ways(links)
    text = f"the slowest of {len(ways)} directions is {_words(min(ways, key=_rate), hosts)}"
    found = [
        *(_below_expected(ways, hosts, *expected) if expected else []),
        *_slower_than_others(links, ways, hosts),
        *_losses(links, hosts),
    ]
    texts = "; ".join([text, *(problem.text for problem in found)])
    return Finding(worst(found), texts, "; ".join(dict.fromkeys(it.fix for it in found)))


def _ways(links: Sequence[LinkSpeed]) -> list[_Way]:
    """Return both directions of each pair."""
    there = [(x.mb_per_s_there, x.latency_us, x.one, x.other) for x in links]
    return there + [(x.mb_per_s_back, x.latency_us, x.other, x.one) for x in links]


def _words(way: _Way, hosts: Sequence[str]) -> str:
    mb_per_s, latency_us, sender, receiver = way
    rate = f"{mb_per_s:.0f}" if mb_per_s >= 10 else f"{mb_per_s:.2g}"
    return f"from {hosts[sender]} to {hosts[receiver]}: {latency_us:.0f} us, {rate} MB/s"


def _sides(ways: Sequence[_Way]) -> dict[tuple[int, str], float]:
    """Return the median rate of what each rank sends and of what it receives."""
    speeds: dict[tuple[int, str], list[float]] = {}
    for mb_per_s, _, sender, receiver in ways:
        speeds.setdefault((sender, "sends"), []).append(mb_per_s)
        speeds.setdefault((receiver, "receives"), []).append(mb_per_s)
    return {side: median(found) for side, found in speeds.items()}


def _below_expected(
    ways: Sequence[_Way], hosts: Sequence[str], words: str, rate: float
) -> list[Finding]:
    slowest = min(ways, key=_rate)
    share = slowest[0] / rate
    if share >= _BELOW:
        return []
    count = sum(mb_per_s < _BELOW * rate for mb_per_s, *_ in ways)
    text = (
        f"that is {100 * share:.2g} % of the expected {words} ({rate:.4g} MB/s), and {count} of "
        f"{len(ways)} directions {'is' if count == 1 else 'are'} below {100 * _BELOW:.0f} %"
    )
    return [Finding("fail" if share < _FAR_BELOW else "warn", text, _check_way(slowest, hosts))]


def _slower_than_others(
    links: Sequence[LinkSpeed], ways: Sequence[_Way], hosts: Sequence[str]
) -> list[Finding]:
    """Compare each direction with the fastest; of two nodes, the two directions."""
    slowest, fastest = min(ways, key=_rate), max(ways, key=_rate)
    limit = _SLOW * fastest[0]
    if slowest[0] >= limit:
        return []
    text, fix = f"the fastest is {_words(fastest, hosts)}", _check_way(slowest, hosts)
    node = slowest_node(links)
    verbs = [verb for (rank, verb), rate in _sides(ways).items() if rank == node and rate < limit]
    if node is not None and verbs:
        name = hosts[node]
        text = f"the slowest node is {name}, by what it {' and '.join(verbs)}; {text}"
        fix = f"leave {name} out of the job (srun --exclude={name}), or have its network checked"
    return [Finding("warn", text, fix)]


def _check_way(way: _Way, hosts: Sequence[str]) -> str:
    return (
        f"have the way from {hosts[way[2]]} to {hosts[way[3]]} checked (ethtool: speed and duplex "
        "of both interfaces; their errors and limits, and those of the switch), and the interface "
        "that MPI uses"
    )


def _losses(links: Sequence[LinkSpeed], hosts: Sequence[str]) -> list[Finding]:
    """Find the pair that loses the most small messages."""
    lossy = [x for x in links if x.resent >= max(_LEAST_LOST, _LOST * x.segments)]
    if not lossy:
        return []
    most = max(lossy, key=lambda link: link.resent / link.segments)
    one, other = hosts[most.one], hosts[most.other]
    text = (
        f"between {one} and {other} packets are lost: {most.resent} of {most.segments} TCP "
        "segments of small messages were sent again"
    )
    fix = f"have cables, ports and duplex of {one} and {other} checked (ethtool -S, ip -s link: "
    return [Finding("warn", text, f"{fix}errors and drops)")]
