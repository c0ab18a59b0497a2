"""`auto`, by proof: which algorithm, in pieces of which length, moves tensors fastest here.

    cache.py       what was found before for the same world
    measuring.py   if nothing: time the candidates
    choosing.py    which are the candidates, and what follows from the times

Rank 0 has the cache and the clock; all ranks get what it found.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from mntrain._version import __version__
from mntrain.comm.algorithm_table import AlgorithmTable
from mntrain.comm.collectives import Devices, Transport, WorldCollectives
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator
from mntrain.comm.topology import Topology
from mntrain.comm.tuning_cache import key_of
from mntrain.tuning import choosing
from mntrain.tuning.cache import CACHE, Tuning
from mntrain.tuning.measuring import Measuring

__all__ = ["Rig", "Tuning", "tune", "untuned"]

T = TypeVar("T")


def untuned() -> Tuning:
    """Nothing is measured: lanes."""
    table = AlgorithmTable.always("lanes")
    return Tuning(table, f"{table.of(0)}: not tuned")


@dataclass(frozen=True)
class Rig:
    """What there is to measure on.

    `node` is over this rank's node, `progress` the thread that calls both communicators, `device`
    where tensors are to lie, and they travel by `transport`.
    """

    world: Communicator
    node: Communicator
    topology: Topology
    progress: ProgressEngine
    device: torch.device
    devices: Devices | None
    transport: Transport

    def on_thread(self, function: Callable[[], T]) -> T:
        """Let the communication thread do it, and wait."""
        return self.progress.call(function).wait()

    def gather(self, mine: T) -> list[T]:
        """Everyone's object, by rank. Collective."""
        return self.on_thread(lambda: self.world.gather_objects(mine))


def tune(rig: Rig, *, library: str, host: str, bucket_bytes: int, shared: bool) -> Tuning:
    """Measure what is best for buckets of so many bytes, or find it in the cache. Collective.

    Gives the same on all ranks, in about two seconds at most. `library` names the MPI, `host` is
    where this rank runs, `shared` says whether all nodes share memory.

    What is measured goes over a communicator and through memory of its own: nothing of it stays,
    and it does not count as traffic of the world.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    key = key_of(
        {
            "ranks": rig.gather((host, cores, rig.device.type)),
            "nodes": rig.topology.nodes,
            "bucket_bytes": bucket_bytes,
            "shared": shared,
            "pieces": choosing.PIECES,
            "transport": rig.transport,
            "versions": [library, __version__, torch.__version__],
        }
    )
    master = rig.world.rank == 0
    kept = rig.gather(CACHE.find(key) if master else None)[0]
    if kept is not None:
        found = kept.content
        return Tuning(found.table, f"{found.line} (measured {kept.measured:%Y-%m-%d})")
    found = rig.gather(_measured(rig, bucket_bytes))[0]
    if master:
        CACHE.keep(key, found)
    return found


def _measured(rig: Rig, bucket_bytes: int) -> Tuning:
    comm = rig.on_thread(lambda: rig.world.split(0, rig.world.rank, "tuning"))
    collectives = rig.on_thread(
        lambda: WorldCollectives(
            comm, rig.node, rig.topology, rig.progress, rig.devices, transport=rig.transport
        )
    )
    findings = Measuring(collectives, comm, rig.topology, rig.progress, rig.device).run(
        bucket_bytes
    )
    rig.on_thread(comm.free)
    best = [(nbytes, choosing.best(samples)) for nbytes, samples in findings.samples.items()]
    return Tuning(choosing.table(bucket_bytes, best), choosing.line(rig.topology, findings))
