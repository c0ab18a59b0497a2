"""Ranks of the library in one process: their engines and collectives over a simulated MPI.

    ranks = SimulatedRanks([2, 1, 3], seed=7)
    sums = ranks.run(lambda rank: sum_of(rank.collectives))

A program is ordinary code that runs on every rank. Nothing of the library is replaced but its
clock, its threads and their locks, MPI, and the ways to memory of another process, which is this
one.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated_mpi
import torch
from network import Network, NetworkModel
from numpy.typing import NDArray
from processes import Processes
from virtual_time import Threading, VirtualTime, current

from mntrain.comm import clock, engine, peer_memory, shared_memory
from mntrain.comm.disagreement import DisagreementWatch
from mntrain.comm.engine import Future, ProgressEngine
from mntrain.comm.mpi import Communicator
from mntrain.comm.ticket import AlgorithmChoice, Signature, Ticket
from mntrain.comm.topology import Topology
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.errors import AgreedError
from mntrain.recorder.events import call_site


class SimulationError(AssertionError):
    """The error of a rank, with the seed of the run, and its last events."""


class Rank:
    """A rank as its program has it: numbers, collectives, and the simulated time."""

    def __init__(self, ranks: SimulatedRanks, comm: Communicator) -> None:
        self.ranks, self.comm = ranks, comm
        self.rank, self.size, self.topology = comm.rank, comm.size, ranks.topology
        topology, number = self.topology, self.rank
        self.node = comm.split(topology.node(number), topology.local_rank(number), "node")
        levels = comm.levels = ["cross"] * comm.size
        for other in topology.node_group(number):
            levels[other] = "node"
        self.engine = ProgressEngine() if ranks.threads else _SteppedEngine(ranks.time)
        if ranks.watched:
            make_error = partial(AgreedError, rank=number)
            self.engine.watch = DisagreementWatch(comm, self.engine.streams, make_error)
        made = partial(
            WorldCollectives, comm, self.node, topology, self.engine, choice=ranks.choice
        )
        self.collectives: WorldCollectives = self.engine.call(made).wait()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable object, by rank. Collective."""
        return self.collectives.gather_objects(value, "a gather").wait()

    def compute(self, seconds: float) -> None:
        """Let this rank compute for so long, in virtual time."""
        self.ranks.time.sleep(seconds)

    def close(self) -> None:
        """Finish all calls, and free the communicators. Collective."""
        self.engine.finish(Ticket(Signature("world.close"), call_site())).wait()
        self.engine.close()
        self.comm.free()
        self.node.free()


class _SteppedEngine(ProgressEngine):
    """An engine without a thread, whose waits any rank's thread may step once `stepped` is set.

    Tests take no virtual time then, and nothing that blocks may run in the engine, such as a
    function of `call_together`.
    """

    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self.time, self.stepped = time, False

    def drive_until(self, future: Future[Any]) -> None:
        """Progress collectives until a future is done, as the library's engine does."""
        if not self.stepped or future.ended:
            super().drive_until(future)
            return

        def step() -> bool:
            while not future.ended and self._test_all():
                pass
            if not future.ended:
                self._rest(moved=False)
            return future.ended

        waiter = future, clock.now()
        self._waiters.append(waiter)
        self.time.take_steps(step)
        self._waiters.remove(waiter)
        self.count_wait(*waiter)


