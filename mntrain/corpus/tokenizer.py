"""Tokenizers: the bytes of a text, or the tokenizer.json of the tokenizers library."""

import hashlib
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"  # of Hugging Face; names the end-of-text token
# Other files beside the tokenizer.json of a Hugging Face tokenizer.
BESIDE_TOKENIZER = (
    *("special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "chat_template.jinja"),
)
GENERIC_CLASS = "PreTrainedTokenizerFast"  # of Hugging Face: does what the file says
# Usual names of the end-of-text token, the likeliest first.
_ENDS_OF_TEXT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),
    "[SEP]",  # of BERT, which has no other
)


class ByteTokenizer:
    """The bytes of UTF-8 text."""

    size = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(one.encode(), dtype=np.uint8).astype(np.int64) for one in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; those that are not UTF-8 are replaced."""
        return bytes(ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json of the tokenizers library.

    Special tokens in the text of a document are ordinary text. Truncation, padding, dropout and
    tokens that a template adds are turned off. Raises ValueError for a file that is no tokenizer,
    that has no end-of-text token, or if the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = path.read_bytes()
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        library = import_library("tokenizers", f"{path} needs the tokenizers library")
        try:
            self._library = library.Tokenizer.from_str(self.content.decode())
        except Exception as error:  # the library raises Exception itself
            raise ValueError(
                f"{path} is not a tokenizer.json of the tokenizers library: {error}"
            ) from error
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        if getattr(self._library.model, "dropout", None):
            self._library.model.dropout = None
        self._ids: dict[str, int] = self._library.get_vocab()
        self.size = max(self._ids.values(), default=-1) + 1  # of the vocabulary: above all ids
        settings = path.with_name(SETTINGS_FILE)
        self._settings = _read_settings(settings) if path.name == TOKENIZER_FILE else {}
        named = _content_of(self._settings.get("eos_token"))
        known = (one for one in (named, *_ENDS_OF_TEXT) if one in self._ids)
        end = next(known, None) if named is None or named in self._ids else None
        if end is None:
            raise ValueError(
                f"{path} has no end-of-text token{f' {named!r}' if named else ''}, which separates "
                f"documents: name one of its tokens as eos_token in {settings}, or add one of "
                f"{', '.join(_ENDS_OF_TEXT)}"
            )
        self.end_of_text_token, self.end_of_text = end, self._ids[end]
        self.identity = f"sha256 {self.sha256}, end of text {self.end_of_text_token!r}"

    def exported_files(self) -> dict[str, bytes]:
        """Return the files by name that AutoTokenizer needs beside a model.

        The settings name a class: otherwise AutoTokenizer takes one by the model, which changes the
        file's normalization.
        """
        settings: dict[str, Any] = {"tokenizer_class": GENERIC_CLASS, **self._settings}
        beside: dict[str, bytes] = {}
        if self.path.name == TOKENIZER_FILE:
            paths = (self.path.with_name(name) for name in BESIDE_TOKENIZER)
            beside = {path.name: path.read_bytes() for path in paths if path.is_file()}
        if not settings.get("eos_token"):
            settings["eos_token"] = self.end_of_text_token
        text = json.dumps(settings, indent=2)
        return {TOKENIZER_FILE: self.content, SETTINGS_FILE: text.encode(), **beside}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, 1-D int64, without an end-of-text token."""
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.int64) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with that of special tokens."""
        return str(self._library.decode(list(ids), skip_special_tokens=False))

    def encode_samples(self, texts: Sequence[str], max_length: int) -> list[Ids]:
        """Return the ids of texts, cut to a length, with the tokens that the template adds."""
        self._library.enable_truncation(max_length)
        try:
            encoded = self._library.encode_batch_fast(list(texts))
        finally:
            self._library.no_truncation()
        return [np.asarray(one.ids, dtype=np.int64) for one in encoded]


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer


def load_tokenizer(given: str) -> Tokenizer:
    """Return the tokenizer of an option's value: bytes, bpe:FILE or hf:PATH. Raises ValueError."""
    kind, _, where = given.partition(":")
    if given == "bytes":
        return ByteTokenizer()
    if kind not in ("bpe", "hf") or not where:
        raise ValueError(
            f"tokenizer {given}: must be bytes, bpe:FILE (a tokenizer.json) or hf:PATH (the folder "
            "or the tokenizer.json of a Hugging Face tokenizer)"
        )
    path = Path(where)
    if kind == "hf" and path.is_dir():
        path /= TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(f"tokenizer {given}: there is no file {path}; give one that exists")
    return FileTokenizer(path)


def import_library(name: str, need: str) -> Any:
    """Return an optional library. Raises ValueError, which begins with `need`, without it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{need}: pip install {name}") from error


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json; nothing without one. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_bytes()).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not the settings of a tokenizer: {error}") from error


def _content_of(token: Any) -> str | None:
    """Return a token that settings name, as text or as an object with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return None if token is None else str(token)
