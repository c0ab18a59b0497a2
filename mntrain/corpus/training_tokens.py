"""Memory-mapped tokens to train and validate on: of text, of token ids, or of a saved dataset."""

import bisect
import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mntrain.corpus.text_files import CorpusFiles, find_files
from mntrain.corpus.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    import_library,
    load_tokenizer,
)

_MOST_MAPS = 64  # at a time: each holds a file descriptor
_FIRST_IDS = 4096  # of a .bin file, by which wider ones are told
_COLUMN = "ids"  # of tokenized text


class Corpus:
    """Concatenated tokens of files, in their order, or of a tokenized dataset. Picklable.

    A .npy file holds token ids as a 1-D array of integers, a .bin file as little-endian uint16. Any
    other file is text, whose bytes are the tokens. Raises ValueError for a malformed file.
    """

    def __init__(self, files: Sequence[Path] = (), tokenized: Any = None) -> None:
        _map_tokens.cache_clear()  # files may have changed since an earlier corpus of this process
        self._files, self._tokenized = files, tokenized
        count = len(files) if tokenized is None else len(self._chunks)
        self._ends = tuple(itertools.accumulate(len(self._part(i)) for i in range(count)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_chunks"}

    @functools.cached_property
    def _chunks(self) -> list[npt.NDArray[Any]]:
        """The tokens of the dataset, as they lie in its file."""
        chunks = self._tokenized.data.column(_COLUMN).chunks
        return [chunk.flatten().to_numpy() for chunk in chunks]

    def _part(self, index: int) -> npt.NDArray[Any]:
        """Return the tokens of a file, or of a part of the dataset."""
        return _map_tokens(self._files[index]) if self._tokenized is None else self._chunks[index]

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return a copy of the tokens [start, stop), which must not be empty; 1-D int64."""
        assert 0 <= start < stop <= len(self), (start, stop, len(self))
        parts = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, self._ends[index])
            begin = self._ends[index - 1] if index else 0
            parts.append(self._part(index)[start - begin : end - begin].astype(np.int64))
            start, index = end, index + 1
        return np.concatenate(parts)

    def id_range(self, most: int | None = None) -> tuple[int, int]:
        """Return the lowest and the highest id of a file's first ones, at most and at least 0."""
        ids = self._part(0)[:most]
        return int(ids.min(initial=0)), int(ids.max(initial=0))


@functools.lru_cache(maxsize=_MOST_MAPS)
def _map_tokens(path: Path) -> npt.NDArray[Any]:
    """Map the tokens of a file, 1-D. Raises ValueError for a malformed file of ids."""
    if not path.stat().st_size:
        return np.empty(0, np.uint8)
    try:
        if path.suffix != ".npy":
            ids = np.memmap(path, dtype="<u2" if path.suffix == ".bin" else "u1", mode="r")
        else:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is not a {path.suffix} file of token ids ({error}): write ids as uint16 into "
            "a .bin file, or any integers by numpy.save into a .npy file"
        ) from error
    if path.suffix == ".bin" and _seem_wider(ids[:_FIRST_IDS]):
        raise ValueError(
            f"{path} has almost nothing in every second uint16, as ids of 32 or 64 bits have: a "
            ".bin file is read as uint16, so save these ids by numpy.save into a .npy file"
        )
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {ids.dtype} of shape {ids.shape}: "
            "save the token ids as a 1-D array of integers"
        )
    return np.asarray(ids)


def _seem_wider(ids: npt.NDArray[Any]) -> bool:
    """Return whether the first uint16 of a file are halves of integers of more bits. Local."""
    return len(ids) >= 64 and bool(ids[1::2].max() < 8 <= ids[::2].max())


@dataclass(frozen=True)
class TrainingTokens:
    """Tokens, and what made them."""

    tokens: Corpus
    sources: CorpusFiles
    tokenizer: Tokenizer | None  # None: of token ids that come without one
    end_of_text: int | None  # the id after each document; None: not known, or bytes, joined
    files: dict[str, Path]  # to compare over nodes and with a checkpoint, by name

    def describe(self) -> str:
        """Return the amount of data and its tokenizer in one line."""
        number = len(self.sources.files)
        if self.tokenizer is None:
            of = "token ids without a tokenizer"
        elif isinstance(self.tokenizer, FileTokenizer):
            of = f"tokens of {self.tokenizer.path} (vocabulary {self.tokenizer.size:,})"
        else:
            of = "tokens, which are bytes"
        return f"{number:,} file{'s' if number != 1 else ''}, {len(self.tokens):,} {of}"


