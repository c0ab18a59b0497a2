"""Memory-mapped files of tokens."""

import bisect
import functools
import itertools
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mntrain.corpus.text_files import ID_SUFFIXES, is_token_ids

_BLOCK = 1 << 22  # tokens that are scanned at once
# A map holds a file descriptor; a small limit of a process leaves few of them.
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_MOST_MAPS = 64 if _OPEN_FILES < 0 else max(1, min(64, _OPEN_FILES // 8))


class Corpus:
    """The concatenated tokens of some files, in the files' order. Picklable.

    A .npy file holds token ids as a 1-D array of integers, a .bin file as little-endian uint16, or
    as `bin_dtype` says. Any other file is text, whose bytes are the tokens. Raises ValueError for a
    malformed file, and for text mixed with token ids.
    """

    def __init__(self, files: Sequence[Path], bin_dtype: str = "<u2") -> None:
        texts = [path for path in files if not is_token_ids(path)]
        self.is_text = len(texts) == len(files)
        if texts and not self.is_text:
            raise ValueError(
                f"{texts[0]} is text, other files hold token ids ({', '.join(ID_SUFFIXES)}): "
                "let --data.glob match only one kind"
            )
        _map_tokens.cache_clear()  # files may have changed since an earlier corpus of this process
        self._bin_dtype = bin_dtype
        lengths = {path: n for path in files if (n := _count_tokens(path, bin_dtype))}
        self._files = tuple(lengths)
        self._ends = tuple(itertools.accumulate(lengths.values()))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return a copy of the tokens [start, stop), which must not be empty; 1-D int64."""
        assert 0 <= start < stop <= len(self), (start, stop, len(self))
        parts = []
        file = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, self._ends[file])
            begin = self._ends[file - 1] if file else 0
            tokens = _map_tokens(self._files[file], self._bin_dtype)
            parts.append(tokens[start - begin : end - begin].astype(np.int64))
            start, file = end, file + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def id_range(self, max_bytes: float = float("inf")) -> tuple[int, int]:
        """Return the lowest and the highest token id, by scanning the files in blocks.

        Of more than `max_bytes`, only evenly spaced blocks are scanned. Files whose dtype cannot
        hold other ids are not read: those of bytes.
        """
        if self.is_text:
            return 0, 255
        blocks = [
            (path, start)
            for path, count in zip(self._files, np.diff((0, *self._ends)), strict=True)
            for start in range(0, int(count), _BLOCK)
        ]
        if not blocks:
            return 0, 0
        itemsize = max(_map_tokens(path, self._bin_dtype).itemsize for path in self._files)
        stride = max(1, -(-len(blocks) * _BLOCK * itemsize // max_bytes)) if blocks else 1
        low, high = 0, 0
        for index in {*range(0, len(blocks), int(stride)), len(blocks) - 1}:
            path, start = blocks[index]
            ids = _map_tokens(path, self._bin_dtype)[start : start + _BLOCK]
            low, high = min(low, int(ids.min())), max(high, int(ids.max()))
        return low, high


@functools.lru_cache(maxsize=_MOST_MAPS)
def _map_tokens(path: Path, bin_dtype: str) -> npt.NDArray[Any]:
    """Map the tokens of a file, 1-D. Raises ValueError for a malformed .npy file."""
    if path.suffix != ".npy":
        return np.asarray(
            np.memmap(path, dtype=bin_dtype if path.suffix == ".bin" else "u1", mode="r")
        )
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of token ids: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {ids.dtype} of shape {ids.shape}: "
            "save the token ids as a 1-D array of integers"
        )
    return np.asarray(ids)


def _count_tokens(path: Path, bin_dtype: str) -> int:
    """Return the number of tokens in a file, from its size or its header."""
    if path.suffix == ".npy":
        return len(_map_tokens(path, bin_dtype))
    size = path.stat().st_size
    if path.suffix != ".bin":
        return size
    itemsize = np.dtype(bin_dtype).itemsize
    if size % itemsize:
        raise ValueError(
            f"{path} has {size} bytes, an odd number: "
            "a .bin file holds token ids as little-endian uint16, two bytes each"
        )
    return size // itemsize
