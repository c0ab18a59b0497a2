"""Worlds with the library's own watchdogs, whose ranks raise, stop or vanish.

    worlds = WatchedWorlds([2, 2], seed=7)
    worlds.harm("vanishes", [3], when=1e-3)
    ends = worlds.run_to_end(program)

Connections between watchdogs are of this process. A rank ends as a process does: its script, then
the exit, at which ranks wait for each other. MPI_Abort ends all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_worlds import SimulatedWorlds
from virtual_time import DeadlockError, Thread, Threading, current

import mntrain.ranks
from mntrain import World, errors
from mntrain.comm import mpi
from mntrain.errors import ExceptionWatch
from mntrain.ranks import Ranks
from mntrain.watchdog import monitor, rank_status, thread
from mntrain.watchdog.side_channel import LOST_S, Message

MESSAGE_S = 50e-6  # of virtual time, from one watchdog to another
GREETING_S = 10.0  # for a connection
MOST_S = 3600.0  # of virtual time, in which a run has ended
CHECK, START_ENGINE = Ranks._check, Ranks._start_engine


@dataclass
class SimulatedChannel:
    """The connections of one rank, with the interface of `SideChannel`."""

    worlds: WatchedWorlds
    rank: int
    listens: bool
    lost_after: float = LOST_S
    wake_descriptor: int = -1
    port: int = 0
    open: set[int] = field(default_factory=set)
    inbox: list[tuple[int, Message]] = field(default_factory=list)
    waiting: Thread | None = None
    woken: bool = False

    @property
    def peers(self) -> list[int]:
        return sorted(self.open)

    def connect(self, monitor: int, where: object) -> None:
        begun, time = self.worlds.time.now, current().time
        time.sleep(2 * MESSAGE_S)
        while (other := self.worlds.channels.get(monitor)) is None:  # it listens already
            if time.now > begun + GREETING_S:
                raise OSError("no proof")
            time.sleep(2 * MESSAGE_S)
        if not other.listens or monitor in self.worlds.gone | self.worlds.unreached:
            raise OSError("nobody listens")
        self.open.add(monitor)
        self.worlds.time.note(self.rank, "connects to", monitor)
        other.open.add(self.rank)
        other.wake()

    def send(self, peer: int, message: Message) -> None:
        if peer in self.open:
            self.worlds.deliver(self.rank, peer, message)

    def send_to_all(self, message: Message) -> None:
        for peer in self.peers:
            self.send(peer, message)

    def acknowledged(self, peer: int) -> bool:
        return peer not in self.worlds.unreached

    def poll(self, seconds: float) -> Iterator[tuple[int, Message]]:
        if not (self.inbox or self.woken):
            self.waiting = current()
            current().time.wait(lambda: "messages of watchdogs", seconds, polls=False)
            self.waiting = None
        self.woken = False
        while self.inbox:
            peer, message = self.inbox.pop(0)
            if message["kind"] == "disconnected":
                if peer not in self.open:
                    continue
                self.open.remove(peer)
            yield peer, message

    def stop_listening(self) -> None:
        self.listens = False

    def wake(self) -> None:
        self.woken = True
        if self.waiting is not None:
            self.waiting.time.wake(self.waiting)

    def close(self) -> None:
        self.worlds.disconnect(self.rank, None)


class _Watch(ExceptionWatch):
    """A rank's report of its uncaught exceptions, without the interpreter's hooks."""

    def install(self) -> None:
        """Do nothing: `WatchedWorlds` calls `end_job`."""

    def uninstall(self) -> None:
        """Do nothing."""

    def _report_failure(self, error: BaseException) -> None:
        """Print nothing."""


class _OfRank:
    """A set of each rank's own, in the place of one of the process."""

    def __init__(self) -> None:
        self._sets: dict[int, dict[Any, None]] = {}

    def _own(self) -> dict[Any, None]:
        return self._sets.setdefault(current().rank, {})

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._own()])

    def add(self, value: Any) -> None:
        self._own()[value] = None

    def discard(self, value: Any) -> None:
        self._own().pop(value, None)


