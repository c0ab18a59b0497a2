"""Files of a checkpoint: manifest.json, and safetensors files that many processes write at once.

manifest.json holds all that is not a tensor, and the checksums of the other files. A folder with a
manifest is a checkpoint. Into a safetensors file, every process writes its own ranges:

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype", "shape", "data_offsets": [from, to]}, ...}, padded with spaces
    data      the tensors, in row-major order, little-endian

Ranges of two processes meet at multiples of PAGE_BYTES alone: a client of a network file system may
write whole pages back, with what it has in the place of the other one's bytes. So each process has
a region of its own for what it alone holds, which ends with padding. A parameter of which several
hold the optimizer state has it in the file in parts, one of each:

    header | a/exp_avg  b/exp_avg[0:300]  padding/0 | b/exp_avg[300:512]  c/exp_avg  padding/1 | ...

Earlier versions, with format 1, wrote all tensors as wholes, without padding; with formats 1 and 2,
some fields of the manifest had other names, and states that are now among the objects their own.

The safetensors library reads these files, but writes only whole files from one process.
Source: https://huggingface.co/docs/safetensors.
"""

import ctypes
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mntrain.checks.storage import PAGE_BYTES
from zero.layout import split

FORMAT = "mntrain checkpoint 3"
_READ = ("mntrain checkpoint 1", "mntrain checkpoint 2", FORMAT)
FILE = "manifest.json"
MODEL = "model.safetensors"  # parameters and buffers, as in the model's state_dict
# "parameter/key": optimizer state by element, and master weights; "other/parameter/number": tensors
# of state that is not by element.
OPTIMIZER = "optimizer.safetensors"
# What ranks have for themselves: "rank/source", states of random generators, and
# "comm_hook/rank/number", tensors of the communication hook.
RANDOM = "random.safetensors"
FILES = (MODEL, OPTIMIZER, RANDOM)

REPLICAS = "replicas"  # in "world" of a manifest: groups of ranks with states of their own
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
_BLOCK_BYTES = 4 << 20  # is still in the processor's cache when it is written
_SYNC_FILE_RANGE_WRITE = 2  # flag of sync_file_range(2)
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)

# Errors for a file that is not there.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes of tensors, by name


class ChecksummedRange(NamedTuple):
    """`length` bytes of a file, from `start` on, and their CRC-32 (as in zlib)."""

    start: int
    length: int
    checksum: int


