"""Tokens of raw text in a cache folder of the user, made once by one process of a node."""

import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from mntrain.corpus.text_files import CorpusFiles
from mntrain.corpus.token_folder import (
    TokenFolder,
    file_states,
    open_token_folder,
    write_token_folder,
)
from mntrain.corpus.tokenizer import FileTokenizer, Tokenizer

_VERSION = 1  # of the rules by which text becomes tokens
_ADVICE = (
    "set XDG_CACHE_HOME to a folder with space, or run `python -m mntrain tokenize` and give its "
    "output as --data.path"
)


def cache_folder() -> Path:
    """Return the folder of cached tokens, in $XDG_CACHE_HOME or ~/.cache. Raises RuntimeError."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "mntrain" / "tokens"


def cached_tokens(sources: CorpusFiles, text_field: str, tokenizer: Tokenizer) -> TokenFolder:
    """Return the tokens of text, from the cache or made now.

    Local. Of the processes of a node that call this at the same time, one makes them, and the
    others wait. Nodes that share the cache may make them at the same time; the first to finish
    counts. Raises ValueError, for the same error on all waiting processes, if the text cannot be
    read or the cache cannot be written.
    """
    try:
        key = _key(sources, text_field, tokenizer)
        output = cache_folder() / key
        output.parent.mkdir(parents=True, exist_ok=True)
        with _node_lock(key) as lock:
            if (found := _find(output)) is not None:
                return found
            if problem := lock.read():  # of the process that had the lock before
                raise ValueError(problem.decode())
            try:
                return _make(output, sources, text_field, tokenizer)
            except ValueError as error:
                lock.write(str(error).encode(errors="replace"))
                raise
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"the tokens of {sources.root} cannot be cached: {error}; {_ADVICE}"
        ) from error


def _make(output: Path, sources: CorpusFiles, text_field: str, tokenizer: Tokenizer) -> TokenFolder:
    nbytes = sum(file.stat().st_size for file in sources.files)
    print(
        f"mntrain: tokenizing {nbytes / 1e6:.1f} MB of {sources.root} into {output}, once per node",
        file=sys.stderr,
        flush=True,
    )
    try:
        write_token_folder(output, sources, text_field, tokenizer, overwrite=output.exists())
    except ValueError:
        if (found := _find(output)) is None:  # else another node has made it
            raise
        return found
    return open_token_folder(output)


def _find(folder: Path) -> TokenFolder | None:
    """Return cached tokens, or None if there are none or they are damaged."""
    try:
        return open_token_folder(folder)
    except (OSError, ValueError):
        return None


def _key(sources: CorpusFiles, text_field: str, tokenizer: Tokenizer) -> str:
    library = version("tokenizers") if isinstance(tokenizer, FileTokenizer) else ""
    facts = [_VERSION, tokenizer.identity, library, text_field, file_states(sources)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


@contextmanager
def _node_lock(key: str) -> Iterator[BinaryIO]:
    """Hold a lock among this user's processes of this node; yield its file.

    The file is removed at the end. Processes that wait have it open, and then hold the lock of a
    file without a name: those that come later find the tokens, or try again. Where the file system
    has no file locks, nobody waits, and the first to finish counts, as among nodes.
    """
    path = Path(tempfile.gettempdir(), f"mntrain-tokens-{os.getuid()}-{key}.lock")
    with _open_own(path) as file:
        with suppress(OSError):  # of file systems without file locks
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
        finally:
            with suppress(OSError):  # another user's
                path.unlink()


def _open_own(path: Path) -> BinaryIO:
    """Open a file of this user, or one without a name if another user has taken its name.

    That one could keep the lock for ever. Raises OSError if no files can be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError):
        file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        state = os.fstat(file.fileno())
        if state.st_uid == os.getuid() and stat.S_ISREG(state.st_mode):
            return file
        file.close()
    return tempfile.TemporaryFile(buffering=0)
