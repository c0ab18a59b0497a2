"""The files of a corpus, and the text in them: plain text, and records."""

import codecs
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mntrain.corpus.records import holds_records, read_fields
from mntrain.corpus.saved_datasets import (
    dataset_of,
    is_saved_dataset,
    list_splits,
    saved_files,
    validation_split,
)

ID_SUFFIXES = (".bin", ".npy")  # files of token ids
_BINARY = (  # endings, whatever the content is
    *(".7z", ".bz2", ".gz", ".rar", ".tar", ".tgz", ".xz", ".zip", ".zst"),
    *(".bmp", ".gif", ".ico", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"),
    *(".avi", ".flac", ".mkv", ".mov", ".mp3", ".mp4", ".ogg", ".wav", ".webm"),
    *(".docx", ".odt", ".pdf", ".pptx", ".xlsx", ".otf", ".ttf", ".woff", ".woff2"),
    *(".h5", ".hdf5", ".npz", ".onnx", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".sqlite"),
    *(".dll", ".exe", ".pyc", ".pyd", ".so", ".whl"),
)
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_SAMPLE = 8192  # bytes at the beginning, in the middle and at the end of a file
_BLOCK = 1 << 20  # bytes of text that are read at once
PARTIAL = ".partial"  # ending of the folder that a tokenization writes into

Piece = tuple[str, bool]  # a part of a document, and True if the document ends with it


@dataclass(frozen=True)
class OptionNames:
    """Names of the options that say where a corpus is, for errors."""

    path: str = "--data.path"
    glob: str = "--data.glob"
    text_field: str = "--data.text-field"
    tokenizer: str = "--data.tokenizer"
    dataset: str = ""  # the name of a set of validation data, if it has one

    def given(self, path: Path) -> str:
        """Return the option of the path with a value: --data.valid-path news=news.txt."""
        return f"{self.label}{'=' if self.dataset else ' '}{path}"

    @property
    def label(self) -> str:
        """The option of the path, and the name of the set."""
        return f"{self.path} {self.dataset}".strip()

    @property
    def validation(self) -> str:
        """The set in descriptions of data and in metrics: validation, or validation news."""
        return f"validation {self.dataset}".strip()


TRAIN_OPTIONS = OptionNames()
VALID_PATH = "--data.valid-path"


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus in the order of their paths, and binary files that were left out."""

    root: Path  # the file itself, or the folder
    files: tuple[Path, ...]
    skipped: tuple[Path, ...] = ()

    def by_name(self) -> dict[str, Path]:
        """Return the files by a name that is the same wherever the corpus lies."""
        if self.root.is_file():
            return {self.root.name: self.root}
        return {os.path.relpath(file, self.root): file for file in self.files}

    def compared(self, options: OptionNames) -> dict[str, Path]:
        """Return the files by a name that is the same on all nodes: that of a file may differ."""
        return {options.label: self.root} if self.root.is_file() else self.by_name()

    def describe_skipped(self) -> str:
        """Return how many files were left out, with a few names; an empty text if none was."""
        names = [os.path.relpath(file, self.root) for file in self.skipped]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        files = "binary file" if len(names) == 1 else "binary files"
        return f"skipped {len(names)} {files}: {', '.join(names[:3])}{more}" if names else ""


def find_files(path: Path | None, glob: str, options: OptionNames = TRAIN_OPTIONS) -> CorpusFiles:
    """Return the files of a corpus: one file, those of a folder that match, or Python's library.

    They are sorted by path, so that the order is the same on every node; those of a dataset that
    the datasets library has saved have its order. Raises ValueError if there are none, if all are
    binary, if `path` is a binary file, and for a part of such a dataset or several of them.
    """
    if path is None:
        return CorpusFiles(_python_library(), tuple(_python_sources()))
    if path.is_file():
        _refuse_part(path, options)
        if not is_token_ids(path) and (reason := why_binary(path)):
            raise ValueError(
                f"{options.given(path)} is no text: {reason}; give UTF-8 text, .jsonl, .parquet, "
                ".arrow, or token ids as .npy or .bin"
            )
        return CorpusFiles(path, (path,))
    if not path.is_dir():
        raise ValueError(f"{options.given(path)}: must be a file or a folder; give one that exists")
    _refuse_splits(path, options)
    if is_saved_dataset(path):
        return CorpusFiles(path, tuple(saved_files(path)))
    try:
        found = sorted(file for file in path.glob(glob) if file.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{options.glob} {glob!r} is not a pattern of files within a folder: {error}"
        ) from error
    found = [file for file in found if not _unfinished(file.relative_to(path))]
    if not found or _unfinished(Path(path.absolute().name)):
        every = "**/*"
        fix = "a folder that has some" if glob == every else f"another pattern, such as {every!r}"
        raise ValueError(f"{options.glob} {glob!r} matches no file in {path}: give {fix}")
    for file in found:
        _refuse_part(file, options)
    skipped = tuple(file for file in found if not is_token_ids(file) and why_binary(file))
    left_out = set(skipped)
    files = tuple(file for file in found if file not in left_out)
    if not files:
        some = ", ".join(os.path.relpath(file, path) for file in skipped[:3])
        raise ValueError(
            f"{options.given(path)} has no text: its {len(skipped)} files that match "
            f"{options.glob} {glob!r} are binary, such as {some}"
        )
    return CorpusFiles(path, files, skipped)


def _refuse_part(file: Path, options: OptionNames) -> None:
    """Raise ValueError for an Arrow file of a saved dataset, whose state.json counts too."""
    if folder := dataset_of(file):
        raise ValueError(
            f"{folder} is a dataset that the datasets library has saved, and can only be read "
            f"alone: give {options.given(folder)}"
        )


def _refuse_splits(path: Path, options: OptionNames) -> None:
    """Raise ValueError for a DatasetDict, with the options that name its splits."""
    if splits := list_splits(path):
        valid = validation_split(splits)
        if options.path == VALID_PATH:
            fix = options.given(valid or splits[-1])
        else:
            train = next((one for one in splits if one.name == "train"), splits[0])
            fix = options.given(train)
            if options == TRAIN_OPTIONS and valid not in (None, train):
                fix += f" {VALID_PATH} {valid}"
        raise ValueError(
            f"{options.given(path)} is a DatasetDict with the splits "
            f"{', '.join(one.name for one in splits)}: give {fix}"
        )


def is_token_ids(path: Path) -> bool:
    """Return whether a file holds token ids, by its name."""
    return path.suffix in ID_SUFFIXES


def why_binary(path: Path) -> str:
    """Return why a file is not UTF-8 text, from its name and 24 KiB of it; empty if it may be.

    Files of records count as text.
    """
    if holds_records(path):
        return ""
    if (ending := path.suffix.lower()) in _BINARY:
        return f"files that end in {ending} are binary"
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in sorted({0, max(0, size - _SAMPLE) // 2, max(0, size - _SAMPLE)}):
            file.seek(start)
            block = file.read(_SAMPLE)
            if b"\0" in block:
                return f"it has a NUL byte at offset {start + block.index(0)}"
            lead = 0  # bytes of a character that began before the block
            while start and lead < min(3, len(block)) and block[lead] & 0xC0 == 0x80:
                lead += 1
            try:
                codecs.getincrementaldecoder("utf-8")().decode(
                    block[lead:], final=start + len(block) == size
                )
            except UnicodeDecodeError as error:
                return f"it is not UTF-8 at offset {start + lead + error.start}"
    return ""


def read_pieces(
    path: Path, text_field: str, *, as_bytes: bool, options: OptionNames = TRAIN_OPTIONS
) -> Iterator[Piece]:
    """Yield the documents of a file in pieces, without empty documents.

    A file of records has a document in each; any other file is one document. `as_bytes`: bytes of
    text that are not UTF-8 become surrogates, and a byte order mark remains. Raises ValueError with
    the place for text that is not UTF-8 and for a record without the field.
    """
    if holds_records(path):
        yield from _record_pieces(path, text_field, options)
    else:
        yield from _text_pieces(path, as_bytes)


def _text_pieces(path: Path, as_bytes: bool) -> Iterator[Piece]:
    encoding, errors = ("utf-8", "surrogateescape") if as_bytes else ("utf-8-sig", "strict")
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    begun = False
    with path.open("rb") as file:
        done = 0
        while True:
            block = file.read(_BLOCK)
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 at offset {done - held + error.start}: convert it, or "
                    "leave it out"
                ) from error
            done += len(block)
            if text:
                begun = True
                yield text, False
            if not block:
                break
    if begun:
        yield "", True


def _record_pieces(path: Path, text_field: str, options: OptionNames) -> Iterator[Piece]:
    for place, (value,) in read_fields(path, {text_field: f"the text by {options.text_field}"}):
        text = checked_text(value, place, text_field)
        if text:
            yield text, True


def checked_text(value: Any, place: str, text_field: str) -> str:
    """Return a field's text. Raises ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(f"{place}: {text_field!r} is a {type(value).__name__}, and must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: {text_field!r} has half of a surrogate pair, {value[error.start]!a}, at "
            f"character {error.start}"
        ) from error
    return value


def _unfinished(path: Path) -> bool:
    """Return whether a path lies in what an interrupted tokenization has left."""
    return any(part.startswith(".") and part.endswith(PARTIAL) for part in path.parts)


def _python_sources() -> list[Path]:
    """Return the modules of this Python's standard library, without its tests."""
    files = []
    for folder, subfolders, names in os.walk(_python_library()):
        subfolders[:] = set(subfolders) - _NOT_SOURCES  # skips site-packages, which may be large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _python_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))
