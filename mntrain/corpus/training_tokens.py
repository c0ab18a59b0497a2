"""Memory-mapped tokens to train and validate on: of text, token ids, or a folder of tokens."""

import bisect
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mntrain.corpus.records import holds_records
from mntrain.corpus.text_files import ID_SUFFIXES, CorpusFiles, find_files, is_token_ids
from mntrain.corpus.token_folder import (
    MANIFEST_FILE,
    TOKENS_FILE,
    cached_tokens,
    is_token_folder,
    open_token_folder,
)
from mntrain.corpus.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
)

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


@dataclass(frozen=True)
class TrainingTokens:
    """Tokens, and what made them."""

    tokens: Corpus
    sources: CorpusFiles
    tokenizer: Tokenizer | None  # None: of token ids that come without one
    end_of_text: int | None  # the id after each document; None: not known, or text that is joined
    checked: bool  # True if no token can be outside the tokenizer's vocabulary
    files: dict[str, Path]  # to compare over nodes and with a checkpoint, by name
    documents: int | None = None

    def describe(self) -> str:
        """Return the amount of data and its tokenizer in one line."""
        number = len(self.sources.files)
        if self.tokenizer is None:
            of = "token ids without a tokenizer"
        elif isinstance(self.tokenizer, FileTokenizer):
            of = f"tokens of {self.tokenizer.path} (vocabulary {self.tokenizer.size:,})"
        else:
            of = "tokens, which are bytes"
        documents = f" in {self.documents:,} documents" if self.documents else ""
        files = f"{number:,} file{'s' if number != 1 else ''}"
        return f"{files}, {len(self.tokens):,} {of}{documents}"


def open_training_tokens(
    path: Path | None, glob: str, tokenizer: str, text_field: str
) -> TrainingTokens:
    """Return the tokens of the options --data.path, .glob, .tokenizer and .text-field. Local.

    Text is tokenized into a cache, unless its tokens are its bytes as they are. Raises ValueError
    for data that is missing or malformed, and OSError.
    """
    given = load_tokenizer(tokenizer)
    if path is not None and is_token_folder(path):
        found = _of_folder(path)
        own = found.tokenizer
        if isinstance(given, FileTokenizer) and own and given.identity != own.identity:
            raise ValueError(
                f"{given.path} is not the tokenizer of {path}: tokenize the text with this one, or "
                "leave out --data.tokenizer"
            )
        return found
    with named_in_errors("--data.path") as label:
        sources = find_files(path, glob)
    return _of_files(sources, given, text_field, label)


def open_validation_tokens(
    path: Path, glob: str, text_field: str, training: TrainingTokens, label: str
) -> TrainingTokens:
    """Return tokens to validate on, by the tokenizer of those that are trained on. Local.

    `label` names the option and the set. Raises ValueError as `open_training_tokens`, and for data
    whose tokenizer is another one or is not known, and for data that is trained on.
    """
    tokenizer = training.tokenizer
    found = _of_folder(path) if is_token_folder(path) else None
    sources = found.sources if found else find_files(path, glob)
    refuse_shared(training.sources, sources)
    if found and found.tokenizer:
        fits = tokenizer is not None and found.tokenizer.identity == tokenizer.identity
    elif any(map(is_token_ids, sources.files)):
        fits = not training.checked
    else:
        fits = tokenizer is not None
    if not fits:
        raise ValueError(
            f"the tokens of {path} are of another tokenizer than those of --data.path, or of one "
            "that is not known: give for both text or the output of `tokenize`, with one "
            "--data.tokenizer, or give token ids for both"
        )
    return found or _of_files(sources, tokenizer or ByteTokenizer(), text_field, label)


@contextmanager
def named_in_errors(option: str, name: str = "") -> Iterator[str]:
    """Yield an option and the name of a set, with which a ValueError in the context begins."""
    label = f"{option} {name}".strip()
    try:
        yield label
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error


def refuse_shared(training: CorpusFiles, valid: CorpusFiles) -> None:
    """Raise ValueError for a file of the validation data that is trained on, by any path."""
    trained = {os.path.realpath(file) for file in training.files}
    if found := next((file for file in valid.files if os.path.realpath(file) in trained), None):
        raise ValueError(
            f"--data.path {training.root} trains on {found}, too: give other data, move it out, or "
            "let --data.glob leave it out"
        )


def named_files(files: Mapping[str, Path], label: str) -> dict[str, Path]:
    """Return the files of a set by names that no file of the training data has."""
    return {name if name == label else f"{label}: {name}": file for name, file in files.items()}


def _of_files(
    sources: CorpusFiles, given: Tokenizer, text_field: str, label: str
) -> TrainingTokens:
    """Return the tokens of files of text or of token ids; `label` names a file that is alone."""
    for folder in {file.parent for file in sources.files if is_token_ids(file)}:
        if is_token_folder(folder):  # whose manifest has the dtype
            raise ValueError(f"{folder} is a folder of tokens with a manifest: give the folder")
    files = sources.by_name(label)
    from_file = isinstance(given, FileTokenizer)
    if any(map(is_token_ids, sources.files)):
        tokenizer = given if from_file else None
        return TrainingTokens(Corpus(sources.files), sources, tokenizer, None, False, files)
    if from_file or any(map(holds_records, sources.files)):
        made = _of_folder(cached_tokens(sources, text_field, given))
        files = {**files, "the tokens": made.sources.files[0]}
        return replace(made, sources=sources, tokenizer=given, files=files)
    return TrainingTokens(Corpus(sources.files), sources, given, None, True, files)


def _of_folder(path: Path) -> TrainingTokens:
    """Return the tokens of a folder."""
    manifest, tokenizer = open_token_folder(path)
    names = [MANIFEST_FILE, TOKENS_FILE]
    if isinstance(tokenizer, FileTokenizer):
        names.append(TOKENIZER_FILE)
    return TrainingTokens(
        Corpus([path / TOKENS_FILE], np.dtype(manifest.dtype).newbyteorder("<").str),
        CorpusFiles(path, (path / TOKENS_FILE,)),
        tokenizer,
        manifest.end_of_text,
        True,
        {name: path / name for name in names},
        manifest.documents,
    )
