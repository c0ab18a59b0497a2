"""Folders of tokens: tokens.bin, the tokenizer, and manifest.json, which says what they are.

A folder is written under another name, and renamed when it is complete. So a folder that has its
name is complete. The tokens of raw text are such folders in a cache of the user.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, BinaryIO, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mntrain.corpus.records import holds_records
from mntrain.corpus.text_files import PARTIAL, CorpusFiles, Piece, is_token_ids, read_pieces
from mntrain.corpus.tokenizer import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    Ids,
    Tokenizer,
)

MANIFEST_FILE = "manifest.json"
TOKENS_FILE = "tokens.bin"
_EVERY_S = 10.0  # between lines of progress
_VERSION = 1  # of the rules by which text becomes tokens
_AGAIN = "run `python -m mntrain tokenize` again"

_PIECE = 1 << 16  # characters that are encoded as one text
_BATCH = 1 << 22  # characters that are encoded at once, by all threads
_CONTEXT = 256  # characters on both sides of a split that are encoded to check it
_ATTEMPTS = 8  # places of each kind at which a split is tried
# Places at which most tokenizers split a text: after a line break, and before a space.
_PLACES = (re.compile(r"(?<=\S\n)(?=\S)"), re.compile(r"(?<=\w)(?= \w)"))

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class TokenManifest:
    """The content of manifest.json."""

    format: Literal["mntrain tokens 1"]
    dtype: Literal["uint16", "uint32"]  # little-endian
    vocabulary: Count  # above all ids
    tokens: Count
    documents: Count
    end_of_text: Count | None  # the id after each document; None: text files joined as they are
    tokenizer: Literal["bytes", "tokenizer.json"]
    tokenizer_sha256: str | None  # of tokenizer.json
    text_field: str
    sources: dict[str, Count]  # sizes in bytes of the files that were tokenized


def is_token_folder(path: Path) -> bool:
    """Return whether a folder holds tokens with a manifest, sound or not."""
    manifest = path / MANIFEST_FILE
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return (path / TOKENS_FILE).exists() or b'"mntrain tokens' in file.read(256)


def open_token_folder(path: Path) -> tuple[TokenManifest, Tokenizer]:
    """Return what made a folder of tokens, after comparing its files with the manifest.

    Raises ValueError for one that was changed or cut short. The tokens themselves are not read.
    """
    file = path / MANIFEST_FILE
    try:
        content = TypeAdapter(TokenManifest).validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{file} is no manifest of tokens: {where}: {first['msg']}; {_AGAIN}"
        ) from None
    tokenizer: Tokenizer = ByteTokenizer()
    if content.tokenizer != "bytes":
        tokenizer = FileTokenizer(path / TOKENIZER_FILE)
    tokens, expected = path / TOKENS_FILE, content.tokens * np.dtype(content.dtype).itemsize
    size = tokens.stat().st_size if tokens.is_file() else 0
    for name, stated, real in (
        ("the bytes of tokens.bin", expected, size),
        ("tokenizer_sha256", content.tokenizer_sha256, getattr(tokenizer, "sha256", None)),
    ):
        if stated != real:
            raise ValueError(
                f"{file}: {name} should be {stated}, and is {real}: restore the files, or {_AGAIN}"
            )
    return content, tokenizer


def write_token_folder(
    output: Path, sources: CorpusFiles, text_field: str, tokenizer: Tokenizer
) -> TokenManifest:
    """Tokenize files into a new folder, which appears when it is complete.

    The memory used does not depend on the amount of data. Raises ValueError for text that cannot be
    read, if files change meanwhile, and if the folder exists; OSError if it cannot be written.
    """
    check_output(output)
    if found := next((file for file in sources.files if is_token_ids(file)), None):
        raise ValueError(f"{found} holds token ids already: let glob match text only")
    before = _file_states(sources)
    with TemporaryDirectory(suffix=PARTIAL, prefix=f".{output.name}.", dir=output.parent) as parent:
        folder = Path(parent, "tokens")
        folder.mkdir()
        dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.size <= 1 << 16 else "uint32"
        path = folder / TOKENS_FILE
        tokens, documents = _write_tokens(path, dtype, sources, text_field, tokenizer)
        if _file_states(sources) != before:
            raise ValueError(f"files of {sources.root} changed while they were read: try again")
        if not tokens:
            raise ValueError(
                f"{sources.root} has no text: its {len(sources.files)} files are empty"
            )
        separated = tokenizer.separates_files or any(map(holds_records, sources.files))
        made_by = tokenizer if isinstance(tokenizer, FileTokenizer) else None
        manifest = TokenManifest(
            format="mntrain tokens 1",
            dtype=dtype,
            vocabulary=tokenizer.size,
            tokens=tokens,
            documents=documents,
            end_of_text=tokenizer.end_of_text if separated else None,
            tokenizer="tokenizer.json" if made_by else "bytes",
            tokenizer_sha256=made_by.sha256 if made_by else None,
            text_field=text_field,
            sources={name: size for name, size, *_ in before},
        )
        if made_by:
            settings = json.dumps({"eos_token": made_by.end_of_text_token})
            (folder / TOKENIZER_FILE).write_bytes(made_by.content)
            (folder / SETTINGS_FILE).write_text(settings)
        (folder / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=1))
        folder.rename(output)
    return manifest


def _write_tokens(
    path: Path, dtype: str, sources: CorpusFiles, text_field: str, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Write the token ids to a file, synced to disk; return the numbers of tokens and documents."""
    tokens = documents = 0
    told = time.monotonic()
    with path.open("wb") as file:
        for ended, batch in token_batches(sources, text_field, tokenizer):
            for ids in batch:
                if len(ids) and int(ids.max()) >= tokenizer.size:
                    raise ValueError(f"the tokenizer made id {ids.max()}, which it does not list")
                file.write(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
                tokens += len(ids)
            documents += ended
            if time.monotonic() - told >= _EVERY_S:
                told = time.monotonic()
                print(f"mntrain: {tokens:,} tokens", file=sys.stderr)
        file.flush()
        os.fsync(file.fileno())
    return tokens, documents


def check_output(output: Path) -> None:
    """Raise ValueError unless a folder of tokens can be made at `output`."""
    if not output.parent.is_dir():
        raise ValueError(f"{output}: {output.parent} is not a folder: make it, or give another")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ValueError(f"{output} exists, and is no folder: give another name")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: remove it, or give another folder")


def _file_states(sources: CorpusFiles) -> list[tuple[str, int, int, int]]:
    """Return name, size in bytes and the times of change of each file."""
    states = [(name, path.stat()) for name, path in sources.by_name().items()]
    return [(name, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for name, one in states]


def cache_folder() -> Path:
    """Return the folder of cached tokens, in $XDG_CACHE_HOME or ~/.cache. Raises RuntimeError."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "mntrain" / "tokens"


def cached_tokens(sources: CorpusFiles, text_field: str, tokenizer: Tokenizer) -> Path:
    """Return the folder of the tokens of text, in the cache already or made now.

    Local. Of the processes that share the cache and its file locks, one makes them, and the others
    wait; without locks the first to finish counts. Raises ValueError, for the same error on all
    waiting processes, if the text cannot be read or the cache cannot be written.
    """
    try:
        library = version("tokenizers") if isinstance(tokenizer, FileTokenizer) else ""
        facts = [_VERSION, tokenizer.identity, library, text_field, _file_states(sources)]
        output = cache_folder() / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        output.parent.mkdir(parents=True, exist_ok=True)
        with _lock(output.with_suffix(".lock")) as (lock, locked):
            if _is_sound(output):
                return output
            if problem := lock.read():  # of the process that had the lock before
                raise ValueError(problem.decode())
            if locked:  # what killed processes have left
                for left in output.parent.glob(f".{output.name}.*{PARTIAL}"):
                    shutil.rmtree(left, ignore_errors=True)
            size = sum(file.stat().st_size for file in sources.files) / 1e6
            what = f"{size:.1f} MB of {sources.root} into {output}"
            print(f"mntrain: tokenizing {what}, once", file=sys.stderr, flush=True)
            try:
                shutil.rmtree(output, ignore_errors=True)  # damaged
                write_token_folder(output, sources, text_field, tokenizer)
            except (OSError, ValueError) as error:
                if _is_sound(output):  # a process without the lock made it
                    return output
                if isinstance(error, ValueError):
                    lock.write(str(error).encode(errors="replace"))
                raise
            return output
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"the tokens of {sources.root} cannot be cached: {error}; set XDG_CACHE_HOME to a "
            "folder with space, or run `python -m mntrain tokenize` and give its output as "
            "--data.path"
        ) from error


def _is_sound(folder: Path) -> bool:
    """Return whether there are cached tokens, and they are not damaged."""
    with contextlib.suppress(OSError, ValueError):
        open_token_folder(folder)
        return True
    return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[tuple[BinaryIO, bool]]:
    """Hold the lock of a new file; yield the file, and whether the file system has locks.

    It is removed at the end. Processes that wait have it open, and then hold the lock of a file
    without a name: those that come later find the tokens, or try again.
    """
    with path.open("a+b", buffering=0) as file:
        locked = False
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        file.seek(0)
        try:
            yield file, locked
        finally:
            path.unlink(missing_ok=True)


def token_batches(
    sources: CorpusFiles, text_field: str, tokenizer: Tokenizer
) -> Iterator[tuple[int, list[Ids]]]:
    """Yield the tokens of all files in their order, 1-D, in batches.

    Each with the number of documents that end in it. An end-of-text token follows each record, and
    each text file if the tokenizer separates files. Documents without text have no tokens. Raises
    ValueError for text that cannot be read.
    """
    end = np.array([tokenizer.end_of_text])
    for batch in _batches(sources, text_field, tokenizer):
        ids: list[Ids] = []
        encoded = tokenizer.encode([text for text, _ in batch])
        for (_, ends), one in zip(batch, encoded, strict=True):
            ids += [one, end] if ends else [one]
        yield sum(ends for _, ends in batch), ids


def text_batches(sources: CorpusFiles, text_field: str) -> Iterator[list[str]]:
    """Yield the text of all files in batches, to train a tokenizer on."""
    for batch in _batches(sources, text_field, None):
        yield [text for text, _ in batch]


def _batches(
    sources: CorpusFiles, text_field: str, tokenizer: Tokenizer | None
) -> Iterator[list[Piece]]:
    """Yield batches of pieces."""
    batch: list[Piece] = []
    characters = 0
    as_bytes = tokenizer is not None and not tokenizer.separates_files
    for path in sources.files:
        ends_count = holds_records(path) or not as_bytes
        for text, ends in resplit(read_pieces(path, text_field, as_bytes=as_bytes), tokenizer):
            batch.append((text, ends and ends_count))
            characters += len(text) + 1
            if characters >= _BATCH:
                yield batch
                batch, characters = [], 0
    yield batch


def resplit(pieces: Iterable[Piece], tokenizer: Tokenizer | None) -> Iterator[Piece]:
    """Split documents where their tokens stay the same, into pieces of about 64 Ki characters.

    A document in which no such place is found remains whole. Without a tokenizer, only the places
    count.
    """
    text = ""
    for more, ends in pieces:
        text += more
        begin = searched = 0  # of the next piece, and up to where no place was found
        while len(text) - searched > _PIECE:
            place = _find_split(text, begin, searched, tokenizer)
            if place:
                yield text[begin:place], False
                begin = searched = place
            else:
                searched += _PIECE // 2
        text = text[begin:]
        if ends:
            yield text, True
            text = ""


def _find_split(text: str, begin: int, searched: int, tokenizer: Tokenizer | None) -> int:
    """Return a place behind `searched` where a piece from `begin` may end; 0 without any."""
    for pattern in _PLACES:
        found = pattern.finditer(text, searched + _PIECE // 2, searched + _PIECE)
        for match in islice(found, _ATTEMPTS):
            at = match.start()
            before, after = text[max(begin, at - _CONTEXT) : at], text[at : at + _CONTEXT]
            if tokenizer is None or tokenizer.splits(before, after):
                return at
    return 0
