"""Reading a file of a checkpoint, every byte compared with its checksum on the way. No MPI."""

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mntrain.checkpoint.format import ChecksummedRange, FileLayout, as_bytes, read_into


class VerifiedFile:
    """Reads one file, whose runs are the manifest's: all of it, in order. Use it in `with`.

    It has one run in memory at a time, so reading onward reads each once. ValueError, now and from
    what it reads later, that names the file and the bytes that are damaged.
    """

    def __init__(self, path: Path, runs: Sequence[ChecksummedRange]) -> None:
        self.layout = FileLayout.read(path)
        self._path, self._runs = path, runs
        self._starts = [run.start for run in runs]
        self._room = memoryview(bytearray(max(run.length for run in runs)))
        self._held: int | None = None  # which run is in the room
        self._file = os.open(path, os.O_RDONLY)
        try:
            for _ in self.pieces(0, len(self.layout.header)):
                pass  # the layout comes from these bytes
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "VerifiedFile":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def read(self, name: str, low: int, high: int) -> Tensor:
        """A tensor's elements from low to high, flat, in new host memory."""
        entry = self.layout.entries[name]
        flat = torch.empty(high - low, dtype=entry.dtype)
        room, done = as_bytes(flat), 0
        start = entry.start + low * entry.dtype.itemsize
        for piece in self.pieces(start, start + len(room)):
            room[done : done + len(piece)] = piece
            done += len(piece)
        return flat

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The file's bytes from start to stop, in order; each piece is good until the next one."""
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            run = self._runs[index]
            end = min(stop, run.start + run.length)
            yield self._verified(index)[start - run.start : end - run.start]
            start, index = end, index + 1

    def _verified(self, index: int) -> memoryview:
        """The bytes of a run, in the room."""
        run = self._runs[index]
        data = self._room[: run.length]
        if index != self._held:
            self._held = None
            read_into(self._file, data, run.start)
            if zlib.crc32(data) != run.checksum:
                raise ValueError(
                    f"{self._path} is damaged between bytes {run.start} and "
                    f"{run.start + run.length}"
                )
            self._held = index
        return data
