"""Memory-mapped files of tokens."""

import bisect
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mntrain.corpus.text_files import ID_SUFFIXES, is_token_ids

_BLOCK = 1 << 22  # tokens that are scanned at once
_MOST_MAPS = 64  # at a time: each holds a file descriptor


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
        return np.concatenate(parts)

    def id_range(self, most: float = float("inf")) -> tuple[int, int]:
        """Return the lowest and the highest token id, at most and at least 0.

        Of more than `most` tokens, only evenly spaced blocks are scanned; of text, none.
        """
        if self.is_text:
            return 0, 255
        starts = range(0, len(self), _BLOCK)
        stride = max(1, int(-(-len(self) // most)))
        low, high = 0, 0
        for start in {*starts[::stride], *starts[-1:]}:
            ids = self.read(start, min(start + _BLOCK, len(self)))
            low, high = min(low, int(ids.min())), max(high, int(ids.max()))
        return low, high


@functools.lru_cache(maxsize=_MOST_MAPS)
def _map_tokens(path: Path, bin_dtype: str) -> npt.NDArray[Any]:
    """Map the tokens of a file, 1-D. Raises ValueError for a malformed .npy file."""
    if path.suffix != ".npy":
        dtype = bin_dtype if path.suffix == ".bin" else "u1"
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
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
    count, rest = divmod(
        path.stat().st_size, np.dtype(bin_dtype).itemsize if path.suffix == ".bin" else 1
    )
    if rest:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, an odd number: "
            "a .bin file holds token ids as little-endian uint16, two bytes each"
        )
    return count
