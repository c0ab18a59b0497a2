"""Safetensors files that many processes write at once, each its own ranges, with checksums.

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype", "shape", "data_offsets": [from, to]}, ...}, padded with spaces
    data      the tensors, in row-major order, little-endian

The safetensors library reads these files, but writes only whole files from one process.
Source: https://huggingface.co/docs/safetensors.
"""

import ctypes
import errno
import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
RANGE_BYTES = 16 << 20  # longest range with one checksum
_HEADER_ALIGNMENT = 8
_BLOCK_BYTES = 4 << 20  # is still in the processor's cache when it is written
_SYNC_FILE_RANGE_WRITE = 2  # flag of sync_file_range(2)
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


@dataclass(frozen=True)
class TensorEntry:
    """Dtype, shape and place of a tensor; `start` and `stop` are bytes from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class ChecksummedRange:
    """`length` bytes of a file, from `start` on, and their CRC-32 (as of zlib)."""

    start: int
    length: int
    checksum: int


@dataclass(frozen=True)
class FileLayout:
    """Header and tensor places of a file that is to be written."""

    header: bytes
    entries: Mapping[str, TensorEntry]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> "FileLayout":
        """Lay out tensors by name. Raises ValueError for a dtype that the format lacks."""
        described: dict[str, Any] = {}
        at = 0
        # Widest dtypes first, so that every tensor is aligned to its own item size.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            if dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"{name} is of dtype {dtype}, which safetensors files do not have: cast it"
                )
            stop = at + math.prod(shape) * dtype.itemsize
            described[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [at, stop],
            }
            at = stop
        text = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        entries = {
            name: TensorEntry(*tensors[name], *(len(header) + at for at in entry["data_offsets"]))
            for name, entry in described.items()
        }
        return cls(header, entries, len(header) + at)


class RangeWriter:
    """Writer of ranges of an existing file of full length. A context manager."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._layout = layout
        self._file = os.open(path, os.O_WRONLY)
        self.ranges: list[ChecksummedRange] = []  # written so far

    def __enter__(self) -> "RangeWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def write_header(self) -> None:
        """Write the header."""
        self._write(memoryview(self._layout.header), 0)

    def write(self, name: str, flat: Tensor, low: int) -> None:
        """Write a tensor's elements from `low` on, flat and in the dtype of the file."""
        entry = self._layout.entries[name]
        data = _as_bytes(flat)
        start = entry.start + low * entry.dtype.itemsize
        assert start + len(data) <= entry.stop
        self._write(data, start)

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._file)

    def _write(self, data: memoryview, start: int) -> None:
        for low in range(0, len(data), RANGE_BYTES):
            part, checksum = data[low : low + RANGE_BYTES], 0
            for at in range(0, len(part), _BLOCK_BYTES):
                block = part[at : at + _BLOCK_BYTES]
                checksum = zlib.crc32(block, checksum)
                _write_all(self._file, block, start + low + at)
                _start_writeback(self._file, start + low + at, len(block))
            self.ranges.append(ChecksummedRange(start + low, len(part), checksum))


def open_tensors(path: Path) -> safe_open:
    """Open a file with the safetensors library; its tensors are mapped, not read, until used.

    Raises ValueError for a file that is truncated or of another format.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        # Not with the library's text, which may quote bytes of a damaged header.
        raise ValueError(f"{path.name} is truncated, or not a safetensors file") from error


def find_damage(path: Path, ranges: Iterable[ChecksummedRange]) -> ChecksummedRange | None:
    """Return the first of these ranges of a file whose checksum differs, or None."""
    buffer = memoryview(bytearray(RANGE_BYTES))
    with path.open("rb") as file:
        for part in ranges:
            data = buffer[: part.length]
            file.seek(part.start)
            if file.readinto(data) != part.length or zlib.crc32(data) != part.checksum:
                return part
    return None


def create(path: Path, nbytes: int) -> None:
    """Create a file of `nbytes`, and reserve them on the disk. Raises OSError if it is full."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, nbytes)
        else:
            os.ftruncate(file, nbytes)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder, such as a renamed file, are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def describe_write_error(error: OSError, nbytes: int, folder: Path) -> str:
    """Return what failed; for a full disk, with the bytes needed and the bytes free."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not folder.exists():
        return f"{folder}: {error.strerror}"
    free = shutil.disk_usage(folder).free
    return (
        f"{error.strerror}: it needs {nbytes / 1e6:.1f} MB, of which {free / 1e6:.1f} MB are free "
        f"in {folder} now"
    )


def _write_all(file: int, data: memoryview, start: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], start + written)


def _start_writeback(file: int, start: int, length: int) -> None:
    """Start writing pages to the disk now (Linux), rather than at the fsync after the last one."""
    if _sync_file_range is not None:
        offset, nbytes = ctypes.c_int64(start), ctypes.c_int64(length)
        _sync_file_range(file, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def _as_bytes(flat: Tensor) -> memoryview:
    """Return a view of the bytes of a flat host tensor."""
    assert sys.byteorder == "little", "safetensors files are little-endian; nothing is swapped here"
    array = flat.detach().contiguous().view(torch.uint8).numpy()
    return memoryview(array.data)
