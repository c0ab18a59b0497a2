"""Folders of tokens: tokens.bin, the tokenizer, and manifest.json, which says what they are.

A folder is written under another name, and renamed when it is complete and on the disk. So a folder
that has its name is complete.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mntrain.corpus.records import holds_records
from mntrain.corpus.text_files import (
    PARTIAL,
    TRAIN_OPTIONS,
    CorpusFiles,
    OptionNames,
    is_token_ids,
)
from mntrain.corpus.token_stream import TokenBatch, token_batches
from mntrain.corpus.tokenizer import (
    SETTINGS_FILE,
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
)

MANIFEST_FILE = "manifest.json"
TOKENS_FILE = "tokens.bin"
_FILES = {MANIFEST_FILE, TOKENS_FILE, TOKENIZER_FILE, SETTINGS_FILE}
_FORMAT: Literal["mntrain tokens 1"] = "mntrain tokens 1"
_STALE_S = 10.0  # age after which an unlocked folder was left by a process that is gone

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


def dtype_of(vocabulary: int) -> Literal["uint16", "uint32"]:
    """Return the dtype of tokens, by the size of their vocabulary. Raises ValueError above 2^32."""
    if vocabulary > 1 << 32:
        raise ValueError(f"a vocabulary of {vocabulary} does not fit 32 bits")
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True))
class TokenFolder:
    """A complete folder of tokens."""

    path: Path
    manifest: TokenManifest
    tokenizer: Tokenizer

    @property
    def tokens_path(self) -> Path:
        """The file of tokens."""
        return self.path / TOKENS_FILE

    @property
    def dtype_bytes(self) -> int:
        """The number of bytes of a token."""
        return np.dtype(self.manifest.dtype).itemsize


def is_token_folder(path: Path) -> bool:
    """Return whether a folder holds tokens with a manifest, sound or not."""
    manifest = path / MANIFEST_FILE
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return (path / TOKENS_FILE).exists() or b'"mntrain tokens' in file.read(256)


def open_token_folder(path: Path) -> TokenFolder:
    """Return a folder of tokens, after comparing its files with the manifest.

    Raises ValueError for one that was changed or cut short. The tokens themselves are not read.
    """
    again = "run `python -m mntrain tokenize` again"
    try:
        content = TypeAdapter(TokenManifest).validate_json((path / MANIFEST_FILE).read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path / MANIFEST_FILE} is no manifest of tokens: "
            f"{where}{': ' if where else ''}{first['msg']}; {again}"
        ) from None
    tokens = path / TOKENS_FILE
    expected = content.tokens * np.dtype(content.dtype).itemsize
    nbytes = tokens.stat().st_size if tokens.is_file() else 0
    if nbytes != expected:
        raise ValueError(f"{tokens} has {nbytes} bytes, and its manifest says {expected}: {again}")
    tokenizer: Tokenizer
    if content.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    else:
        tokenizer = FileTokenizer(path / TOKENIZER_FILE)
        if tokenizer.sha256 != content.tokenizer_sha256:
            raise ValueError(
                f"{tokenizer.path} is not the tokenizer that made the tokens, whose sha256 is in "
                f"{MANIFEST_FILE}: restore it, or {again}"
            )
    facts = {
        "dtype": (content.dtype, dtype_of(tokenizer.size)),
        "vocabulary": (content.vocabulary, tokenizer.size),
        "end_of_text": (content.end_of_text, tokenizer.end_of_text),
    }
    if content.end_of_text is None and not tokenizer.separates_files:
        del facts["end_of_text"]
    for name, (stated, real) in facts.items():
        if stated != real:
            raise ValueError(
                f"{path / MANIFEST_FILE}: {name} is {stated}, and must be {real} with this "
                f"tokenizer: {again}"
            )
    return TokenFolder(path, content, tokenizer)


def write_token_folder(
    output: Path,
    sources: CorpusFiles,
    text_field: str,
    tokenizer: Tokenizer,
    *,
    overwrite: bool,
    at_batch: Callable[[int, int], None] = lambda files, tokens: None,
    options: OptionNames = TRAIN_OPTIONS,
) -> TokenManifest:
    """Tokenize files into a new folder, which appears when it is complete.

    The memory used does not depend on the amount of data. `at_batch` is told the numbers of files
    and tokens that are done. Raises ValueError for text that cannot be read, if files change
    meanwhile, and if the folder exists; OSError if it cannot be written.
    """
    check_output(output, overwrite=overwrite)
    if found := next((file for file in sources.files if is_token_ids(file)), None):
        raise ValueError(f"{found} holds token ids already: let {options.glob} match text only")
    before = file_states(sources)
    with _working_folder(output) as folder:
        partial = folder / f"tokens{PARTIAL}"  # no job trains on a file of this name
        batches = token_batches(sources, text_field, tokenizer, options)
        tokens, documents = _write_tokens(partial, batches, tokenizer.size, at_batch)
        if file_states(sources) != before:
            raise ValueError(f"files of {sources.root} changed while they were read: try again")
        if not tokens:
            raise ValueError(
                f"{sources.root} has no text: its {len(sources.files)} files are empty"
            )
        separated = tokenizer.separates_files or any(map(holds_records, sources.files))
        made_by = tokenizer if isinstance(tokenizer, FileTokenizer) else None
        manifest = TokenManifest(
            format=_FORMAT,
            dtype=dtype_of(tokenizer.size),
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
            settings = json.dumps({"eos_token": made_by.end_of_text_token}).encode()
            _write(folder / TOKENIZER_FILE, made_by.content)
            _write(folder / SETTINGS_FILE, settings)
        _write(folder / MANIFEST_FILE, json.dumps(asdict(manifest), indent=1).encode())
        partial.rename(folder / TOKENS_FILE)
        _publish(folder, output, overwrite=overwrite)
    return manifest


def _write_tokens(
    path: Path,
    batches: Iterable[TokenBatch],
    vocabulary: int,
    at_batch: Callable[[int, int], None],
) -> tuple[int, int]:
    """Write the token ids of batches to a file, synced to disk; return tokens and documents."""
    dtype = np.dtype(dtype_of(vocabulary)).newbyteorder("<")
    tokens = documents = 0
    with path.open("wb") as file:
        for batch in batches:
            for ids in batch.ids:
                if len(ids) and int(ids.max()) >= vocabulary:
                    raise ValueError(f"the tokenizer made id {ids.max()}, which it does not list")
                file.write(ids.astype(dtype).tobytes())
                tokens += len(ids)
            documents += batch.documents
            at_batch(batch.files_before, tokens)
        file.flush()
        os.fsync(file.fileno())
    return tokens, documents


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise ValueError unless a folder of tokens can be made at `output`."""
    if not output.parent.is_dir():
        raise ValueError(f"{output}: {output.parent} is not a folder: make it, or give another")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ValueError(f"{output} exists, and is no folder: give another name")
    if not output.exists() or not any(output.iterdir()):
        return
    others = sorted({path.name for path in output.iterdir()} - _FILES)
    if others or not is_token_folder(output):
        what = f" ({', '.join(others[:3])})" if others else ""
        raise ValueError(f"{output} has other files than tokens{what}: give another folder")
    if not overwrite:
        raise ValueError(f"{output} has tokens already: give another folder, or --overwrite")


