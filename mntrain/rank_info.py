"""Facts about one rank: where it runs, and the memory, time and bytes that it has used."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Place:
    """The host, node and device of one rank."""

    rank: int
    host: str
    node: int
    local_rank: int
    device: str
    threads: int  # intra-op threads of torch
    gpu: str = ""  # identifier that every rank of the host uses; empty on the CPU
    model: str = ""  # product name of the GPU; empty on the CPU


@dataclass(frozen=True)
class Usage:
    """Resources that one rank has used since its start."""

    peak_memory: int  # bytes of host memory, as `peak_memory` measures them
    peak_device_memory: int  # bytes allocated on the GPU; 0 on the CPU
    node_messages: int  # messages sent within the node
    node_bytes: int
    cross_messages: int  # messages sent to other nodes
    cross_bytes: int
    communication_s: float  # seconds in which a collective was in flight
    exposed_s: float  # seconds in which the rank waited for a collective
    device_memory: int = 0  # bytes allocated on the GPU now
    reserved_memory: int = 0  # bytes that torch's caching allocator holds now
    peak_reserved_memory: int = 0
    pinned_memory: int = 0  # bytes of host memory that transports hold pinned


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes. Local.

    On Linux, a page of shared memory that k processes have mapped counts 1/k, so the ranks of a
    node add up to the physical memory in use.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # bytes; Linux counts in KiB
    try:
        counted_twice = _read_proc("status", "RssShmem") - _read_proc("smaps_rollup", "Pss_Shmem")
    except (OSError, KeyError):
        return peak * 1024
    return peak * 1024 - counted_twice


def _read_proc(file: str, field: str) -> int:
    """Return a memory field of /proc/self/`file` in bytes. Raises OSError or KeyError."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines if ":" in line)[field].split()[0]) * 1024


def device_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes that torch holds on a GPU, by the fields of `Usage`; 0 on the CPU. Local.

    Does not synchronize with the device: the allocator's counters live in the process.
    """
    counters = {
        "peak_device_memory": torch.cuda.max_memory_allocated,
        "device_memory": torch.cuda.memory_allocated,
        "reserved_memory": torch.cuda.memory_reserved,
        "peak_reserved_memory": torch.cuda.max_memory_reserved,
    }
    on_gpu = device.type == "cuda"
    return {name: int(read(device)) if on_gpu else 0 for name, read in counters.items()}
