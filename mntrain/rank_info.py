"""Facts about one rank: where it runs, and the memory, time and bytes that it has used."""

import math
import os
import platform
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    model: str = ""  # product name of the GPU, or of the processor
    cpus: int = 0  # logical ones on which it may run
    memory: int = 0  # bytes of the GPU, or of the host


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
    buffer_memory: int = 0  # bytes of other buffers in which messages travel
    before_bytes: int = 0  # of compressed messages to other nodes, if they were not
    compressed_bytes: int = 0  # of these messages


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return what is known of a rank's device and processor, by the fields of `Place`. Local."""
    if device.type == "cuda":
        model = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        model = _processor()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = hasattr(os, "sched_getaffinity")
    return {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "model": model,
        "cpus": len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1,
        "memory": memory,
    }


def _processor() -> str:
    """Return the name of the processor, without what all names have."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            named = (line.partition(":")[2] for line in lines if line.startswith("model name"))
            name = next(named, "")
    except OSError:
        name = ""
    name = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*|\b\d+-Core\b", "", name)
    return " ".join(name.split()) or platform.machine()


def memory_room(device: torch.device, ranks: int) -> float:
    """Return the factor by which the peak of this rank's memory on a GPU may grow; inf on a CPU.

    Local. `ranks` share the GPU, and what is free on it. A tenth is left for fragments. What torch
    has reserved counts as needed, since a loop may reset torch's own peak.
    """
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in old versions
    most = total * (fraction(device) if fraction else 1.0)
    peak = max(reserved, torch.cuda.max_memory_allocated(device))
    return 0.9 * min(most, reserved + free / ranks) / peak if peak else math.inf


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes. Local.

    On Linux, a page of shared memory that k processes have mapped counts 1/k, so the ranks of a
    node add up to the physical memory in use.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # bytes; Linux counts in KiB
    try:
        shared = _read_proc("status", "RssShmem")
        # This reads every page of the process, some 10 ms: not where none is shared.
        own_part = _read_proc("smaps_rollup", "Pss_Shmem") if shared else 0
    except (OSError, KeyError):
        return peak * 1024
    return peak * 1024 - (shared - own_part)


def memory_now(device: torch.device) -> int:
    """Return the bytes that torch has allocated on a GPU, or else the resident size. Local.

    Pages of shared memory count in full; on systems without /proc, the size is the peak.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _read_proc(file: str, field: str) -> int:
    """Return a memory field of a file, as seen from /proc/self, in bytes.

    Raises OSError or KeyError.
    """
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
