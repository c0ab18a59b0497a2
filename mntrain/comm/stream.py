"""A stream: the collectives of one communicator, which all ranks call in one order.

    queue        collectives as operations, and steps (small collectives, functions), as submitted
    active       at most DEPTH operations, in the order of the queue; without any, steps run alone
    in flight    a few of their chunks, started in one order: the first operation's first

All ranks start the chunks of a stream in the same order, and a chunk waits only for the same chunk
on other ranks. So the oldest unfinished chunk can always continue, and no circle of waiting ranks
arises. Streams do not wait for each other: the order between them may differ between ranks.

Each collective has a ticket, which is numbered when the collective begins. Ranks whose tickets of
one number have unequal digests receive no messages from each other.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from mntrain.comm.pending import Future, PendingCollective, is_interrupt
from mntrain.comm.shared_memory import DEPTH
from mntrain.comm.ticket import Ticket, digest_of, text_of

HISTORY = 64  # tickets that a stream keeps; only the root of broadcasts can be further ahead


class Observer(Protocol):
    """An observer of the collectives of streams, called by the thread that drives them."""

    def collective_begins(
        self, stream: str, number: int, text: str, site: str, awaited: int
    ) -> None:
        """Note that a collective begins. `awaited`: see `Stream.awaited_rank`; -1, -2: all."""

    def collective_ends(self, stream: str, number: int) -> None:
        """Note that a collective is done."""


class Stream:
    """The collectives of one communicator on this rank, driven by a `ProgressEngine`.

    `name` is the same on all ranks of the communicator, and no other stream of theirs has it.
    `ranks`, if given, maps the communicator's ranks to the world's.
    """

    def __init__(self, name: str, ranks: Sequence[int] | None = None) -> None:
        self.name, self.ranks = name, None if ranks is None else tuple(ranks)
        self.queue: deque[Future[Any]] = deque()
        self.active: deque[PendingCollective[Any]] = deque()
        self.begun = 0
        self._digest = digest_of(name)  # of the collective that began last
        self.history: deque[Ticket] = deque(maxlen=HISTORY)
        self.observer: Observer | None = None

    @property
    def idle(self) -> bool:
        """True if nothing is queued or active."""
        return not (self.queue or self.active)

    @property
    def busy(self) -> bool:
        """True if a collective has started and is not done."""
        return bool(self.active or (self.queue and self.queue[0].started))

    @property
    def submitted(self) -> int:
        """The number of tickets that have begun or are queued."""
        waiting = [task for task in self.queue if not task.started]
        return self.begun + sum(task.ticket is not None for task in waiting)

    @property
    def oldest(self) -> Ticket | None:
        """The ticket of the oldest collective that has begun and not finished.

        Safe from any thread.
        """
        try:
            return self.active[0].ticket
        except IndexError:
            pass
        try:
            first = self.queue[0]
        except IndexError:
            return None
        return first.ticket if first.started else None

    def awaited_rank(self, ticket: Ticket) -> int | None:
        """Return the only rank of the world that a collective waits for; None if it is all."""
        signature = ticket.signature
        if signature.verb != "broadcast":
            return None
        return signature.root if self.ranks is None else self.ranks[signature.root]

    def begin(self, ticket: Ticket) -> None:
        """Number a collective that begins."""
        ticket.begin(self.begun, self._digest)
        self.begun, self._digest = self.begun + 1, ticket.digest
        self.history.append(ticket)
        if self.observer is not None:
            awaited = self.awaited_rank(ticket)
            if awaited is None:
                awaited = -1 if self.ranks is None else -2
            text = text_of(ticket.signature)
            self.observer.collective_begins(self.name, ticket.number, text, ticket.site, awaited)

    def _end(self, task: Future[Any]) -> None:
        """Tell the observer of a collective that is done."""
        if self.observer is not None and task.ticket is not None and not task.failed:
            self.observer.collective_ends(self.name, task.ticket.number)

    def progress(self) -> bool:
        """Progress everything once; return whether anything moved."""
        moved = bool(self.queue) and self._take_from_queue()
        try:
            return (bool(self.active) and self._advance()) or moved
        except BaseException as error:  # nothing is known of those behind it, either
            while self.active:
                self.active.popleft().fail(error)
            if is_interrupt(error):
                raise
            return True

    def _take_from_queue(self) -> bool:
        """Begin what may begin, and advance steps that run alone; return whether anything moved."""
        moved = False
        while self.queue and len(self.active) < DEPTH:
            task = self.queue[0]
            if isinstance(task, PendingCollective):
                self._begin_task(task)
                task.operation.begin()
                self.active.append(task)
                self.queue.popleft()
                moved = True
            elif self.active:
                break
            else:
                if not task.started:
                    self._begin_task(task)
                try:
                    moved = task.advance() or moved
                finally:
                    if task.done:
                        self.queue.popleft()
                        self._end(task)
                return moved
        return moved

    def _begin_task(self, task: Future[Any]) -> None:
        if task.ticket is not None:
            self.begin(task.ticket)

    def _advance(self) -> bool:
        """Advance every active collective as far as it can go; return whether any did."""
        active, moved, may_start, oldest = self.active, False, True, None
        in_flight = sum([len(pending.in_flight) for pending in active])
        for pending in active:
            if not pending.entered:
                if not pending.operation.enter():
                    break
                pending.entered = moved = True
            before = len(pending.in_flight)
            if before:
                moved = pending.advance_chunks() or moved
            if may_start and not pending.all_started:
                moved = pending.start_chunks(in_flight - before, oldest) or moved
            may_start = may_start and pending.all_started
            oldest = pending.oldest if oldest is None else oldest
            in_flight += len(pending.in_flight) - before
        for pending in active:
            if not pending.left:
                if pending.in_flight or not pending.all_started:
                    break
                pending.operation.leave()
                pending.left = moved = True
        while active and active[0].left and active[0].operation.all_left():
            done = active.popleft()
            done.advance()
            self._end(done)
            moved = True
        return moved
