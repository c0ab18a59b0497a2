"""Search for ranks that others wait for, by the collectives that each has begun: pure functions.

The watchdog of a running job asks them of statuses, and `autopsy` of recordings.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Wait(NamedTuple):
    """A collective that a rank has begun and waits for, or a message of which it has the number 0.

    No rank counts messages, so all of `ranks` are late.
    """

    stream: str
    number: int  # in its stream
    what: str  # such as "bucket 3: all_reduce of 1024 float32"
    site: str  # file:line of the call
    seconds: float
    root: int | None = None  # of a broadcast
    ranks: Collection[int] | None = None  # of the stream; None: all of the world
    message: bool = False  # between single ranks: `ranks` are those that are waited for
    may_end: bool = False  # whether it may end although these ranks call nothing more

    def __str__(self) -> str:
        """Return the collective in words."""
        number = "" if self.message else f"collective {self.number} of "
        return f"{self.what} ({number}{self.stream})"


def late_ranks(
    wait: Wait, begun: Mapping[int, Mapping[str, int]], absent: Collection[int] = ()
) -> set[int]:
    """Return the ranks that have not begun a collective for which a rank waits.

    `begun` has the number of collectives that each rank has begun, by stream; without one of a
    stream, a rank is none of its ranks. `absent` ranks begin nothing more. Of a broadcast, only the
    root counts, until it has begun.
    """
    late = {
        rank
        for rank, counts in begun.items()
        if counts.get(wait.stream, wait.number + 1) <= wait.number
    }
    late |= set(absent)
    if wait.ranks is not None:
        late &= set(wait.ranks)
    return {wait.root} if wait.root in late else late


def find_culprits(waits: Mapping[int, Collection[int]], unknown: Collection[int] = ()) -> set[int]:
    """Return the ranks for which others wait in the end, given those for which each one waits.

    A rank that waits itself is no culprit, unless all do; nor is one of which nothing is known,
    unless there is no other.
    """
    awaited = {rank for late in waits.values() for rank in late}
    return (awaited - waits.keys() - set(unknown)) or (awaited - waits.keys()) or awaited
