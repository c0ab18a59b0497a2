"""The ranks of a job as checkpoints and reports see them: a `World` without its training tools."""

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from mntrain.comm.collectives import WorldCollectives
from mntrain.comm.mpi import MpiLibrary
from mntrain.comm.pending import Future
from mntrain.comm.topology import Topology
from mntrain.rank_info import Place, Usage
from mntrain.recorder.events import Recorder
from mntrain.watchdog.thread import Watchdog

T = TypeVar("T")


class Ranks(Protocol):
    """All ranks of a job. `mntrain.world.World` implements it, and documents its members."""

    rank: int
    size: int
    master: bool
    device: torch.device
    topology: Topology
    collectives: WorldCollectives
    places: list[Place]
    library: MpiLibrary
    algorithm: str
    transport: str
    recorder: Recorder
    watchdog: Watchdog

    def gather(self, value: T) -> list[T]:
        """Return every rank's object, by rank. Collective."""

    def gather_later(self, value: T) -> Future[list[T]]:
        """Start a `gather`, and return the future of its result. Collective."""

    def agreement(self) -> AbstractContextManager[None]:
        """Return the context of `errors.agreement` over all ranks. Its end is collective."""

    def usage(self) -> list[Usage]:
        """Return the resources that each rank has used so far, by rank. Collective."""
