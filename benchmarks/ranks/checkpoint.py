"""The ranks' part of checkpoint.py: save and load one state in every way, by turns, and report."""

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
from checkpoint_ways import Absent, Disk, Saved, Way, together, ways
from common import report, versions
from memory import Peak
from mpi4py import MPI
from torch import Tensor

LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Say how long every way to save took in every round, and what memory it needed."""
    options = argparse.ArgumentParser()
    options.add_argument("--stage", type=int, required=True)
    options.add_argument("--millions", type=float, required=True)
    options.add_argument("--repeats", type=int, required=True)
    options.add_argument("--folder", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    with ways(comm, given.folder, given.stage, given.millions) as found:
        memcpy = Memcpy(found.state)
        turns: list[dict[str, Any]] = []
        present = {name: way for name, way in found.ways.items() if not isinstance(way, Absent)}
        for number in range(1 + given.repeats):
            for name in in_turn(list(present), number):
                place = given.folder / name
                turn = take(comm, present[name], place)
                turn["memcpy_s"] = timed(comm, memcpy)
                turns.append({"what": name, "round": number, **turn})
        page = {
            "parameters": found.parameters,
            "state_bytes": found.state_bytes,
            "turns": turns,
            "ways": {name: way.settings for name, way in present.items()},
            "absent": {n: way.why for n, way in found.ways.items() if isinstance(way, Absent)},
            "versions": versions(["deepspeed"]),
        }
    if comm.rank == 0:
        report(page)


def in_turn(names: list[str], number: int) -> list[str]:
    """The order of a round: each begins further on, and every other one goes backwards."""
    at = number // 2 % len(names)
    order = names[at:] + names[:at]
    return order[::-1] if number % 2 else order


def take(comm: MPI.Intracomm, way: Way | Disk, place: Path) -> dict[str, Any]:
    """One save, and where the way can, a load from memory and one from the disk. Collective.

    What is left of it is removed, from the disk also.
    """
    if comm.rank == 0:
        place.mkdir()
    together(comm)
    try:
        if isinstance(way, Disk):
            return {"save_s": timed(comm, lambda: way.write(place))}
        return save(comm, way, place) | load(comm, way, place)
    finally:
        together(comm)
        if comm.rank == 0:
            shutil.rmtree(place)
            os.sync()
        together(comm)


def save(comm: MPI.Intracomm, way: Way, place: Path) -> dict[str, Any]:
    """Save: seconds until all is safe, those of them that training waits for, and memory."""
    gc.collect()
    LIBC.malloc_trim(0)  # what is free already would hide what the save takes
    together(comm)
    peak, saved = Peak(), Saved()
    seconds = timed(comm, lambda: way.save(place, saved))
    peaks = comm.allgather(peak.bytes())
    together(comm)
    return {
        "save_s": seconds,
        "pause_s": seconds if saved.pause_s is None else comm.allreduce(saved.pause_s, MPI.MAX),
        "later_s": None if saved.later_s is None else comm.allreduce(saved.later_s, MPI.MAX),
        "peak_bytes": peaks,
        "file_bytes": sum(path.stat().st_size for path in files(place)),
    }


def load(comm: MPI.Intracomm, way: Way, place: Path) -> dict[str, Any]:
    """Load what was saved: seconds with all of it in the page cache, and with nothing there."""
    if way.load is None:
        return {}
    before = [one.sum(dtype=torch.float64).item() for one in way.tensors()]
    found: dict[str, Any] = {}
    for key in ("warm_s", "cold_s"):
        if key == "cold_s" and not dropped(comm, place):
            found[key] = None
            continue
        with torch.no_grad():
            for tensor in way.tensors():
                tensor.zero_()
        found[key] = timed(comm, lambda: way.load(place))
        after = [one.sum(dtype=torch.float64).item() for one in way.tensors()]
        assert all(map(math.isclose, before, after)), "what was loaded is not what was saved"
    return found


def timed(comm: MPI.Intracomm, act: Callable[[], None]) -> float:
    """Seconds from when all begin until the last has ended. Collective."""
    together(comm)
    comm.Barrier()  # all come within a moment: they begin together
    start = time.perf_counter()
    act()
    seconds = time.perf_counter() - start
    together(comm)
    return comm.allreduce(seconds, MPI.MAX)


def files(place: Path) -> Iterator[Path]:
    """All files below."""
    return (path for path in sorted(place.rglob("*")) if path.is_file())


def dropped(comm: MPI.Intracomm, place: Path) -> bool:
    """Take the files out of the page cache; whether they have left it. Collective."""
    gone = True
    if comm.rank == 0:
        for path in files(place):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # for what no load needs, and no save has made safe
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
            gone = gone and cached(path) < 0.01
    return comm.bcast(gone)


def cached(path: Path) -> float:
    """The share of a file that is in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0.0
    with path.open("rb") as file, mmap(file.fileno(), size, MAP_SHARED, PROT_READ) as mapped:
        pages = (ctypes.c_ubyte * -(-size // os.sysconf("SC_PAGE_SIZE")))()
        view = np.frombuffer(mapped, np.uint8)
        start = ctypes.c_void_p(view.ctypes.data)
        failed = LIBC.mincore(start, ctypes.c_size_t(size), pages)
        del view  # or the file could not be unmapped
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return float(np.mean(np.frombuffer(pages, np.uint8) & 1))


class Memcpy:
    """A copy of a rank's part of the state into memory that it has."""

    def __init__(self, state: list[Tensor]) -> None:
        self._pairs = [(torch.zeros_like(tensor), tensor) for tensor in state]

    def __call__(self) -> None:
        """Copy all."""
        for room, tensor in self._pairs:
            room.copy_(tensor)


if __name__ == "__main__":
    main()