class FileLayout:
    """Header of a file that is to be written, and the places of its tensors.

    `regions` are the tensors of one writer each. Raises ValueError for a dtype that the format
    lacks.
    """

    def __init__(self, *regions: Shapes) -> None:
        self._described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0
        for number, tensors in enumerate(regions):
            # Widest dtypes first, so that every tensor is aligned to its own item size.
            for name, about in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
                self._add(name, *about)
            if number < len(regions) - 1 and (rest := -self._end % PAGE_BYTES):
                self._add(_padding(number), torch.uint8, (rest,))
        text = json.dumps(self._described).encode()
        text += b" " * (-(8 + len(text)) % PAGE_BYTES)
        self._header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._header) + self._end

    def _add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name} is of dtype {dtype}, which safetensors files do not have: cast it"
            )
        assert name not in self._described, f"{name} twice"
        start, self._end = self._end, self._end + math.prod(shape) * dtype.itemsize
        place = {"shape": shape, "data_offsets": (start, self._end)}
        self._described[name] = {"dtype": DTYPE_NAMES[dtype], **place}

    def part(
        self, index: int, count: int, shared: Collection[str]
    ) -> Iterator[tuple[str, int, int]]:
        """Yield (name, low, high) of the elements of one of `count` writers of a region.

        Pages that hold `shared` tensors alone are divided equally; the first writer has the others.
        """
        for first, last in self._extents(index, count, shared):
            for name, about in self._described.items():
                start, stop = about.get("data_offsets", (0, 0))
                low, high = max(first, start), min(last, stop)
                if low < high:
                    size = DTYPES[about["dtype"]].itemsize
                    yield name, (low - start) // size, (high - start) // size

    def _extents(
        self, index: int, count: int, shared: Collection[str]
    ) -> Iterator[tuple[int, int]]:
        """Yield the first and the last byte of what a writer of a region has of it."""
        runs: list[tuple[int, int]] = []  # of pages that hold shared tensors alone
        others = [
            about["data_offsets"]
            for name, about in self._described.items()
            if "data_offsets" in about and name not in shared
        ]
        at, pages = 0, -(-self._end // PAGE_BYTES)
        for start, stop in [*others, (pages * PAGE_BYTES, pages * PAGE_BYTES)]:
            if at < start // PAGE_BYTES:
                runs.append((at, start // PAGE_BYTES))
            at = max(at, -(-stop // PAGE_BYTES))
        first, last = split(sum(high - low for low, high in runs), count)[index : index + 2]
        seen = at = 0
        for start, stop in [*runs, (pages, pages)]:
            if index == 0 and at < start:
                yield at * PAGE_BYTES, start * PAGE_BYTES
            low, high = (start + min(max(end - seen, 0), stop - start) for end in (first, last))
            if low < high:
                yield low * PAGE_BYTES, high * PAGE_BYTES
            seen, at = seen + stop - start, stop

    def write_header(self, file: int) -> list[ChecksummedRange]:
        """Write the header, which one process does, to an open file."""
        return _write(file, memoryview(self._header), 0)

    def write_padding(self, file: int, region: int) -> list[ChecksummedRange]:
        """Write the end of a region, if it is padded."""
        about = self._described.get(name := _padding(region))
        if about is None:
            return []
        return self.write(file, name, torch.zeros(about["shape"], dtype=torch.uint8), 0)

    def write(self, file: int, name: str, flat: Tensor, low: int) -> list[ChecksummedRange]:
        """Write a tensor's elements from `low` on, flat and in the dtype of the file."""
        assert sys.byteorder == "little", "safetensors files are little-endian"
        start, stop = (len(self._header) + at for at in self._described[name]["data_offsets"])
        start += low * flat.element_size()
        assert start + flat.nbytes <= stop
        return _write(file, flat.detach().contiguous().view(torch.uint8).numpy().data, start)


def _padding(region: int) -> str:
    return f"padding/{region}"


def open_tensors(path: Path) -> safe_open:
    """Open a file with the safetensors library; its tensors are mapped, not read, until used.

    Raises ValueError for a file that is truncated or of another format.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        # Not with the library's text, which may quote bytes of a damaged header.
        raise ValueError(f"{path.name} is truncated, or not a safetensors file") from error


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file in the block, a new one for this user alone. Raises OSError."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder, such as a renamed file, are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_at(file: int, data: memoryview, start: int) -> None:
    """Write all of some bytes at a place of an open file. Raises OSError."""
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], start + written)


def _write(file: int, data: memoryview, start: int) -> list[ChecksummedRange]:
    """Write data, and start the disk at once (Linux) instead of at the fsync after all writes."""
    ranges = []
    for low in range(0, len(data), RANGE_BYTES):
        part, checksum = data[low : low + RANGE_BYTES], 0
        for at in range(0, len(part), _BLOCK_BYTES):
            block, offset = part[at : at + _BLOCK_BYTES], start + low + at
            checksum = zlib.crc32(block, checksum)
            write_at(file, block, offset)
            if _sync_file_range is not None:
                extent = ctypes.c_int64(offset), ctypes.c_int64(len(block))
                _sync_file_range(file, *extent, _SYNC_FILE_RANGE_WRITE)
        ranges.append(ChecksummedRange(start + low, len(part), checksum))
    return ranges


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of one parameter, without its tensors in OPTIMIZER."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # the dimensions in memory order (`zero.kernels.order`)
    tensor_keys: tuple[str, ...]  # keys of the tensors in OPTIMIZER, which lie in this order
    others: dict[str, Any]  # other values, as `state_values.encode_values` returns them
    places: dict[str, Any] = field(default_factory=dict)  # of tensors in them (`StateSlice.places`)
    cuts: tuple[int, ...] = ()  # the first elements of the parts in the file; none: it has wholes

    def merged(self, other: "ParameterState") -> "ParameterState":
        """Return the state with the parts of another rank's, too."""
        return replace(self, cuts=tuple(sorted({*self.cuts, *other.cuts})))

    def tensor(self, file: safe_open, name: str, key: str) -> Tensor:
        """Return one of its tensors in OPTIMIZER, flat if the parameter is not row-major."""
        flat = self.elements(file, name, key, 0, math.prod(self.shape))
        return flat.reshape(self.shape) if row_major(self.order) else flat

    def elements(self, file: safe_open, name: str, key: str, low: int, high: int) -> Tensor:
        """Return elements `low` to `high` of one of its tensors in OPTIMIZER, flat.

        `name` is the parameter's, with its replica.
        """
        if not self.cuts:
            whole: Tensor = file.get_tensor(f"{name}/{key}")
            return whole.reshape(-1)[low:high]
        parts = [
            file.get_tensor(part_name(name, key, start, stop))[max(low - start, 0) : high - start]
            for start, stop in pairwise((*self.cuts, math.prod(self.shape)))
            if start < high and low < stop
        ]
        return torch.cat(parts)


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json. A run gives what is known of it; the saver completes it."""

    step: int  # number of steps taken
    config: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 0
    skipped_steps: int = 0
    eval_loss: float | None = None
    # Sizes of the data's files, values of the task, and digests of samples, which are compared in
    # a resumed run.
    data: Mapping[str, Any] = field(default_factory=dict)
    scored_by: str = "eval_loss"  # what the best checkpoint is chosen by
    position: tuple[int, int] | None = None  # epoch and offset of the next step's first sample
    score: float | None = None  # by it, where it is not eval_loss; the lowest is the best
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    # "ranks" and "nodes" that wrote it, and "replicas" if there are several.
    world: dict[str, Any] = field(default_factory=dict)
    wrote_s: float = 0.0  # from the snapshot until every rank's part was on the disk
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    loss_scale: dict[str, Any] = field(default_factory=dict)
    parameter_states: dict[str, ParameterState] = field(default_factory=dict)
    # By file, in order, without gaps.
    checksums: dict[str, list[ChecksummedRange]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)  # states, as `objects.merge` returns them
    optimizer_steps: int | None = None  # calls of `step`; None: as many as steps of the run
    optimizer_class: str = ""  # its name; empty if it is not known, as in earlier versions
    # By replica: `zero.exchange.replicas.Replicas.numbers`.
    sync_weights: list[list[float]] = field(default_factory=list)
    # By replica, if there are several, its options of each parameter group: some optimizers keep
    # numbers there that follow from the gradients.
    replica_options: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(part.length for parts in self.checksums.values() for part in parts)

    @property
    def writers(self) -> str:
        """The size of the world that wrote it, as in "2 ranks on 1 node"."""
        counts = ((self.world[f"{kind}s"], kind) for kind in ("rank", "node"))
        return " on ".join(f"{count} {kind}{'s' * (count > 1)}" for count, kind in counts)

    def score_by(self, metric: str) -> float | None:
        """Return the score of the evaluation after this step by a metric, if there is one."""
        if metric == "eval_loss":
            return self.eval_loss
        return self.score if self.scored_by == metric else None

    def to_json(self) -> str:
        """Return the text of the file. Raises ValueError for an option that JSON cannot hold."""
        try:
            content = json.dumps(asdict(self))
        except TypeError as error:
            raise ValueError(f"the optimizer's options cannot be saved: {error}") from error
        whole = {"format": FORMAT, "checksum": zlib.crc32(content.encode()), "content": content}
        return json.dumps(whole, indent=1) + "\n"


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the number of steps that the name of a checkpoint's folder tells; None of others."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


def row_major(order: Sequence[int]) -> bool:
    """Return whether dimensions in memory order are those of a row-major tensor."""
    return list(order) == sorted(order)


def part_name(parameter: str, key: str, low: int, high: int) -> str:
    """Return the name in OPTIMIZER of some elements of a parameter's optimizer state."""
    return f"{parameter}/{key}[{low}:{high}]"


def replica_name(parameter: str, replica: int) -> str:
    """Return the name under which a replica keeps its own state; what all share is replica 0's."""
    return f"{parameter}@{replica}" if replica else parameter


# Names of fields in formats 1 and 2.
_EARLIER = {
    "groups": "param_groups",
    "kept": "parameter_states",
    "runs": "checksums",
    "by_element": "tensor_keys",
}


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises ValueError if it is missing or damaged, and OSError if it cannot be read.
    """
    try:
        whole = json.loads((folder / FILE).read_bytes())
        content = str(whole["content"])
        if whole["format"] not in _READ:
            problem = f"is of format {whole['format']!r}, and this program reads {FORMAT!r}"
        elif zlib.crc32(content.encode()) != whole["checksum"]:
            problem = "is damaged: its checksum differs"
        else:
            return _parse(json.loads(content))
    except ABSENT as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = "is not that of a checkpoint, or is damaged"
    raise ValueError(f"{FILE} {problem}")


def _parse(content: dict[str, Any]) -> Manifest:
    fields = _renamed(content)
    for name in ("hook", "unnamed_state"):  # of formats 1 and 2
        fields["objects"] = fields.get("objects", {}) | fields.pop(name, {})
    for name, about in fields["parameter_states"].items():
        state = _renamed(about)
        shape, order, keys = (tuple(state[key]) for key in ("shape", "order", "tensor_keys"))
        places, cuts = state.get("places", {}), tuple(state.get("cuts", ()))
        states = ParameterState(shape, order, keys, state["others"], places, cuts)
        fields["parameter_states"][name] = states
    for name, parts in fields["checksums"].items():
        fields["checksums"][name] = [ChecksummedRange(*part) for part in parts]
    if fields.get("optimizer_steps") is None:
        fields["optimizer_steps"] = fields["step"]
    return Manifest(**fields)


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {_EARLIER.get(name, name): value for name, value in fields.items()}
