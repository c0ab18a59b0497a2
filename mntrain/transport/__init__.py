"""How tensors of devices travel: by proof, not by what libraries say of themselves.

    host         through pinned host memory, which the node's ranks share; with every MPI
    cuda-aware   MPI takes device memory
    nccl         from device to device within the node, host between nodes

`auto` tries the other two, takes none that crashes or copies wrongly, times those that are left on
buckets, and remembers the answer. host stays unless another is faster by more than noise.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mntrain._version import __version__
from mntrain.comm.collectives import Devices, Transport, WorldCollectives
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator
from mntrain.comm.topology import Topology
from mntrain.comm.tuning_cache import TuningCache, key_of
from mntrain.transport import probe, selection
from mntrain.transport.node_group import NodeGroupFactory
from zero.layout import split
from zero.tensor_views import nbytes

__all__ = ["Site", "UnusableError", "choose", "expect_known"]

T = TypeVar("T")

ROUNDS = 3
SMALL = 1009  # elements: of one piece, and no multiple of anything

UnusableError, expect_known = selection.UnusableError, selection.known


def _read(found: Any) -> tuple[Transport, str]:
    """Raises ValueError, TypeError or KeyError for what is no entry."""
    name, line = found["transport"], found["line"]
    if name not in selection.TRANSPORTS or type(line) is not str or not line.isprintable():
        raise ValueError(f"no entry: {found}")
    return name, line


CACHE = TuningCache(
    "transport.json", _read, lambda entry: {"transport": entry[0], "line": entry[1]}
)


@dataclass
class Site:
    """Where a transport is to be chosen.

    `gpus` names each rank's GPU, by rank, '' where it has none; `near` makes, on all ranks at once,
    what moves tensors between a node's devices; `tensor` makes a flat one of fp32 on this rank's
    device; `library` is all that the MPI says of its build; `takes` says why the MPI of this rank
    is not to be given device memory.
    """

    world: Communicator
    topology: Topology
    progress: ProgressEngine
    collectives: WorldCollectives
    devices: Devices
    gpus: Sequence[str]
    library: str
    near: NodeGroupFactory
    tensor: Callable[[int], Tensor]
    takes: Callable[[str], str] = probe.takes_device_memory

    def gather(self, mine: T) -> list[T]:
        """Everyone's object, by rank. Collective."""
        return self.progress.call(lambda: self.world.gather_objects(mine)).wait()


def choose(site: Site, wanted: str, bucket_bytes: int) -> str:
    """Let the collectives use a transport; say which and why, in a line. Collective.

    Raises UnusableError, the same on all ranks, if what is wanted does not work here.
    """
    if wanted == "host":
        return _use(site, "host", "host: as asked for")
    key = key_of(
        {
            "gpus": list(site.gpus),
            "ranks": site.gather(site.world.rank),
            "nodes": site.topology.nodes,
            "bucket_bytes": bucket_bytes,
            "versions": [site.library, __version__, torch.__version__],
            "settings": probe.settings(os.environ),
        }
    )
    kept = None
    if wanted == "auto":
        kept = site.gather(CACHE.find(key) if site.world.rank == 0 else None)[0]
    if kept is not None:
        name, line = kept.content
        if name != "nccl" or not _why_no_nccl(site):
            return _use(site, name, f"{line} (tried {kept.measured:%Y-%m-%d})")
    why_not: dict[Transport, str] = {}
    seconds: dict[Transport, float] = {}
    for name in selection.TRANSPORTS:
        if wanted not in ("auto", name):
            continue
        why = _why_not(site, name) or _tried(site, name, bucket_bytes)
        if wanted == name:
            selection.expect_usable(name, why)
            return _use(site, name, f"{name}: as asked for")
        if why:
            why_not[name] = why
        else:
            seconds[name] = _timed(site, name, bucket_bytes)
    chosen = selection.fastest(seconds)
    line = selection.line(chosen, seconds, why_not)
    if site.world.rank == 0:
        CACHE.keep(key, (chosen, line))
    return _use(site, chosen, line)


