"""An MPI of Python objects: what `mntrain.comm.mpi` uses of mpi4py, between threads of one process.

Messages of one pair of ranks in one communicator are matched in the order in which they were sent.
Short ones are eager: their send is complete at once. A longer one announces itself, and travels
when its receive has been posted; its sender may not change it before. MPI makes progress here
without being called, which real ones do not.
"""

from __future__ import annotations

import math
import pickle
import socket
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from network import Network
from virtual_time import VirtualTime, current

ANY = -1
TAGS = 1 << 29  # as many as MPICH's: of fewer, unlike calls more often have the same
BYTE = "byte"
SHARED = 1
UNDEFINED = -2  # a color


class MpiError(RuntimeError):
    """An error of MPI itself."""


class MisuseError(AssertionError):
    """A use of MPI that has no defined result."""


def _digest(view: memoryview) -> int:
    """Return what a change of a message changes; of one of more than 64 KiB, every 61st byte."""
    return zlib.adler32(view if len(view) <= 64 << 10 else bytes(view[::61]))


class SimulatedJob:
    """The ranks of a simulation as MPI sees them. `nodes` maps ranks to nodes."""

    def __init__(self, time: VirtualTime, network: Network, nodes: Sequence[int]) -> None:
        self.time, self.network, self.nodes = time, network, nodes
        self.messages = [0] * len(nodes)  # sent, by rank
        self.bytes = [0] * len(nodes)
        self.received = [0] * len(nodes)  # bytes that were sent to a rank, also of allgathers
        self.peers: list[set[int]] = [set() for _ in nodes]  # ranks to which a rank has sent
        self.contexts: list[Context] = []
        self.world = Context(self, range(len(nodes)))

    def comm(self, rank: int) -> Comm:
        """Return the communicator of all ranks, for one of them."""
        return Comm(self.world, rank)

    def carry(
        self,
        ready: float,
        source: int,
        target: int,
        nbytes: int,
        *,
        then: Callable[[], None],
        before: list[float] | None = None,
    ) -> None:
        """Carry bytes over the network, and call a function when they are there.

        `before` are the times at which the first and the last byte of the message before have come,
        which this one does not overtake.
        """
        times = before or [0.0, 0.0]

        def at(place: int, when: float, action: Callable[[], None]) -> None:
            times[place] = max(when, math.nextafter(times[place], math.inf))
            self.time.at(times[place], action)

        def enter() -> None:
            at(1, self.network.enter(self.time.now, source, target, nbytes), then)

        at(0, self.network.leave(ready, source, target, nbytes), enter)

    def describe(self) -> list[str]:
        """Return what ranks wait for: receives without a message, and collectives."""
        return [line for context in self.contexts for line in context.describe()]

    def unreceived(self) -> list[str]:
        """Return the messages that have arrived, and that no rank has received."""
        return [
            f"from {message.source} to {rank} of {context.name}, tag {message.tag}"
            for context in self.contexts
            for rank, mailbox in enumerate(context.mailboxes)
            for message in mailbox.arrived
        ]


class Message:
    """A message under way. A long one holds the buffer of its sender until it travels."""

    def __init__(self, context: Context, source: int, target: int, tag: int, data: Any) -> None:
        self.context, self.source, self.target, self.tag = context, source, target, tag
        self.view = memoryview(data).cast("B")
        self.nbytes = len(self.view)
        self.sending = Request()  # that of the sender
        self.receiving: Request | None = None
        self.here = False  # whether all its bytes have arrived

    def Irecv(self, data: Any) -> Request:
        request = Request(data)
        self.context.match(self, request)
        return request

    def irecv(self) -> Request:
        request = Request(pickled=True)
        self.context.match(self, request)
        return request


class Status:
    """The message that a receive or a probe has found."""

    def __init__(self) -> None:
        self.source, self.tag, self.nbytes = ANY, ANY, 0

    def fill(self, message: Message) -> None:
        self.source, self.tag, self.nbytes = message.source, message.tag, message.nbytes

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, unit: str) -> int:
        assert unit == BYTE
        return self.nbytes


