"""The ways of messages between ranks and the monitors, on which two ranks of a host pass them on.

    rank 0 --- the first rank of a host ----
      |                 |                   other ranks of the host
    rank 1 --- the second rank of a host ---

So rank 0 has a connection to one rank of each other host, and messages arrive where one of the two
is stopped. A message takes every way, and counts once: {"from": R, "number": N, "to": T, "message":
M}. Besides, neighbours tell each other whom they reach, {"reaches": [...]}: monitors get ranks, and
others the monitors; and that they leave on purpose, {"leaves": true}.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

from mntrain.watchdog.side_channel import Address, Message, SideChannel

MONITORS = (0, 1)
_TELL_S = 1.0  # between what monitors tell each other, which is long in large jobs
_NO_WAY = "the ranks that pass messages on have lost it"


class Routes:
    """The neighbours of every rank. `hosts` has a key of each rank's host."""

    def __init__(self, hosts: Sequence[int]) -> None:
        self._hosts = hosts
        self._ranks: defaultdict[int, list[int]] = defaultdict(list)
        for rank, host in enumerate(hosts):
            self._ranks[host].append(rank)

    def relays(self, rank: int) -> list[int]:
        """Return the first two ranks of a rank's host, or the one that there is."""
        return self._ranks[self._hosts[rank]][:2]

    def above(self, rank: int) -> list[int]:
        """Return the ranks to which a rank connects."""
        first, *second = self.relays(rank)
        if rank in MONITORS:
            return [*range(rank)]
        if rank == first:
            return [0] if second else [*MONITORS]
        if rank in second:
            return [first, *({0, 1} - {first} if first in MONITORS else {1})]
        return [first, *second]

    def below(self, rank: int) -> set[int]:
        """Return the ranks that connect to a rank."""
        own = {*self._ranks[self._hosts[rank]]} if rank not in MONITORS else range(len(self._hosts))
        return {other for other in own if rank in self.above(other)}

    def ways(self, rank: int, target: int) -> set[int]:
        """Return the neighbours through which a rank reaches another one that is none itself."""
        if rank in MONITORS:
            found = set() if target in MONITORS else {*self.relays(target), *MONITORS}
        else:
            found = {*self.above(rank), *self.relays(rank)} if target in MONITORS else set()
        return found - {rank, target}


