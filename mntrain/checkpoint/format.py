"""Safetensors files that many processes write and read at once, each in ranges of its own.

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype", "shape", "data_offsets": [from, to]}, ...}, padded with spaces
    data      the tensors, row by row, little-endian

Source: the safetensors format, https://huggingface.co/docs/safetensors. Its own library writes
whole files; it reads these.
"""

import ctypes
import json
import math
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER_BYTES = 100_000_000  # as in the format's own library
RUN_BYTES = 16 << 20  # what is written, and checked, in one go
_ALIGNED = 8
_PIECE_BYTES = 4 << 20  # of a run: is still in the processor's cache when it is written
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2)
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in a file. `start` and `stop` are in bytes from the beginning of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class ChecksummedRange:
    """Bytes of a file, from `start` on, and their checksum (CRC-32, as zlib has it)."""

    start: int
    length: int
    checksum: int


class FileLayout:
    """Where which tensor lies in a file."""

    def __init__(self, header: bytes, entries: Mapping[str, TensorEntry]) -> None:
        self.header, self.entries = header, dict(entries)
        self.nbytes = max((e.stop for e in entries.values()), default=len(header))

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> "FileLayout":
        """The layout of tensors by name. ValueError for a dtype that the format does not have."""
        described: dict[str, Any] = {}
        at = 0
        # Widest first: so that all lie at multiples of their own width.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            if dtype not in NAMES:
                raise ValueError(
                    f"{name} is of dtype {dtype}, which safetensors files do not have: cast it"
                )
            stop = at + math.prod(shape) * dtype.itemsize
            described[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [at, stop],
            }
            at = stop
        words = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
        words += b" " * (-len(words) % _ALIGNED)
        header = len(words).to_bytes(8, "little") + words
        return cls(header, _entries(described, len(header)))

    @classmethod
    def read(cls, path: Path) -> "FileLayout":
        """The layout of a file. ValueError for one that is none, or is cut short."""
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
                raise ValueError(f"{path.name} is no safetensors file, or is cut short")
            words = file.read(length)
        try:
            described = json.loads(words)
            described.pop("__metadata__", None)
            layout = cls(length.to_bytes(8, "little") + words, _entries(described, 8 + length))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path.name} has a header that cannot be read") from error
        if layout.nbytes != size:
            raise ValueError(f"{path.name} has {size} bytes, and its header says {layout.nbytes}")
        return layout


class RangeWriter:
    """Writes ranges of one file, which exists and has its whole length. Use it in `with`."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._layout = layout
        self._file = os.open(path, os.O_WRONLY)
        self.runs: list[ChecksummedRange] = []  # what has been written

    def __enter__(self) -> "RangeWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def header(self) -> None:
        """Write the header."""
        self._write(memoryview(self._layout.header), 0)

    def write(self, name: str, flat: Tensor, low: int) -> None:
        """Write a tensor's elements from `low` on; they are flat, and of the file's dtype."""
        entry = self._layout.entries[name]
        data = as_bytes(flat)
        start = entry.start + low * entry.dtype.itemsize
        assert start + len(data) <= entry.stop
        self._write(data, start)

    def sync(self) -> None:
        """Return when all is on the disk."""
        os.fsync(self._file)

    def _write(self, data: memoryview, start: int) -> None:
        for at in range(0, len(data), RUN_BYTES):
            run, checksum = data[at : at + RUN_BYTES], 0
            for begin in range(0, len(run), _PIECE_BYTES):
                piece = run[begin : begin + _PIECE_BYTES]
                checksum = zlib.crc32(piece, checksum)
                write_from(self._file, piece, start + at + begin)
                start_writeback(self._file, start + at + begin, len(piece))
            self.runs.append(ChecksummedRange(start + at, len(run), checksum))


class RangeReader:
    """Reads ranges of one file. Use it in `with`. ValueError as `FileLayout.read`."""

    def __init__(self, path: Path) -> None:
        self.layout = FileLayout.read(path)
        self._path = path
        self._file = os.open(path, os.O_RDONLY)

    def __enter__(self) -> "RangeReader":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def read(self, name: str, low: int, high: int) -> Tensor:
        """A tensor's elements from low to high, flat, in new host memory."""
        entry = self.layout.entries[name]
        flat = torch.empty(high - low, dtype=entry.dtype)
        read_into(self._file, as_bytes(flat), entry.start + low * entry.dtype.itemsize)
        return flat


def create(path: Path, nbytes: int) -> None:
    """Make a file of so many bytes, and have the disk put them aside. OSError if it has not."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, nbytes)
        else:
            os.ftruncate(file, nbytes)
    finally:
        os.close(file)


def wrong_run(path: Path, runs: list[ChecksummedRange]) -> ChecksummedRange | None:
    """The first of these runs of a file that does not have its checksum."""
    file = os.open(path, os.O_RDONLY)
    try:
        room = memoryview(bytearray(RUN_BYTES))
        for run in runs:
            part = room[: run.length]
            try:
                read_into(file, part, run.start)
            except ValueError:
                return run
            if zlib.crc32(part) != run.checksum:
                return run
    finally:
        os.close(file)
    return None


def read_into(file: int, room: memoryview, start: int) -> None:
    """Fill a room with a file's bytes from `start` on. ValueError where the file ends before."""
    done = 0
    while done < len(room):
        got = os.preadv(file, [room[done:]], start + done)
        if not got:
            raise ValueError(f"the file ends before byte {start + len(room)}")
        done += got


def write_from(file: int, data: memoryview, start: int) -> None:
    """Write all of the data into a file, from `start` on."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], start + done)


def start_writeback(file: int, start: int, length: int) -> None:
    """Let the disk begin with these bytes of a file, where the system can be asked to (Linux).

    Else it would begin at the fsync after the last of them.
    """
    if _sync_file_range is not None:
        _sync_file_range(file, ctypes.c_int64(start), ctypes.c_int64(length), _WRITE)


def as_bytes(flat: Tensor) -> memoryview:
    """The bytes of a flat contiguous host tensor. A view."""
    assert sys.byteorder == "little", "safetensors are little-endian, and nothing here swaps"
    array = flat.detach().contiguous().view(torch.uint8).numpy()
    return memoryview(array.data)


def _entries(described: Mapping[str, Any], after: int) -> dict[str, TensorEntry]:
    entries = {}
    for name, about in described.items():
        dtype, shape = DTYPES[about["dtype"]], tuple(map(int, about["shape"]))
        start, stop = map(int, about["data_offsets"])
        if start < 0 or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has another length than its shape")
        entries[name] = TensorEntry(dtype, shape, after + start, after + stop)
    return entries