class Request:
    """An operation in flight, of which `data` is the buffer of a receive."""

    def __init__(self, data: Any = None, *, pickled: bool = False) -> None:
        self.data, self.pickled = data, pickled
        self.done = False
        self.status = Status()
        self.error: MpiError | None = None

    @property
    def length(self) -> str:
        return "an object" if self.data is None else f"{len(memoryview(self.data))} bytes"

    def Test(self) -> bool:
        current().time.may_switch()
        if self.done and self.error is not None:
            raise self.error
        return self.done

    def test(self) -> tuple[bool, Any]:
        done = self.Test()
        return done, pickle.loads(self.data) if done and self.pickled else None

    def wait(self) -> Any:
        while not self.Test():
            current().time.wait(lambda: "a message")
        return self.test()[1]

    @staticmethod
    def Testall(requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> bool:
        current().time.may_switch()
        if not all(request.done for request in requests):
            return False
        for place, request in enumerate(requests):
            if request.error is not None:
                raise request.error
            if statuses is not None:
                vars(statuses[place]).update(vars(request.status))
        return True


class Mailbox:
    """Messages of one rank that nobody has asked for, and receives that nothing has come for."""

    def __init__(self) -> None:
        self.arrived: list[Message] = []
        self.posted: defaultdict[tuple[int, int], deque[Request]] = defaultdict(deque)

    def find(self, source: int, tag: int) -> Message | None:
        for message in self.arrived:
            if source in (ANY, message.source) and tag in (ANY, message.tag):
                return message
        return None


class Meeting:
    """One collective call of MPI, in which all ranks of a communicator take part."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.given: dict[int, Any] = {}
        self.result: Any = None
        self.waiting: dict[int, Request] = {}


class Context:
    """A communicator as all of its ranks share it. `members` are ranks of the world."""

    def __init__(self, job: SimulatedJob, members: Sequence[int]) -> None:
        self.job, self.members = job, tuple(members)
        self.name = f"communicator {len(job.contexts)}"
        job.contexts.append(self)
        self.mailboxes = [Mailbox() for _ in self.members]
        # When the last message of a pair has come: its first and its last byte.
        self._last: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._meetings: dict[int, Meeting] = {}
        self._met = [0] * len(self.members)  # collectives that each rank has called

    def send(self, message: Message, *, synchronous: bool = False) -> Request:
        """Start to send; a long or synchronous message announces itself first."""
        job, source = self.job, self.members[message.source]
        model, time = job.network.model, job.time
        job.messages[source] += 1
        job.bytes[source] += message.nbytes
        target = self.members[message.target]
        job.received[target] += message.nbytes
        job.peers[source].add(target)
        time.note(source, f"sends {message.nbytes} to", target, message.tag)
        ready = time.work(source, model.message_s + message.nbytes * model.byte_s)
        eager = message.nbytes <= model.eager_bytes and not synchronous
        if eager:
            message.view = memoryview(bytes(message.view))
            message.sending.done = message.here = True
        self._arrive(ready, message, message.nbytes if eager else 0, self._announced)
        time.may_switch()
        return message.sending

    def _arrive(
        self, ready: float, message: Message, nbytes: int, then: Callable[[Message], None]
    ) -> None:
        """Let so many bytes of a message arrive, after those before of the same pair."""
        source, target = self.members[message.source], self.members[message.target]
        before = self._last[message.source, message.target]
        self.job.carry(ready, source, target, nbytes, then=lambda: then(message), before=before)

    def _announced(self, message: Message) -> None:
        rank = self.members[message.target]
        if rank in self.job.time.lost or self.members[message.source] in self.job.time.lost:
            return
        box = self.mailboxes[message.target]
        waiting = box.posted.get((message.source, message.tag))
        if waiting:
            self.match(message, waiting.popleft())
        else:
            box.arrived.append(message)
        self.job.time.happened(rank)

    def receive(self, rank: int, request: Request, source: int, tag: int) -> None:
        """Match a receive with the first message that fits, or post it."""
        box = self.mailboxes[rank]
        found = box.find(source, tag)
        if found is None:
            box.posted[source, tag].append(request)
        else:
            box.arrived.remove(found)
            self.match(found, request)

    def match(self, message: Message, request: Request) -> None:
        """Give a message to its receive: what is here at once, else once it has travelled."""
        message.receiving = request
        if message.here:
            self._complete(message)
            return
        # The sender learns that the receive is posted, and then sends.
        source, target = self.members[message.source], self.members[message.target]
        job, sent = self.job, _digest(message.view)

        def travel() -> None:
            if source in job.time.lost:
                return
            ready = job.time.work(source, job.network.model.message_s)
            job.carry(ready, source, target, message.nbytes, then=end)

        def end() -> None:
            if _digest(message.view) != sent:
                raise MisuseError(f"rank {source} has changed a message that it is sending")
            self._complete(message)
            message.sending.done = True
            job.time.happened(source)

        job.time.at(job.time.now + job.network.latency(target, source), travel)

    def _complete(self, message: Message) -> None:
        request, rank = message.receiving, self.members[message.target]
        assert request is not None
        model, time = self.job.network.model, self.job.time
        if request.pickled:
            request.data = bytearray(message.nbytes)
        target = memoryview(request.data).cast("B")
        if message.nbytes > len(target):
            request.error = MpiError(
                f"a message of {message.nbytes} bytes is too long for {len(target)}"
            )
        else:
            target[: message.nbytes] = message.view
        request.status.fill(message)
        time.work(rank, model.message_s + message.nbytes * model.byte_s)
        source = self.members[message.source]
        time.note(rank, f"receives {message.nbytes} from", source, message.tag)
        request.done = True
        time.happened(rank)

    def meet(self, rank: int, kind: str, value: Any, end: Callable[[list[Any]], Any]) -> Request:
        """Take part in the next collective; `end` makes the result from what all give, by rank."""
        number = self._met[rank]
        self._met[rank] += 1
        time, size = self.job.time, len(self.members)
        meeting = self._meetings.setdefault(number, Meeting(kind))
        time.note(self.members[rank], "calls", kind, f"of {self.name}")
        if meeting.kind != kind:
            raise MisuseError(
                f"rank {self.members[rank]} calls {kind} and rank "
                f"{self.members[min(meeting.given)]} {meeting.kind} on {self.name}"
            )
        request = meeting.waiting[rank] = Request()
        meeting.given[rank] = value
        if len(meeting.given) == size:
            del self._meetings[number]
            values = [meeting.given[rank] for rank in range(size)]
            first = self.members[0]
            latency_s = max(self.job.network.latency(first, other) for other in self.members)
            rounds = (size - 1).bit_length()
            result = end(values)

            def complete() -> None:
                for at, waiting in meeting.waiting.items():
                    waiting.data, waiting.done = result, True
                    time.happened(self.members[at])

            time.at(time.now + rounds * latency_s, complete)
        return request

    def describe(self) -> list[str]:
        """Return what ranks wait for on this communicator."""
        lines = []
        for rank, box in enumerate(self.mailboxes):
            for (source, tag), waiting in box.posted.items():
                lines += [
                    f"  rank {self.members[rank]}: a receive of {one.length} "
                    f"from rank {self.members[source]}, tag {tag}, on {self.name}"
                    for one in waiting
                ]
        for meeting in self._meetings.values():
            present = [self.members[rank] for rank in sorted(meeting.given)]
            lines.append(f"  ranks {present} of {self.members}: {meeting.kind} on {self.name}")
        return lines


class Group:
    """Ranks of the world, in the order of a communicator."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)

    def Incl(self, ranks: Sequence[int]) -> Group:
        return Group([self.members[rank] for rank in ranks])

    def Free(self) -> None:
        """Do nothing: it holds no resources."""


class Comm:
    """A communicator as one of its ranks sees it, with the interface of mpi4py's."""

    def __init__(self, context: Context, rank: int) -> None:
        self._shared, self._rank = context, rank
        self._freed = False

    @property
    def context(self) -> Context:
        if self._freed:
            raise MisuseError(f"{self._shared.name} is used after it was freed")
        return self._shared

    def Set_name(self, name: str) -> None:
        self.context.name = name

    def Get_name(self) -> str:
        return self.context.name

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self.context.members)

    rank, size = property(Get_rank), property(Get_size)

    def Isend(self, data: Any, peer: int, tag: int) -> Request:
        self._check(peer, tag)
        return self.context.send(Message(self.context, self._rank, peer, tag, data))

    def Irecv(self, data: Any, peer: int, tag: int) -> Request:
        self._check(peer, tag)
        request = Request(data)
        self.context.receive(self._rank, request, peer, tag)
        return request

    def isend(self, value: Any, peer: int, tag: int = 0) -> Request:
        return self._send_object(value, peer, tag, synchronous=False)

    def issend(self, value: Any, peer: int, tag: int = 0) -> Request:
        return self._send_object(value, peer, tag, synchronous=True)

    def send(self, value: Any, peer: int, tag: int = 0) -> None:
        self.isend(value, peer, tag).wait()

    def irecv(self, source: int, tag: int) -> Request:
        request = Request(pickled=True)
        self.context.receive(self._rank, request, source, tag)
        return request

    def Improbe(self, source: int, tag: int, status: Status | None = None) -> Message | None:
        current().time.may_switch()
        box = self.context.mailboxes[self._rank]
        found = box.find(source, tag)
        if found is not None:
            box.arrived.remove(found)
            if status is not None:
                status.fill(found)
        return found

    def improbe(self, source: int = ANY, tag: int = ANY) -> Message | None:
        return self.Improbe(source, tag)

    def Ibarrier(self) -> Request:
        return self._meet("Ibarrier", None, lambda given: None)

    def Barrier(self) -> None:
        self._wait("Barrier", None, lambda given: None)

    def Iallgatherv(self, own: Any, target: tuple[bytearray, Sequence[int]]) -> Request:
        gathered, lengths = target
        own = bytes(memoryview(own).cast("B"))
        if len(own) != lengths[self._rank]:
            raise MisuseError(f"{len(own)} bytes are gathered as {lengths[self._rank]}")

        def end(given: list[tuple[bytes, list[int], bytearray]]) -> None:
            data = b"".join(each for each, _, _ in given)
            for _, others, buffer in given:
                if list(others) != list(lengths):
                    raise MisuseError("ranks gather buffers of unequal lists of lengths")
                buffer[:] = data

        return self._meet("Iallgatherv", (own, lengths, gathered), end)

    def allgather(self, value: Any) -> list[Any]:
        packed = self._wait("allgather", pickle.dumps(value), lambda given: given)
        self.context.job.received[self.context.members[self._rank]] += sum(map(len, packed))
        return [pickle.loads(each) for each in packed]

    def allreduce(self, value: Any) -> Any:
        return sum(self.allgather(value))

    def bcast(self, value: Any, root: int = 0) -> Any:
        return pickle.loads(self._wait("bcast", pickle.dumps(value), lambda given: given[root]))

    def Dup(self) -> Comm:
        job, members = self.context.job, self.context.members
        return Comm(self._wait("Dup", None, lambda given: Context(job, members)), self._rank)

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        job, members = self.context.job, self.context.members

        def end(given: list[tuple[int, int]]) -> dict[int, Context]:
            found = {}
            for wanted in sorted({color for color, _ in given} - {UNDEFINED}):
                keys = [(k, rank) for rank, (c, k) in enumerate(given) if c == wanted]
                found[wanted] = Context(job, [members[rank] for _, rank in sorted(keys)])
            return found

        parts = self._wait("Split", (color, key), end)
        if color == UNDEFINED:
            return NULL
        part = parts[color]
        return Comm(part, part.members.index(members[self._rank]))

    def Split_type(self, kind: int) -> Comm:
        assert kind == SHARED
        return self.Split(self.context.job.nodes[self.context.members[self._rank]], self._rank)

    def Get_attr(self, key: str) -> int:
        return TAGS - 1

    def Get_group(self) -> Group:
        return Group(self.context.members)

    def Create_group(self, group: Group, tag: int) -> Comm:
        """Make a communicator of a group; its ranks meet on an own context, by group and tag."""
        job, own = self.context.job, self.context.members[self._rank]
        key = self.context, group.members, tag
        meets = job.__dict__.setdefault("groups", {})
        place = meets.setdefault(key, Context(job, group.members))
        met = Comm(place, group.members.index(own))
        return met.Dup()

    def Free(self) -> None:
        self.context  # noqa: B018 - raises if it was freed
        self._freed = True

    def _send_object(self, value: Any, peer: int, tag: int, *, synchronous: bool) -> Request:
        self._check(peer, tag)
        message = Message(self.context, self._rank, peer, tag, pickle.dumps(value))
        return self.context.send(message, synchronous=synchronous)

    def _check(self, peer: int, tag: int) -> None:
        if not (0 <= peer < self.Get_size() and 0 <= tag < TAGS):
            raise MpiError(f"rank {peer} or tag {tag} is none of {self.context.name}")

    def _meet(self, kind: str, value: Any, end: Callable[[list[Any]], Any]) -> Request:
        current().time.may_switch()
        return self.context.meet(self._rank, kind, value, end)

    def _wait(self, kind: str, value: Any, end: Callable[[list[Any]], Any]) -> Any:
        request = self._meet(kind, value, end)
        while not request.done:
            current().time.wait(lambda: f"{kind} of {self.context.name}")
        return request.data


class _NoComm:
    """The communicator that has no ranks."""


NULL: Any = _NoComm()


class _Mpi(SimpleNamespace):
    """The module `mpi4py.MPI`, whose `COMM_WORLD` is that of the running rank."""

    job: SimulatedJob

    @property
    def COMM_WORLD(self) -> Comm:
        return self.job.comm(current().rank)

    @property
    def COMM_SELF(self) -> Comm:
        return Comm(Context(self.job, [current().rank]), 0)


def module(job: SimulatedJob) -> ModuleType:
    """Return what takes the place of mpi4py in a job."""
    made = ModuleType("mpi4py")
    made.MPI = _Mpi(  # type: ignore[attr-defined]
        job=job,
        ANY_SOURCE=ANY,
        ANY_TAG=ANY,
        BYTE=BYTE,
        COMM_NULL=NULL,
        COMM_TYPE_SHARED=SHARED,
        TAG_UB="tags",
        THREAD_MULTIPLE=3,
        UNDEFINED=UNDEFINED,
        Exception=MpiError,
        Get_processor_name=socket.gethostname,
        Query_thread=lambda: 2,
        Status=Status,
    )
    return made
