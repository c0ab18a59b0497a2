"""Detection of ranks that call different collectives.

Messages and shared memory match only between ranks whose tickets have equal digests, at no cost. So
ranks that disagree wait for each other, and no data are mixed. A rank that has waited for some
seconds sends rank 0 a report: the latest tickets of all its streams. Rank 0, once it waits too,
compares them. Two ranks disagree if their tickets of one number differ, or if they wait in
different streams for each other. A rank that is late has called nothing yet, and is waited for,
however long it takes. Rank 0 sends what it finds to all ranks, and they raise it as one error.

At most one report of a rank is on its way. Nothing is sent while collectives make progress.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from mntrain.alike.naming import by_value, naming
from mntrain.comm import clock, small_messages
from mntrain.comm.engine import HISTORY, Steps, Stream
from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.ticket import Ticket

if TYPE_CHECKING:
    from mpi4py import MPI

_REPORT, _ERROR = 1, 2  # tags
GATHER_S = 1.0  # at most, to receive the reports of further ranks for the error
SEND_S = 5.0  # at most, to hand the error to MPI


class CallReport(NamedTuple):
    """The calls of one rank so far, by the name of the stream.

    `wait` is the collective for which the rank waits, and does nothing else until other ranks call
    it: its stream, its number, and the rank that it waits for, or None for all ranks.
    """

    tickets: Mapping[str, Sequence[Ticket]]  # the latest ones
    submitted: Mapping[str, int]  # the number of tickets
    wait: tuple[str, int, int | None] | None


class DisagreementWatch:
    """The comparison of the tickets of a world's ranks, on one of them.

    `streams` are those of the engine that calls `look`; `make_error` makes the error from its text.
    """

    def __init__(
        self,
        comm: Communicator,
        streams: Sequence[Stream],
        make_error: Callable[[str], Exception],
    ) -> None:
        self._comm, self._mpi = comm, comm.as_mpi4py
        self._streams, self._make_error = streams, make_error
        self._state: object = None  # of this rank when it last reported
        self._sent: MPI.Request | None = None  # the last report
        self._receiving: list[MPI.Request] = []
        self._reports: dict[int, CallReport] = {}  # on rank 0, by rank
        self._found_at: float | None = None
        self._closing = False

    def look(self, waits_in: str) -> Exception | None:
        """Send this rank's report if it is new; return the error if ranks disagree.

        `waits_in` is the stream for which this rank waits and does nothing else; "" otherwise.
        """
        state = waits_in, [stream.submitted for stream in self._streams]
        report = None
        if state != self._state and not self._closing and self._report_received():
            self._state, report = state, make_report(self._streams, waits_in)
        if self._comm.rank == 0:
            text = self._judge(report)
        else:
            if report is not None:
                self._sent = self._mpi.issend((self._comm.rank, report), 0, _REPORT)
            text = next(iter(self._receive(_ERROR)), None)
        return None if text is None else self._make_error(text)

    def close(self, ticket: Ticket) -> Steps[Exception | None]:
        """Wait for all ranks, and receive the reports that are on their way. Collective.

        Returns the error if ranks have called anything unlike in a stream that they share.
        """
        comm, tag = self._comm, self._comm.tag(ticket.digest)
        own = {stream.name: stream.digest for stream in self._streams}
        digests = yield from small_messages.gather_objects(comm, own, tag)
        self._closing = True  # from here on, this rank reports no more
        yield self._report_received
        for test in small_messages.barrier(comm, tag):
            yield partial(self._test_and_receive, test)
        calls = {call for other in digests for call in other.items()}
        unlike = [name for name, number in Counter(name for name, _ in calls).items() if number > 1]
        if not unlike:
            return None
        reports = yield from small_messages.gather_objects(
            comm, make_report(self._streams, ""), tag
        )
        text = find_disagreement(dict(enumerate(reports)))
        long_ago = (
            f"ranks have made unlike calls in {min(unlike)}, more than {HISTORY} before its end"
        )
        return self._make_error(text or long_ago)

    def _judge(self, own: CallReport | None) -> str | None:
        """Return the text of the error that has been sent to all other ranks, if there is one."""
        news = dict(self._receive(_REPORT)) | ({} if own is None else {0: own})
        self._reports.update(news)
        if not news and self._found_at is None:
            return None
        text = find_disagreement(self._reports)
        if text is None:
            return None
        now = clock.now()
        if self._found_at is None:
            self._found_at = now
        if len(self._reports) < self._comm.size and now < self._found_at + GATHER_S:
            return None
        others = range(1, self._comm.size)
        sent = Requests([self._mpi.isend(text, peer, _ERROR) for peer in others])
        while not sent.test() and clock.now() < now + SEND_S:
            clock.pause(1e-3)
        return text

    def _test_and_receive(self, test: Callable[[], bool]) -> bool:
        self._receive(_REPORT)
        return test()

    def _report_received(self) -> bool:
        return self._sent is None or self._sent.Test()

    def _receive(self, tag: int) -> list[Any]:
        """Return the objects that have arrived."""
        while (message := self._mpi.improbe(tag=tag)) is not None:
            self._receiving.append(message.irecv())
        tests = [(request, *request.test()) for request in self._receiving]
        self._receiving = [request for request, done, _ in tests if not done]
        return [value for _, done, value in tests if done]


def make_report(streams: Sequence[Stream], waits_in: str) -> CallReport:
    """Return what this rank has called. `waits_in`: see `DisagreementWatch.look`."""
    wait = None
    for stream in streams:
        if stream.name == waits_in and (oldest := stream.oldest) is not None:
            wait = stream.name, oldest.number, stream.awaited_rank(oldest)
    return CallReport(
        {stream.name: list(stream.history) for stream in streams},
        {stream.name: stream.submitted for stream in streams},
        wait,
    )


def find_disagreement(reports: Mapping[int, CallReport]) -> str | None:
    """Return how the ranks that have reported disagree; None if they do not. Pure.

    Either they call unequal collectives at one number of a stream, of which the first counts, since
    the digests of all later ones differ too; or some wait for each other, each for a collective
    that another one has not called.
    """
    for name in sorted({name for report in reports.values() for name in report.tickets}):
        calls: dict[int, dict[int, Ticket]] = {}  # by number, then by rank
        for rank in sorted(reports):
            for ticket in reports[rank].tickets.get(name, ()):
                calls.setdefault(ticket.number, {})[rank] = ticket
        for number in sorted(calls):
            if len({ticket.digest for ticket in calls[number].values()}) > 1:
                title = f"ranks disagree about collective {number} of {name}:"
                return _explain(title, {rank: (t, "") for rank, t in calls[number].items()})
    stuck = {}
    for rank, (name, number, _) in _waiting_for_each_other(reports).items():
        ticket = next(t for t in reports[rank].tickets[name] if t.number == number)
        stuck[rank] = ticket, f" (collective {number} of {name})"
    title = "ranks wait for each other, each in a collective that another one does not call:"
    return _explain(title, stuck) if stuck else None


def _waiting_for_each_other(
    reports: Mapping[int, CallReport],
) -> dict[int, tuple[str, int, int | None]]:
    """Return the ranks that wait for one among them, with what they wait for.

    None of them can ever go on: the first that did would need a call of one that does nothing else
    than wait.
    """
    waits = {rank: report.wait for rank, report in sorted(reports.items()) if report.wait}
    while True:
        stuck = {
            rank: (name, number, awaited)
            for rank, (name, number, awaited) in waits.items()
            if any(
                reports[other].submitted.get(name, number + 1) <= number
                for other in waits
                if awaited in (None, other)
            )
        }
        if len(stuck) == len(waits):
            return stuck
        waits = stuck


def _explain(title: str, calls: Mapping[int, tuple[Ticket, str]]) -> str:
    """Return the text of an error about what each rank calls, each with further words."""
    alike = by_value({rank: ticket.digest for rank, (ticket, _) in calls.items()})
    several = [calls[ranks[0]] for _, ranks in alike]
    texts = [f"{ticket.signature}{words}" for ticket, words in several]
    columns = zip(*(ticket.signature.details for ticket, _ in several), strict=True)
    differs = [len(set(texts)) < len(texts) and len(set(column)) > 1 for column in columns]
    lines = [title]
    for (_, ranks), text, (ticket, _) in zip(alike, texts, several, strict=True):
        line = f"  {naming('rank', ranks)}: {text}"
        details = compress(ticket.signature.details, differs)
        line += f" [{', '.join(details)}]" if any(differs) else ""
        lines.append(line + (f", called at {ticket.site}" if ticket.site else ""))
    lines.append(
        "All ranks must make the same calls in the same order: look for a call in a branch or a "
        "loop that differs between ranks"
    )
    return "\n".join(lines)