def open_training_tokens(
    path: Path | None, glob: str, tokenizer: str, text_field: str
) -> TrainingTokens:
    """Return the tokens of the options --data.path, .glob, .tokenizer and .text-field. Local.

    Raises ValueError for data that is missing or malformed, and OSError.
    """
    given = load_tokenizer(tokenizer)
    with named_in_errors("--data.path") as label:
        return _opened(find_files(path, glob), given, text_field, label)


def open_validation_tokens(
    path: Path, glob: str, text_field: str, training: TrainingTokens, label: str
) -> TrainingTokens:
    """Return tokens to validate on, by the tokenizer of those that are trained on. Local.

    `label` names the option and the set. Raises ValueError as `open_training_tokens`, for data that
    is trained on, and for token ids where text is trained on, or text where its tokenizer is not
    known.
    """
    sources, tokenizer = find_files(path, glob), training.tokenizer
    refuse_shared(training.sources, sources)
    if sources.holds_ids > training.sources.holds_ids or not (sources.holds_ids or tokenizer):
        raise ValueError(
            f"the tokens of {path} are of another tokenizer than those of --data.path, or of one "
            "that is not known: give for both text, with one --data.tokenizer, or token ids"
        )
    return _opened(sources, tokenizer, text_field, label)


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


def _opened(
    sources: CorpusFiles, given: Tokenizer | None, text_field: str, label: str
) -> TrainingTokens:
    """Return the tokens of a corpus; `label` names a file that is alone."""
    files = sources.by_name(label)
    if isinstance(given, FileTokenizer) and not sources.holds_ids:
        tokenized = _tokenize(sources, given, text_field)
        files["the tokens"] = Path(tokenized.cache_files[0]["filename"])
        corpus = Corpus(tokenized=tokenized)
        return TrainingTokens(corpus, sources, given, given.end_of_text, files)
    if sources.dataset is not None:
        raise ValueError(f"{sources.root} is a saved dataset: name a --data.tokenizer for its text")
    tokenizer = None if sources.holds_ids and isinstance(given, ByteTokenizer) else given
    return TrainingTokens(Corpus(sources.files), sources, tokenizer, None, files)


def _tokenize(sources: CorpusFiles, tokenizer: FileTokenizer, field: str) -> Any:
    """Return a dataset of the tokens of each text, and an end-of-text token, from the user's cache.

    One of the processes that share the cache makes it, and the others wait. Raises ValueError.
    """
    library = import_library("datasets", "text that is tokenized needs the datasets library")
    from filelock import FileLock  # noqa: PLC0415 - of the datasets library

    library.disable_progress_bars()
    if (dataset := sources.dataset) is None:
        dataset = library.Dataset.from_dict({field: list(map(_read_text, sources.files))})
    else:
        sources.expect_fields(field)
    if getattr(dataset.features[field], "dtype", "") not in ("string", "large_string"):
        raise ValueError(f"{sources.root}: field {field!r} must be text")

    def encode(batch: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
        encoded, end = tokenizer.encode([one or "" for one in batch[field]]), tokenizer.end_of_text
        return {_COLUMN: [[*ids.tolist(), end] if len(ids) else [] for ids in encoded]}

    facts = [dataset._fingerprint, tokenizer.identity, version("tokenizers"), field]
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mntrain/tokens"
        folder.mkdir(parents=True, exist_ok=True)
        cached = folder / f"{name}.arrow"
        with FileLock(cached.with_suffix(".lock")):
            if not cached.exists():
                print(f"mntrain: tokenizing {sources.root} into {cached}, once", file=sys.stderr)
            return dataset.map(
                encode,
                batched=True,
                remove_columns=dataset.column_names,
                features=library.Features({_COLUMN: library.List(library.Value("int32"))}),
                cache_file_name=str(cached),
                new_fingerprint=name,
            )
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"the tokens of {sources.root} cannot be cached: {error}; set XDG_CACHE_HOME to a "
            "folder with space"
        ) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: convert it, or leave it out") from error