def file_states(sources: CorpusFiles) -> list[tuple[str, int, int, int]]:
    """Return name, size in bytes and the times of change of each file."""
    states = []
    for name, path in sources.by_name().items():
        stat = path.stat()
        states.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return states


@contextlib.contextmanager
def _working_folder(output: Path) -> Iterator[Path]:
    """Make a locked folder beside `output`, and remove it at the end unless it was renamed.

    Folders that interrupted processes have left there are removed too.
    """
    prefix = f".{output.name}."
    for left in output.parent.glob(f"{glob.escape(prefix)}*{PARTIAL}"):
        with contextlib.suppress(OSError), _locked(left):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left)
    folder = output.with_name(f"{prefix}{secrets.token_hex(4)}{PARTIAL}")
    folder.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # of file systems without locks
                stack.enter_context(_locked(folder))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if another process does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _publish(folder: Path, output: Path, *, overwrite: bool) -> None:
    """Rename a complete folder to its name, in place of an older one if `overwrite`."""
    _sync(folder)
    old = output.with_name(f".{output.name}.{secrets.token_hex(4)}.old{PARTIAL}")
    if overwrite:
        with contextlib.suppress(FileNotFoundError):
            output.rename(old)
    try:
        folder.rename(output)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ValueError(f"{output} was made by another process meanwhile") from error
        with contextlib.suppress(OSError):
            old.rename(output)
        raise
    _sync(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
