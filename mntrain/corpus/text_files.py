"""The files of a corpus: of text, of token ids, or of a dataset of the datasets library."""

import codecs
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mntrain.alike.naming import first_names
from mntrain.corpus.tokenizer import import_library

_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_SAMPLE = 8192  # bytes from which binary files are told
_RECORDS, _IDS = (".jsonl", ".jsonl.gz", ".parquet", ".arrow"), (".bin", ".npy")
_SAVE = "save what datasets.load_dataset returns for them by save_to_disk, and give that folder"


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus in the order of their paths, and files that were left out."""

    root: Path  # the file itself, or the folder
    files: tuple[Path, ...]
    skipped: tuple[Path, ...] = ()
    dataset: Any = None  # of the datasets library, if it has saved the folder

    @property
    def holds_ids(self) -> bool:
        """True if the corpus is a file of token ids, by its name."""
        return self.root.suffix in _IDS and self.root.is_file()

    def by_name(self, single: str) -> dict[str, Path]:
        """Return the files by a name that is the same wherever the corpus lies.

        `single` is that of a corpus of one file.
        """
        if self.root.is_file():
            return {single: self.root}
        return {os.path.relpath(file, self.root): file for file in self.files}

    def describe_skipped(self) -> str:
        """Return how many files were left out, with a few names; an empty text if none was."""
        names = [os.path.relpath(file, self.root) for file in self.skipped]
        files = "file that is" if len(names) == 1 else "files that are"
        return f"skipped {len(names)} {files} not text: {first_names(names, 3)}" if names else ""

    def expect_fields(self, *fields: str) -> None:
        """Raise ValueError for a field that the dataset does not have."""
        names = self.dataset.column_names
        if missing := [field for field in fields if field not in names]:
            raise ValueError(
                f"{self.root} has no field {missing[0]!r}: its fields are "
                f"{', '.join(names)}; name another by the option text-field or label-field"
            )


def find_files(path: Path | None, glob: str) -> CorpusFiles:
    """Return the files of a corpus: one, those of a folder that match, or Python's library.

    They are sorted by path, so that the order is the same on every node; those of a saved dataset
    have its order. Raises ValueError if there are none, if none is text, and if text lies beside
    records or token ids, which would be left out.
    """
    if path is None:
        return CorpusFiles(_python_library(), tuple(_python_sources()))
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path}: must be a file or a folder; give one that exists")
    if (path / "dataset_dict.json").is_file():
        raise ValueError(f"{path} is a DatasetDict: give the folder of one of its splits")
    if (path / "dataset_info.json").is_file():
        return _saved_dataset(path)
    found = [path] if path.is_file() else _matching(path, glob)
    alone = CorpusFiles(path, tuple(found))
    if alone.holds_ids:
        return alone
    if len(found) > 1 and (data := [f for f in found if f.name.lower().endswith(_RECORDS + _IDS)]):
        what = "records" if data[0].suffix not in _IDS else "token ids"
        raise ValueError(
            f"{path} has {len(data)} of {len(found)} files that seem to hold data but no text, "
            f"such as {data[0].relative_to(path)} with {what}: give a file of token ids by itself; "
            f"for records {_SAVE}; or choose the text among them by --data.glob, such as '**/*.txt'"
        )
    skipped = {file: why for file in found if (why := why_not_text(file))}
    files = tuple(file for file in found if file not in skipped)
    if not files:
        raise ValueError(
            f"{path} has no text: {found[0].name} {skipped[found[0]]}; give UTF-8 text, one .npy "
            f"or .bin file of token ids, or for records: {_SAVE}"
        )
    return CorpusFiles(path, files, tuple(skipped))


def _saved_dataset(path: Path) -> CorpusFiles:
    library = import_library("datasets", f"{path} needs the datasets library")
    try:
        dataset = library.load_from_disk(str(path))
    except Exception as error:  # of the library, of Arrow, or of json
        raise ValueError(f"{path} cannot be loaded by the datasets library: {error}") from error
    files = dict.fromkeys(Path(file["filename"]) for file in dataset.cache_files)
    return CorpusFiles(path, tuple(files), dataset=dataset)


def _matching(path: Path, glob: str) -> list[Path]:
    """Return the sorted files of a folder that match."""
    try:
        found = sorted(file for file in path.glob(glob) if file.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"glob {glob!r} is not a pattern of files within a folder: {error}"
        ) from error
    if not found:
        raise ValueError(
            f"glob {glob!r} matches no file in {path}: give another pattern, such as '**/*', or a "
            "folder that has some"
        )
    return found


def why_not_text(path: Path) -> str:
    """Return why a file is not UTF-8 text, by its name and its first 8 KiB; empty if it may be."""
    if path.name.lower().endswith(_RECORDS):
        return "holds records"
    with path.open("rb") as file:
        block = file.read(_SAMPLE)
    if b"\0" in block:
        return f"has a NUL byte at offset {block.index(0)}"
    try:  # a character may end behind the block
        codecs.getincrementaldecoder("utf-8")().decode(block, final=len(block) < _SAMPLE)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 at offset {error.start}"
    return ""


def _python_sources() -> list[Path]:
    """Return the modules of this Python's standard library, without its tests."""
    files = []
    for folder, subfolders, names in os.walk(_python_library()):
        subfolders[:] = set(subfolders) - _NOT_SOURCES  # skips site-packages, which may be large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _python_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))
