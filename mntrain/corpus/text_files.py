"""The files of a corpus, and the text in them: plain text, and records."""

import codecs
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mntrain.checks.finding import first_names
from mntrain.corpus.records import holds_records, is_saved_dataset, read_fields, saved_files

ID_SUFFIXES = (".bin", ".npy")  # files of token ids
PARTIAL = ".partial"  # ending of the folder that a tokenization writes into
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_SAMPLE = 8192  # bytes from which binary files are told
_BLOCK = 1 << 20  # characters of text that are read at once

Piece = tuple[str, bool]  # a part of a document, and True if the document ends with it


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus in the order of their paths, and binary files that were left out."""

    root: Path  # the file itself, or the folder
    files: tuple[Path, ...]
    skipped: tuple[Path, ...] = ()

    def by_name(self, single: str = "") -> dict[str, Path]:
        """Return the files by a name that is the same wherever the corpus lies.

        `single` is that of a corpus of one file, by default the file's.
        """
        if self.root.is_file():
            return {single or self.root.name: self.root}
        return {os.path.relpath(file, self.root): file for file in self.files}

    def describe_skipped(self) -> str:
        """Return how many files were left out, with a few names; an empty text if none was."""
        names = [os.path.relpath(file, self.root) for file in self.skipped]
        files = "binary file" if len(names) == 1 else "binary files"
        return f"skipped {len(names)} {files}: {first_names(names, 3)}" if names else ""


def find_files(path: Path | None, glob: str) -> CorpusFiles:
    """Return the files of a corpus: one file, those of a folder that match, or Python's library.

    They are sorted by path, so that the order is the same on every node; those of a dataset that
    the datasets library has saved have its order. Raises ValueError if there are none, if all are
    binary, and for a part of such a dataset or several of them.
    """
    if path is None:
        return CorpusFiles(_python_library(), tuple(_python_sources()))
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path}: must be a file or a folder; give one that exists")
    if is_saved_dataset(path):
        return CorpusFiles(path, tuple(saved_files(path)))
    found = [path] if path.is_file() else _matching(path, glob)
    for file in found:
        if file.suffix.lower() == ".arrow" and is_saved_dataset(folder := file.parent):
            raise ValueError(
                f"{folder} is a dataset that the datasets library has saved, and can only be read "
                f"alone: give {folder}"
            )
    skipped = {file: why for file in found if not is_token_ids(file) and (why := why_binary(file))}
    files = tuple(file for file in found if file not in skipped)
    if not files:
        raise ValueError(
            f"{path} has no text: {found[0].name} {skipped[found[0]]}; give UTF-8 text, .jsonl, "
            ".parquet, .arrow, or token ids as .npy or .bin"
        )
    return CorpusFiles(path, files, tuple(skipped))


def _matching(path: Path, glob: str) -> list[Path]:
    """Return the sorted files of a folder that match, but those of interrupted tokenizations."""
    if (path / "dataset_dict.json").is_file():
        splits = [str(split) for split in sorted(path.iterdir()) if is_saved_dataset(split)]
        raise ValueError(
            f"{path} is a DatasetDict: give the folder of one of its splits: {', '.join(splits)}"
        )
    try:
        found = sorted(file for file in path.glob(glob) if file.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"glob {glob!r} is not a pattern of files within a folder: {error}"
        ) from error
    found = [file for file in found if not any(map(_unfinished, file.absolute().parts))]
    if not found:
        raise ValueError(
            f"glob {glob!r} matches no file in {path}: give another pattern, such as '**/*', or a "
            "folder that has some"
        )
    return found


def _unfinished(part: str) -> bool:
    """Return whether a part of a path is what an interrupted tokenization has left."""
    return part.startswith(".") and part.endswith(PARTIAL)


def is_token_ids(path: Path) -> bool:
    """Return whether a file holds token ids, by its name."""
    return path.suffix in ID_SUFFIXES


def why_binary(path: Path) -> str:
    """Return why a file is not UTF-8 text, from its first 8 KiB; empty if it may be.

    Files of records count as text.
    """
    if holds_records(path):
        return ""
    with path.open("rb") as file:
        block = file.read(_SAMPLE)
    if b"\0" in block:
        return f"has a NUL byte at offset {block.index(0)}"
    try:  # a character may end behind the block
        codecs.getincrementaldecoder("utf-8")().decode(block, final=len(block) < _SAMPLE)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 at offset {error.start}"
    return ""


def read_pieces(path: Path, text_field: str, *, as_bytes: bool) -> Iterator[Piece]:
    """Yield the documents of a file in pieces, without empty documents.

    A file of records has a document in each; any other file is one document. `as_bytes`: bytes of
    text that are not UTF-8 become surrogates, and a byte order mark remains. Raises ValueError for
    text that is not UTF-8, and with the place for a record without the field.
    """
    if holds_records(path):
        for place, (value,) in read_fields(path, [text_field]):
            if text := checked_text(value, place, text_field):
                yield text, True
        return
    encoding, errors = ("utf-8", "surrogateescape") if as_bytes else ("utf-8-sig", "strict")
    begun = False
    with path.open(encoding=encoding, errors=errors, newline="") as file:
        try:
            while text := file.read(_BLOCK):
                begun = True
                yield text, False
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: convert it, or leave it out") from error
    if begun:
        yield "", True


def checked_text(value: Any, place: str, text_field: str) -> str:
    """Return a field's text. Raises ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(f"{place}: {text_field!r} is a {type(value).__name__}, and must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: {text_field!r} has half of a surrogate pair") from error
    return value


def _python_sources() -> list[Path]:
    """Return the modules of this Python's standard library, without its tests."""
    files = []
    for folder, subfolders, names in os.walk(_python_library()):
        subfolders[:] = set(subfolders) - _NOT_SOURCES  # skips site-packages, which may be large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _python_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))
