"""The rank script of checkpoint.py: save and load by every method, print one JSON object."""

import argparse
import ctypes
import gc
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from mmap import MAP_SHARED, PROT_READ, mmap
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and mntrain count the cores
import numpy as np
import torch
from checkpoint_methods import Absent, DiskWrite, Method, SaveTimes, barrier, methods
from common import report, versions
from memory import Peak
from mpi4py import MPI
from torch import Tensor

LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Measure time and memory of every method in every round, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--millions", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    with methods(comm, options.folder, options.stage, options.millions) as setup:
        memcpy = Memcpy(setup.state)
        turns: list[dict[str, Any]] = []
        present = {name: it for name, it in setup.methods.items() if not isinstance(it, Absent)}
        for number in range(1 + options.repeats):
            for name in order(list(present), number):
                turn = take_turn(comm, present[name], options.folder / name)
                turn["memcpy_s"] = timed(comm, memcpy)
                turns.append({"what": name, "round": number, **turn})
        page = {
            "parameters": setup.parameters,
            "state_bytes": setup.state_bytes,
            "turns": turns,
            "ways": {name: method.settings for name, method in present.items()},
            "absent": {
                name: it.reason for name, it in setup.methods.items() if isinstance(it, Absent)
            },
            "versions": versions(["deepspeed"]),
        }
    if comm.rank == 0:
        report(page)


def order(names: list[str], number: int) -> list[str]:
    """Return the order of a round: rotated, and reversed in every other round."""
    first = number // 2 % len(names)
    rotated = names[first:] + names[:first]
    return rotated[::-1] if number % 2 else rotated


def take_turn(comm: MPI.Intracomm, method: Method | DiskWrite, path: Path) -> dict[str, Any]:
    """Save once, load from the page cache and from the disk if possible, and remove the files.

    Collective.
    """
    if comm.rank == 0:
        path.mkdir()
    barrier(comm)
    try:
        if isinstance(method, DiskWrite):
            return {"save_s": timed(comm, lambda: method.write(path))}
        return save(comm, method, path) | load(comm, method, path)
    finally:
        barrier(comm)
        if comm.rank == 0:
            shutil.rmtree(path)
            os.sync()
        barrier(comm)


def save(comm: MPI.Intracomm, method: Method, path: Path) -> dict[str, Any]:
    """Save, and return the time until all is on disk, the pause of training, and peak memory."""
    gc.collect()
    LIBC.malloc_trim(0)  # free memory that is not returned would hide what the save allocates
    barrier(comm)
    peak, times = Peak(), SaveTimes()
    seconds = timed(comm, lambda: method.save(path, times))
    peaks = comm.allgather(peak.bytes())
    barrier(comm)
    return {
        "save_s": seconds,
        "pause_s": seconds if times.pause_s is None else comm.allreduce(times.pause_s, MPI.MAX),
        "later_s": None if times.later_s is None else comm.allreduce(times.later_s, MPI.MAX),
        "peak_bytes": peaks,
        "file_bytes": sum(file.stat().st_size for file in files(path)),
    }


def load(comm: MPI.Intracomm, method: Method, path: Path) -> dict[str, Any]:
    """Load the state, and return the time with files in the page cache, and without."""
    if method.load is None:
        return {}
    before = [tensor.sum(dtype=torch.float64).item() for tensor in method.tensors()]
    times: dict[str, Any] = {}
    for key in ("warm_s", "cold_s"):
        if key == "cold_s" and not evict(comm, path):
            times[key] = None
            continue
        with torch.no_grad():
            for tensor in method.tensors():
                tensor.zero_()
        times[key] = timed(comm, lambda: method.load(path))
        after = [tensor.sum(dtype=torch.float64).item() for tensor in method.tensors()]
        assert all(map(math.isclose, before, after)), "the loaded state differs from the saved one"
    return times


def timed(comm: MPI.Intracomm, work: Callable[[], None]) -> float:
    """Return the seconds from a common start until the last rank has finished. Collective."""
    barrier(comm)
    comm.Barrier()  # all ranks arrive at almost the same time, and so start together
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    barrier(comm)
    return comm.allreduce(seconds, MPI.MAX)


def files(folder: Path) -> Iterator[Path]:
    """Yield all files below a directory."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def evict(comm: MPI.Intracomm, folder: Path) -> bool:
    """Remove the files from the page cache, and return whether that worked. Collective."""
    evicted = True
    if comm.rank == 0:
        for path in files(folder):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # dirty pages cannot be evicted
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
            evicted = evicted and cached(path) < 0.01
    return comm.bcast(evicted)


def cached(path: Path) -> float:
    """Return the fraction of a file that is in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0.0
    with path.open("rb") as file, mmap(file.fileno(), size, MAP_SHARED, PROT_READ) as mapped:
        pages = (ctypes.c_ubyte * -(-size // os.sysconf("SC_PAGE_SIZE")))()
        view = np.frombuffer(mapped, np.uint8)
        start = ctypes.c_void_p(view.ctypes.data)
        failed = LIBC.mincore(start, ctypes.c_size_t(size), pages)
        del view  # the file cannot be unmapped while it exists
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return float(np.mean(np.frombuffer(pages, np.uint8) & 1))


class Memcpy:
    """A copy of a rank's part of the state into existing memory."""

    def __init__(self, state: list[Tensor]) -> None:
        self._pairs = [(torch.zeros_like(tensor), tensor) for tensor in state]

    def __call__(self) -> None:
        """Copy all tensors."""
        for target, tensor in self._pairs:
            target.copy_(tensor)


if __name__ == "__main__":
    main()