class SimulatedRanks:
    """A job on nodes of so many ranks each, whose order of events a seed decides.

    - `hosts`: the node of every rank, if ranks of one node do not follow each other.
    - `private`: whether ranks reach the private memory of their node's others.
    - `watched`: whether ranks that disagree compare their calls, after a wait.
    - `threads`: whether each rank has its communication thread; without, calls progress in waits.
    - `switches`, `keep`: see `VirtualTime`.
    """

    def __init__(
        self,
        nodes: Sequence[int] = (),
        seed: int = 0,
        *,
        hosts: Sequence[int] | None = None,
        network: NetworkModel | None = None,
        choice: AlgorithmChoice | None = None,
        private: bool = True,
        watched: bool = True,
        threads: bool = True,
        switches: float = 0.1,
        keep: bool = False,
    ) -> None:
        flat = itertools.chain.from_iterable([at] * count for at, count in enumerate(nodes))
        self.hosts = list(flat if hosts is None else hosts)
        self.topology = Topology.from_hosts(self.hosts)
        self.size = len(self.hosts)
        self.choice = choice or AlgorithmChoice("lanes")
        self.private, self.watched, self.threads = private, watched, threads
        patience_s = 20.0 if watched else 0.1
        self.time = VirtualTime(seed, switches=switches, patience_s=patience_s, keep=keep)
        if threads:
            Processes(self.time, self.size, {})  # a backward that waits has state of its process
        places = [self.topology.node(rank) for rank in range(self.size)]
        self.network = Network(network or NetworkModel(), places, self.time.random)
        self.job = simulated_mpi.SimulatedJob(self.time, self.network, places)
        self.time.describe = self.job.describe

    def run(self, program: Callable[[Any], Any], *, errors: bool = False) -> list[Any]:
        """Return what the program returns on each rank; with `errors`, also what it raises.

        Raises SimulationError otherwise, and DeadlockError, both with the seed and the last events.
        """

        def on_rank(number: int) -> Any:
            rank = self.make_rank(number)
            result = program(rank)
            rank.close()
            return result

        return self._run(on_rank, errors=errors)

    def run_on_mpi(
        self, program: Callable[[simulated_mpi.Comm], Any], *, errors: bool = False
    ) -> list[Any]:
        """Run a program that has the communicator of MPI alone; as `run`."""
        return self._run(lambda number: program(self.job.comm(number)), errors=errors)

    def _run(self, on_rank: Callable[[int], Any], *, errors: bool) -> list[Any]:
        results: list[Any] = [None] * self.size

        def guarded(number: int) -> None:
            try:
                results[number] = on_rank(number)
            except Exception as error:
                results[number] = error
                if not errors:
                    text = self.time.report(f"rank {number}: {type(error).__name__}: {error}")
                    raise SimulationError(text) from error

        with pytest.MonkeyPatch.context() as patch:
            self.take_the_place_of_the_host(patch)
            self.time.run([partial(guarded, number) for number in range(self.size)])
        return results

    def make_rank(self, number: int) -> Rank:
        """Return what a program has of its rank. Called by all ranks together."""
        return Rank(self, Communicator(self.job.comm(number), "world"))

    def take_the_place_of_the_host(self, patch: pytest.MonkeyPatch) -> None:
        """Let the library use the simulation's clock, threads, MPI and memory."""
        patch.setattr(clock, "now", self.time.local_now)
        patch.setattr(clock, "pause", self.time.pause)
        threading = Threading()
        if not self.threads:
            threading.Thread = _NoThread  # type: ignore[misc]
        patch.setattr(engine, "threading", threading)
        module = simulated_mpi.module(self.job)
        patch.setitem(sys.modules, "mpi4py", module)
        patch.setitem(sys.modules, "mpi4py.MPI", module.MPI)
        # What the library keeps for forked children, and for the life of the process.
        patch.setattr(engine, "call_in_child", lambda method: None)
        patch.setattr(
            shared_memory, "PrivateCopies", lambda: SimpleNamespace(add=lambda tensor: None)
        )
        patch.setattr(engine, "_keep", lambda *given: None)
        # Memory of the other ranks of a node is memory of this process.
        segments: dict[bytes, NDArray[np.uint8]] = {}
        patch.setattr(shared_memory, "_create", partial(_create, segments))
        patch.setattr(
            shared_memory,
            "_map",
            lambda path, nbytes, token: torch.from_numpy(segments[token][:]),
        )
        patch.setattr(peer_memory, "_copy", _copy)
        if not self.private:
            patch.setattr(peer_memory, "_reaches", lambda *offer: False)
        # A rank that writes its flags ends the waits of those that read them.
        flags = shared_memory.SharedFlags
        for name in ("enter", "leave"):
            patch.setattr(flags, name, self._told(getattr(flags, name)))

    def _told(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            result, own = write(*args, **options), current().rank
            self.time.note(own, write.__name__)
            for mate in self.topology.node_group(own):
                if mate != own:
                    self.time.happened(mate)
            return result

        return wrapper


class _NoThread:
    """The place of a communication thread where there is none."""

    def __init__(self, **options: Any) -> None:
        self.ident = None

    def start(self) -> None:
        """Do nothing."""

    def join(self, timeout: float | None = None) -> None:
        """Do nothing."""


def _create(
    segments: dict[bytes, NDArray[np.uint8]], nbytes: int, token: bytes
) -> tuple[int, torch.Tensor, str]:
    """Make a file in memory, known by its token: of the same bytes, each mapping is a tensor."""
    segments[token] = np.zeros(nbytes, np.uint8)
    return -1, torch.from_numpy(segments[token][:]), ""


def _copy(function: object, pid: int, here: int, there: int, nbytes: int) -> None:
    """Copy between two addresses of this process, in the direction of the kernel's function."""
    target, source = (there, here) if function is peer_memory._write else (here, there)
    ctypes.memmove(target, source, nbytes)