class RelayedChannel:
    """Messages between one rank and the monitors; at a monitor, between it and all ranks.

    Has the interface of `SideChannel`, whose connections it takes over. Used by one thread.
    """

    def __init__(self, channel: SideChannel, rank: int, routes: Routes) -> None:
        self._channel, self._rank, self._routes = channel, rank, routes
        self._above, self._below = routes.above(rank), routes.below(rank)
        self._of_monitor = rank in MONITORS
        self._numbers = count()
        self._taken: set[tuple[int, int]] = set()  # messages, by sender and number
        self._told: dict[int, list[int]] = {}  # what each neighbour was told
        self._tell_monitor_at = 0.0
        self._theirs: dict[int, set[int]] = {}  # what each neighbour has told
        self._known: set[int] = set()  # neighbours that have told, also such as have gone
        self._leaving: set[int] = set()  # neighbours
        self._ended: set[int] = set()  # ranks that a monitor knows to have ended
        self._own: set[int] = set()  # ranks that are reached without the other monitor
        self._peers: list[int] = []
        self.lost_after, self.wake_descriptor = channel.lost_after, channel.wake_descriptor
        self.wake = channel.wake

    @property
    def peers(self) -> list[int]:
        """The ranks that messages reach: at a monitor all, else the monitors.

        First those that pass nothing on: so a rank that leaves at a message to all has passed it on
        to the others before.
        """
        return [*self._peers]

    @property
    def port(self) -> int:
        """The TCP port at which this rank listens; 0 once it does not."""
        return self._channel.port

    @property
    def settled(self) -> bool:
        """False until those of this host that pass messages on have told whom they reach."""
        return {*self._routes.relays(self._rank)} - {self._rank, *MONITORS} <= self._known

    def relays(self, peer: int) -> set[int]:
        """Return the last ranks on the ways to a rank at a monitor; none if it is a neighbour."""
        if peer in self._channel.peers:
            return set()
        found = {*self._routes.relays(peer)}
        return (found | {*MONITORS} if peer in found else found) - {self._rank, peer}

    def missing(self, *, directly: bool) -> list[int]:
        """Return the ranks to connect to; the monitors if that must be `directly`."""
        connected = self._channel.peers
        found = [rank for rank in self._above if rank not in connected]
        if found and directly:
            found = [m for m in MONITORS if m < self._rank and m not in connected]
        return found

    def connect(self, neighbour: int, where: Address) -> None:
        """Connect to a neighbour, as `SideChannel.connect`."""
        self._channel.connect(neighbour, where)
        self._find_peers()

    def send(self, peer: int, message: Message) -> None:
        """Send a message to a rank; do nothing if there is no way to it. Never blocks."""
        number = next(self._numbers)
        self._pass_on({"from": self._rank, "number": number, "to": peer, "message": message})

    def send_to_all(self, message: Message) -> None:
        """Send a message to all peers, or to the monitors, also to one not known to be reached."""
        for peer in self._peers if self._of_monitor else MONITORS:
            self.send(peer, message)

    def acknowledged(self, peer: int) -> bool:
        """Return False if a rank's node has not acknowledged what was sent there."""
        near = {peer, *self._routes.relays(peer)} & {*self._channel.peers}
        return all(self._channel.acknowledged(rank) for rank in near)

    def poll(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Wait for messages up to some seconds, and yield each with the rank that it comes from.

        As `SideChannel.poll`. At a rank that is no monitor, a monitor is disconnected once no way
        leads to it, unless those who passed messages on have left on purpose.
        """
        self._find_peers()
        self._tell_neighbours()
        for neighbour, message in self._channel.poll(seconds):
            if neighbour == self._rank:
                yield neighbour, message
            elif "to" in message:
                yield from self._take(neighbour, message)
            elif "reaches" in message:
                yield from self._on_reaches(neighbour, {*message["reaches"]})
            elif "leaves" in message:
                self._leaving.add(neighbour)
            elif message["kind"] == "disconnected":
                yield from self._on_disconnected(neighbour, message["error"])
        self._find_peers()
        self._tell_neighbours()

    def stop_listening(self) -> None:
        """Close the port if all neighbours are connected that connect to this rank."""
        if self._below <= {*self._channel.peers}:
            self._channel.stop_listening()

    def close(self, *, in_child: bool = False) -> None:
        """Close all connections; in a forked child, without a word to the peers."""
        if not in_child:
            self._channel.send_to_all({"leaves": True})
        self._channel.close(in_child=in_child)

    def _find_peers(self) -> set[int]:
        """Find out which ranks messages reach; return those that they reach no longer."""
        before, own, of_monitors = {*self._peers}, {*self._channel.peers}, set[int]()
        for neighbour, theirs in self._theirs.items():
            (of_monitors if neighbour in MONITORS else own).update(theirs)
        gone = self._ended | {self._rank}
        self._own, found = own - gone, (own | of_monitors) - gone
        if not self._of_monitor:
            found &= {*MONITORS}
        if found != before:
            relays = {rank for peer in found for rank in self._routes.relays(peer)}
            self._peers = sorted(found, key=lambda rank: (rank in MONITORS, rank in relays, rank))
        return before - found

    def _tell_neighbours(self) -> None:
        """Tell neighbours whom this rank reaches, if they have not been told."""
        connected, now = {*self._channel.peers}, time.monotonic()
        if not self._of_monitor:
            self.stop_listening()
        if not self._below:
            return
        others, monitors = self._own if self._of_monitor else connected, connected & {*MONITORS}
        monitors.update(*(self._theirs.get(monitor, set()) for monitor in [*monitors]))
        monitors &= {*MONITORS}
        for gone in self._told.keys() - connected:
            del self._told[gone]
        for neighbour in connected:
            between = self._of_monitor and neighbour in MONITORS
            news = sorted(others - {*MONITORS} if neighbour in MONITORS else monitors)
            if self._told.get(neighbour) == news or (between and now < self._tell_monitor_at):
                continue
            if between:
                self._tell_monitor_at = now + _TELL_S
            self._told[neighbour] = news
            self._channel.send(neighbour, {"reaches": news})

    def _take(self, neighbour: int, sent: Message) -> Iterator[tuple[int, Message]]:
        """Yield a message to this rank, and pass on one to another; do nothing the second time."""
        name = sent["from"], sent["number"]
        if name in self._taken:
            return
        self._taken.add(name)
        if sent["to"] != self._rank:
            self._pass_on(sent, neighbour)
        elif sent["message"]["kind"] == "ended":
            yield from self._end(sent["message"]["rank"])
        else:
            yield sent["from"], sent["message"]

    def _pass_on(self, sent: Message, neighbour: int | None = None) -> None:
        """Send a message on all its ways, but not back to the neighbour that it comes from."""
        connected, target = self._channel.peers, sent["to"]
        ways = {target} if target in connected else self._routes.ways(self._rank, target)
        for way in ways.intersection(connected) - {neighbour, sent["from"]}:
            self._channel.send(way, sent)

    def _on_reaches(self, neighbour: int, theirs: set[int]) -> Iterator[tuple[int, Message]]:
        """Note whom a neighbour reaches. A rank less is to monitors a process that has ended."""
        before = self._theirs.get(neighbour, set())
        self._theirs[neighbour] = theirs
        self._known.add(neighbour)
        if self._of_monitor and neighbour not in MONITORS:
            self._ended -= theirs - before
            for rank in before - theirs:
                yield from self._end(rank)
        for monitor in self._find_peers() if not self._of_monitor else ():
            yield monitor, {"kind": "disconnected", "error": _NO_WAY}

    def _on_disconnected(self, neighbour: int, error: str | None) -> Iterator[tuple[int, Message]]:
        self._theirs.pop(neighbour, None)
        lost = self._find_peers()
        if self._of_monitor:
            if error is None and neighbour not in MONITORS:
                self._ended.add(neighbour)
                self._tell_end(neighbour)
            lost = {neighbour}
        elif neighbour in self._leaving:
            lost &= {neighbour}
        for rank in lost:
            own = rank == neighbour
            yield rank, {"kind": "disconnected", "error": error if own else _NO_WAY}

    def _end(self, rank: int) -> Iterator[tuple[int, Message]]:
        """Note at a monitor that a rank has ended, of which it hears from others."""
        if rank not in self._ended and rank not in self._channel.peers:
            self._ended.add(rank)
            self._find_peers()
            self._tell_end(rank)
            yield rank, {"kind": "disconnected", "error": None}

    def _tell_end(self, rank: int) -> None:
        for monitor in {*MONITORS} - {self._rank}:
            self.send(monitor, {"kind": "ended", "rank": rank})
