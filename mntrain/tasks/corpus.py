"""Token sequences in memory-mapped files: the bytes of a text, or token ids."""

import bisect
import itertools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BYTE_VALUES = 256
"""Vocabulary of a text, whose tokens are its bytes."""

_MAX_OPEN_MAPS = 64
"""A map holds a file descriptor; the limit of a process may be as low as 256."""

_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def _map(path: Path) -> npt.NDArray[Any]:
    """Map a file that is not empty: the ids of a .npy or .bin file, else bytes; 1-D."""
    if path.suffix == ".npy":
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    return np.asarray(np.memmap(path, dtype="<u2" if path.suffix == ".bin" else "u1", mode="r"))


def _length(path: Path) -> int:
    """Return the number of tokens in a file, from its size or its header."""
    if path.suffix == ".npy":
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a .npy file of token ids: {error}") from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{path} holds {ids.dtype} of shape {ids.shape}: "
                "save the token ids as a 1-D array of integers"
            )
        return len(ids)
    size = path.stat().st_size
    if path.suffix != ".bin":
        return size
    if size % 2:
        raise ValueError(
            f"{path} has {size} bytes, an odd number: "
            "a .bin file holds token ids as little-endian uint16, two bytes each"
        )
    return size // 2


class Corpus:
    """The concatenated tokens of some files, in the files' order. Picklable.

    A .npy file holds token ids as a 1-D array of integers, a .bin file as little-endian uint16.
    Any other file is text, whose bytes are the tokens. Raises ValueError for a malformed file, and
    for text mixed with token ids.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.is_text = not any(path.suffix in {".bin", ".npy"} for path in files)
        if not self.is_text:
            for path in files:
                if path.suffix not in {".bin", ".npy"}:
                    raise ValueError(
                        f"{path} is text, other files hold token ids (.bin, .npy): "
                        "let --data.glob match only one kind"
                    )
        lengths = {path: length for path in files if (length := _length(path))}
        self._files = tuple(lengths)
        self._ends = tuple(itertools.accumulate(lengths.values()))
        self._maps: dict[Path, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return a copy of the tokens [start, stop), which must not be empty; 1-D int64."""
        assert 0 <= start < stop <= len(self), (start, stop, len(self))
        parts = []
        file = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, self._ends[file])
            begin = self._ends[file - 1] if file else 0
            tokens = self._tokens(self._files[file])
            parts.append(tokens[start - begin : end - begin].astype(np.int64))
            start, file = end, file + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def highest(self) -> int:
        """Return the highest token id, by scanning all files."""
        return max(int(self._tokens(path).max()) for path in self._files)

    def _tokens(self, path: Path) -> npt.NDArray[Any]:
        """Return the map of a file, opening it and closing the oldest if necessary."""
        if path not in self._maps:
            if len(self._maps) == _MAX_OPEN_MAPS:
                del self._maps[next(iter(self._maps))]
            self._maps[path] = _map(path)
        return self._maps[path]


def find(path: Path | None, glob: str) -> list[Path]:
    """Return the files of a corpus: one file, those of a folder that match, or Python's library.

    They are sorted by path, so that the order is the same on every node. Raises ValueError if
    there are none.
    """
    if path is None:
        return _python_sources()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"--data.path {path}: must be a file or a folder; give one that exists")
    try:
        files = sorted(file for file in path.glob(glob) if file.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"--data.glob {glob!r} is not a pattern of files within a folder: {error}"
        ) from error
    if not files:
        raise ValueError(
            f"--data.glob {glob!r} matches no file in {path}: give another pattern, such as '**/*'"
        )
    return files


def _python_sources() -> list[Path]:
    """Return the modules of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_SOURCES  # skips site-packages, which may be large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ValueError(f"Python has no sources in {root} to train on: give --data.path")
    return sorted(files)