def _use(site: Site, name: Transport, line: str) -> str:
    site.collectives = site.collectives.replace(transport=name)
    if name != "nccl":
        site.collectives = site.collectives.replace(node_first=None)
        site.near.close()
    return line


def _why_not(site: Site, name: Transport) -> str:
    """Why a transport is not even to be tried. Collective."""
    if name == "cuda-aware":
        if not all(site.gpus):
            return f"rank {list(site.gpus).index('')} has no GPU"
        # One rank a node asks: the others have the same MPI.
        first = site.topology.local_rank(site.world.rank) == 0
        why = site.takes(str(site.devices.device)) if first else ""
        return selection.all_or_none(site.gather(why))
    return _why_no_nccl(site) if name == "nccl" else ""


def _why_no_nccl(site: Site) -> str:
    """Make NCCL ready for use; why that cannot be. Collective."""
    why = selection.why_no_nccl(site.topology, site.gpus)
    if why:
        return why
    for attempt in (site.near.check, site.near.connect):
        why = ""
        try:
            attempt()
        except Exception as error:  # whatever NCCL or its bindings raise: the others are to know
            why = str(error) or type(error).__name__
        why = selection.all_or_none(site.gather(why))
        if why:
            return why
    site.collectives = site.collectives.replace(node_first=site.near.join())
    return ""


def _tried(site: Site, name: Transport, bucket_bytes: int) -> str:
    """Why a transport is not to be used, after a try of every verb on little and on much."""
    with _using(site, name) as collectives:
        wrong = [
            f"{verb} of {nbytes(tensor)} bytes"
            for tensor in (site.tensor(SMALL), site.tensor(_numel(bucket_bytes)))
            for verb, right in _verbs(collectives, tensor)
            if not right
        ]
    why = f"{' and '.join(wrong)} came out wrong" if wrong else ""
    return selection.all_or_none(site.gather(why))


def _verbs(collectives: WorldCollectives, tensor: Tensor) -> Iterator[tuple[str, bool]]:
    """Every verb on a tensor of fp32, and whether it came out right. Collective."""
    size, rank, numel = collectives.size, collectives.rank, len(tensor)
    ramp = (torch.arange(numel, device=tensor.device) % SMALL).to(tensor.dtype)  # exact sums
    slot = collectives.slot(rank)
    mine = slice(*split(numel, size)[slot : slot + 2])
    total = ramp * size + size * (size - 1) / 2
    collectives.all_reduce(tensor.copy_(ramp + rank)).wait()
    yield "all_reduce", torch.equal(tensor, total)
    collectives.reduce_scatter(tensor.copy_(ramp + rank)).wait()
    yield "reduce_scatter", torch.equal(tensor[mine], total[mine])
    tensor.fill_(-1.0)
    tensor[mine] = ramp[mine]
    collectives.all_gather(tensor).wait()
    yield "all_gather", torch.equal(tensor, ramp)
    collectives.broadcast(tensor.copy_(ramp + rank), size - 1).wait()
    yield "broadcast", torch.equal(tensor, ramp + size - 1)


def _numel(nbytes: int) -> int:
    """How many numbers of fp32 take so many bytes: at least one."""
    return max(1, nbytes // torch.float32.itemsize)


def _timed(site: Site, name: Transport, bucket_bytes: int) -> float:
    """Seconds of an all-reduce of a bucket, on the slowest rank. Collective."""
    device = site.devices.device
    with _using(site, name) as collectives:
        tensor = site.tensor(_numel(bucket_bytes))
        collectives.all_reduce(tensor).wait()
        times = []
        for _ in range(ROUNDS):
            site.gather(None)
            start = time.perf_counter()
            collectives.all_reduce(tensor).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(max(site.gather(time.perf_counter() - start)))
    return statistics.median(times)


@contextmanager
def _using(site: Site, name: Transport) -> Iterator[WorldCollectives]:
    """The world's collectives by a transport, for now."""
    yield site.collectives.replace(transport=name)
