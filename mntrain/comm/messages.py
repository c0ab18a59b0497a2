"""Messages between two ranks of a group, with tags of the caller's, in no order with collectives.

Messages of one tag from one rank to another arrive in the order in which they were sent. Ranks do
not compare them: a receive without a send waits, until the watchdog ends the job.

A long message has several parts, of which all but the last have the most bytes that a part has. So
its receiver knows the end of one of any length, and leaves no part to the next receive.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch import Tensor

from mntrain.comm.engine import Future, ProgressEngine, Steps, UnorderedStream
from mntrain.comm.mpi import Communicator, FoundMessage, Requests, tag_count
from mntrain.comm.resources import as_bytes
from mntrain.comm.ticket import Signature, Ticket
from mntrain.recorder.events import call_site

if TYPE_CHECKING:
    from mntrain.comm.mpi import Bytes

T = TypeVar("T")


def receive_all(found: FoundMessage, data: "Bytes") -> Steps[tuple[Requests, int]]:
    """Receive a message of which the first part was found; return its last requests, its bytes.

    One of another size than `data` is taken and dropped: MPI would hold back later messages of its
    sender.
    """
    nbytes = 0  # of the parts so far
    while True:
        part = data[nbytes : nbytes + found.nbytes]
        nbytes += found.nbytes
        fits = nbytes == data.nbytes if found.is_last else nbytes <= data.nbytes
        taken = found.receive(part if fits else np.empty(found.nbytes, np.uint8))
        if found.is_last:
            return taken, nbytes
        yield taken.test
        yield partial(found.arrived, found.source)


class Messages:
    """The messages of one group, over a communicator of their own. Construction is local.

    `name` is new to the engine, and `ranks` and `timeout_s` are as in `Stream`. Tensors are flat
    and contiguous, in host memory.
    """

    def __init__(
        self,
        comm: Communicator,
        engine: ProgressEngine,
        name: str,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._comm, self._engine = comm, engine
        self._stream = UnorderedStream(name, ranks, timeout_s)
        self._ranks = self._stream.ranks or range(comm.size)  # the world's
        self._missing: list[FoundMessage] = []  # in the order of the receives
        self._ended = ""  # why they wait no longer
        self._last_tag = tag_count() - 1
        engine.streams.append(self._stream)

    def send(self, tensor: Tensor, peer: int, tag: int, *, wake: bool = True) -> Future[None]:
        """Start to send a tensor, which must not change before. Raises ValueError for a bad tag.

        `wake`: as of `ProgressEngine.submit`; False for a caller that waits at once.
        """
        self._check_tag(tag)
        data = as_bytes(tensor)

        def steps() -> Steps[None]:
            yield self._comm.send(peer, data, tag, ended=True).test

        to = self._ranks[peer]
        what = f"send of {data.nbytes} bytes to rank {to}, tag {tag}"
        # Its receive may have begun.
        return self._work(steps(), what, [to], lambda: True, wake=wake)

    def receive(
        self, tensor: Tensor, peer: int | None, tag: int, *, wake: bool = True
    ) -> tuple[Future[None], FoundMessage]:
        """Start to receive into a tensor; with None, from any peer. Raises as `send`.

        `wait` raises RuntimeError for a message of another size. The message has its `source` when
        the work is done.
        """
        self._check_tag(tag)
        data, found = as_bytes(tensor), FoundMessage(self._comm.as_mpi4py, peer, tag)

        def steps() -> Steps[None]:
            yield self._looked_for(found)
            taken, nbytes = yield from receive_all(found, data)
            found.complete = True
            self._missing.remove(found)
            yield taken.test
            if nbytes != data.nbytes:
                raise RuntimeError(
                    f"rank {found.source} of the group has sent {nbytes} bytes with tag {tag}, and "
                    f"this rank receives {data.nbytes}: give tensors of one size"
                )

        others = (r for r in range(self._comm.size) if r != self._comm.rank)
        sources = [self._ranks[r] for r in (others if peer is None else [peer])]
        source = "any rank" if peer is None else f"rank {self._ranks[peer]}"
        what = f"recv of {data.nbytes} bytes from {source}, tag {tag}"

        def may_end() -> bool:
            return peer is None or found.source >= 0

        return self._work(steps(), what, sources, may_end, wake=wake), found

    def _looked_for(self, found: FoundMessage) -> Callable[[], bool]:
        """Return the condition that a message is here, after those of earlier receives of the kind.

        One may arrive when the earlier receive has just looked for it and the later one does next.
        Behind an earlier receive from one rank, one from any rank looks for those of others.
        """
        earlier = [other for other in self._missing if other.overlaps(found)]
        self._missing.append(found)

        def here() -> bool:
            while earlier and earlier[-1].complete:
                earlier.pop()
            taken = {other.peer for other in earlier if not other.complete}  # by earlier receives
            if taken and (found.peer is not None or None in taken):
                return False
            if not taken:
                return found.arrived()
            return any(found.arrived(r) for r in range(self._comm.size) if r not in taken)

        def arrived() -> bool:
            if here():
                return True
            if self._ended:
                self._missing.remove(found)
                raise RuntimeError(f"{self._ended}, before a message came that it receives")
            return False

        return arrived

    def end(self, why: str) -> None:
        """Let receives whose message is not here raise RuntimeError with a reason. Local."""
        self._ended = why

    def meet(self, others: Sequence[int], tag: int, then: Callable[[], T]) -> Future[T]:
        """Call a function when these ranks have come to it, too, with the same tag."""

        def steps() -> Steps[T]:
            own, *theirs = np.zeros((1 + len(others), 1), np.uint8)
            receives = [self._comm.receive(*one, tag) for one in zip(others, theirs, strict=True)]
            sends = [self._comm.send(peer, own, tag) for peer in others]
            yield Requests.of(*receives, *sends).test
            return then()

        peers = [self._ranks[r] for r in others]
        start = Signature("the start of a group")
        ticket = Ticket(start, call_site(), peers=peers, may_end=lambda: False)
        return self._engine.submit(steps(), stream=self._stream, ticket=ticket)

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._last_tag:
            raise ValueError(
                f"the tag of a message is {tag}: give one from 0 to {self._last_tag}, which MPI has"
            )

    def _work(
        self,
        steps: Steps[None],
        what: str,
        peers: Sequence[int],
        may_end: Callable[[], bool],
        *,
        wake: bool,
    ) -> Future[None]:
        ticket = Ticket(Signature(what), call_site(), peers=peers, may_end=may_end)
        return self._engine.submit(steps, wake=wake, stream=self._stream, ticket=ticket)