@dataclass
class End:
    """The end of a rank: what its program returned or raised first, and the exit code.

    The code is None for a rank that was harmed, or that MPI_Abort has ended.
    """

    value: Any = None
    error: BaseException | None = None
    finished: bool = False  # the program
    code: int | None = None


class WatchedWorlds(SimulatedWorlds):
    """Simulated ranks of watched worlds. `printed` are lines of watchdogs: rank and text.

    With `facts_of_hosts`, ranks gather the facts of this host, and no rank can be harmed.
    """

    def __init__(self, *given: Any, facts_of_hosts: bool = False, **more: Any) -> None:
        super().__init__(*given, **more)
        self.facts_of_hosts = facts_of_hosts
        self.channels: dict[int, SimulatedChannel] = {}
        self.printed: list[tuple[int, str]] = []
        self.ends = [End() for _ in range(self.size)]
        self.gone: set[int] = set()  # processes that have ended
        self.unreached: set[int] = set()  # ranks of nodes that are lost
        self.harmed: set[int] = set()
        self.aborted = False
        self._harm: dict[int, Callable[[], None]] = {}  # by the rank that has made its world
        self._arrived: dict[tuple[int, int], float] = {}  # the last message of each pair

    # What happens to ranks.

    def harm(self, how: str, ranks: Sequence[int], when: float) -> None:
        """Let ranks stop or vanish, or be lost with their nodes, whatever they do then.

        `when`: seconds after the first of them has made its world. Ranks that have ended by then
        are not harmed.
        """

        def act() -> None:
            for rank in ranks:
                if self.ends[rank].code is None and not self.aborted:
                    self.harmed.add(rank)
                    self.time.lose(rank)
            if how == "loses node":
                for rank in self.harmed:  # the others see it when nothing is acknowledged
                    self.time.at(
                        self.time.now + LOST_S,
                        partial(self.disconnect, rank, "Connection timed out"),
                    )
                    self.unreached.add(rank)
            elif how == "vanishes":
                for rank in self.harmed:
                    self.gone.add(rank)
                    self.disconnect(rank, None)

        self._harm[ranks[0]] = lambda: self.time.at(self.time.now + when, act)

    def abort(self, code: int) -> None:
        """End all processes, as MPI_Abort does. Does not return."""
        self.aborted = True
        self.time.note(current().rank, "aborts the job")
        for rank in range(self.size):
            self.time.lose(rank)
        self._never()

    def exit(self, code: int) -> None:
        """End this process. Does not return."""
        rank = current().rank
        self.ends[rank].code = code
        self.gone.add(rank)
        self.disconnect(rank, None)
        self.time.lose(rank)
        self._never()

    def _never(self) -> None:
        current().time.wait(lambda: "its end", polls=False)

    def run_to_end(self, program: Callable[[World], Any]) -> list[End]:
        """Run a script that makes a world on each rank, to the end of its process."""

        def script(number: int) -> None:
            end, world = self.ends[number], None
            try:
                with World(**self.options) as world:
                    try:
                        self._harm.get(number, lambda: None)()
                        end.value = program(world)
                        end.finished = True
                    except Exception as error:
                        end.error = error
                        raise
            except Exception as error:
                end.error = end.error or error
                if not errors.raised_by_all(error):
                    watch = _Watch(number, self.size, f"node{self.topology.node(number)}")
                    (world._watch if world is not None else watch).end_job(error)
            thread._exit_together()
            end.code = 0 if end.error is None else 1
            self.gone.add(number)

        def late() -> None:
            raise DeadlockError(self.time.report(f"it has not ended in {MOST_S:.0f} s"))

        self.time.at(MOST_S, late)
        self._run(script, errors=False)
        return self.ends

    # Connections.

    def deliver(self, source: int, target: int, message: Message) -> None:
        """Let a message of a watchdog arrive, after those before of the same pair."""

        def arrive() -> None:
            if target not in self.gone | self.harmed:
                channel = self.channels[target]
                channel.inbox.append((source, message))
                self.time.note(target, "is told", *message.values(), "by", source)
                channel.wake()

        if source not in self.unreached or message["kind"] == "disconnected":
            before = self._arrived.get((source, target), 0.0)
            when = max(self.time.now + MESSAGE_S, math.nextafter(before, math.inf))
            self._arrived[source, target] = when
            self.time.at(when, arrive)

    def disconnect(self, rank: int, error: str | None) -> None:
        """Let the peers of a rank see the end of its connections."""
        if channel := self.channels.get(rank):
            for peer in channel.peers:
                self.deliver(rank, peer, {"kind": "disconnected", "error": error})
            channel.open.clear()

    # The place of the host.

    def take_the_place_of_the_host(self, patch: pytest.MonkeyPatch) -> None:
        super().take_the_place_of_the_host(patch)
        self.channels.clear()
        facts = [self._facts(rank) for rank in range(self.size)]

        def give_facts(world: Ranks) -> None:
            world.facts, world.findings = facts, {}

        patch.setattr(Ranks, "_check", CHECK if self.facts_of_hosts else give_facts)
        patch.setattr(mntrain.ranks.torch, "set_num_threads", lambda number: None)
        patch.setattr(Ranks, "_start_engine", START_ENGINE)
        for name, value in {
            "ExceptionWatch": _Watch,
            "SideChannel": self._channel,
            "listen": lambda towards, ports: SimpleNamespace(getsockname=lambda: ("", 1, 0)),
            "address_towards": lambda others: "node",
            "own_addresses": dict,
        }.items():
            patch.setattr(mntrain.ranks, name, value)
        virtual = SimpleNamespace(monotonic=self.time.local_now, sleep=self.time.sleep)
        for module in (errors, thread, monitor):
            patch.setattr(module, "time", virtual)
        patch.setattr(thread, "threading", Threading())
        patch.setattr(thread, "os", SimpleNamespace(getpid=lambda: 0, _exit=self.exit))
        patch.setattr(thread, "faulthandler", SimpleNamespace())
        patch.setattr(thread, "call_in_child", lambda method: None)
        patch.setattr(thread, "_of_process", _OfRank())
        patch.setattr(thread, "_print", lambda text: self.printed.append((current().rank, text)))
        patch.setattr(thread, "limited_end", lambda seconds: nullcontext())
        quiet = SimpleNamespace(look=lambda now: None, lasting=list)
        patch.setattr(thread, "Unanswered", lambda pids: quiet)
        for module in (thread, rank_status):
            patch.setattr(module, "call_for", lambda seconds, function: function())
            patch.setattr(module, "unread_output", str)
        for module in (monitor, rank_status):
            patch.setattr(module, "process_state", self._state)
        patch.setattr(mpi, "abort", self.abort)
        patch.setattr(mpi, "ended", lambda: False)
        patch.setattr(mpi, "finalize", lambda: None)
        patch.setattr(mpi, "job_size", lambda: self.size)

    def _channel(
        self, rank: int, secret: bytes, listener: object, *, lost_after: float
    ) -> SimulatedChannel:
        made = self.channels[rank] = SimulatedChannel(self, rank, listener is not None, lost_after)
        return made

    def _facts(self, rank: int) -> Any:
        node = self.topology.node(rank)
        return SimpleNamespace(
            host=f"node{node}",
            host_key=self.topology.node_group(rank)[0],
            pid=1000 + rank,
            pid_namespace=f"node {node}",
        )

    def _state(self, pid: int) -> str:
        return "ended" if pid - 1000 in self.gone else "stopped by a signal"
