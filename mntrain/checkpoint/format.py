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
from pathlib import Path
from typing import Any, NamedTuple

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

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes of tensors, by name


class ChecksummedRange(NamedTuple):
    """`length` bytes of a file, from `start` on, and their CRC-32 (as of zlib)."""

    start: int
    length: int
    checksum: int


class FileLayout:
    """Header of a file that is to be written, and the places of its tensors.

    Raises ValueError for a dtype that the format lacks.
    """

    def __init__(self, tensors: Shapes) -> None:
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places: dict[str, tuple[int, int]] = {}
        at = 0
        # Widest dtypes first, so that every tensor is aligned to its own item size.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            if dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"{name} is of dtype {dtype}, which safetensors files do not have: cast it"
                )
            places[name] = (at, at + math.prod(shape) * dtype.itemsize)
            described[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": shape,
                "data_offsets": places[name],
            }
            at = places[name][1]
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + at
        # First and last byte of each tensor in the file.
        self.places = {
            name: (len(self.header) + start, len(self.header) + stop)
            for name, (start, stop) in places.items()
        }


class RangeWriter:
    """Writer of ranges of an existing file of full length."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._layout = layout
        self._file = os.open(path, os.O_WRONLY)
        self.ranges: list[ChecksummedRange] = []  # written so far

    def write_header(self) -> None:
        """Write the header, which one process does."""
        self._write(memoryview(self._layout.header), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def write(self, name: str, flat: Tensor, low: int) -> None:
        """Write a tensor's elements from `low` on, flat and in the dtype of the file."""
        assert sys.byteorder == "little", "safetensors files are little-endian"
        start, stop = self._layout.places[name]
        start += low * flat.element_size()
        assert start + flat.nbytes <= stop
        self._write(flat.detach().contiguous().view(torch.uint8).numpy().data, start)

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._file)

    def _write(self, data: memoryview, start: int) -> None:
        for low in range(0, len(data), RANGE_BYTES):
            part, checksum = data[low : low + RANGE_BYTES], 0
            for at in range(0, len(part), _BLOCK_BYTES):
                block = part[at : at + _BLOCK_BYTES]
                checksum = zlib.crc32(block, checksum)
                _write_block(self._file, block, start + low + at)
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
    with path.open("xb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)


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


def _write_block(file: int, data: memoryview, start: int) -> None:
    """Write data, and have the disk begin now (Linux), rather than at the fsync after all."""
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], start + written)
    if _sync_file_range is not None:
        offset, nbytes = ctypes.c_int64(start), ctypes.c_int64(len(data))
        _sync_file_range(file, offset, nbytes, _SYNC_FILE_RANGE_WRITE)
