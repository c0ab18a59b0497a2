"""Tokenizers: the bytes of a text, or the tokenizer.json of the tokenizers library."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

BYTE_VALUES = 256
TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"  # of Hugging Face; names the end-of-text token
# Other files beside the tokenizer.json of a Hugging Face tokenizer.
BESIDE_TOKENIZER = (
    *("special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "chat_template.jinja"),
)
GENERIC_CLASS = "PreTrainedTokenizerFast"  # of Hugging Face: does what the file says
DEFAULT_END_OF_TEXT = "<|endoftext|>"
# Usual names of the end-of-text token, the likeliest first.
_ENDS_OF_TEXT = (
    *(DEFAULT_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),
    "[SEP]",  # of BERT, which has no other
)
MIN_BPE_VOCABULARY = BYTE_VALUES + 1  # all bytes, and the end-of-text token


class ByteTokenizer:
    """The bytes of UTF-8 text. A NUL byte follows each record; text files are joined."""

    size = BYTE_VALUES
    end_of_text = 0
    separates_files = False
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        data = [text.encode("utf-8", "surrogateescape") for text in texts]
        return [np.frombuffer(one, dtype=np.uint8).astype(np.int64) for one in data]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; those that are not UTF-8 are replaced."""
        return bytes(ids).decode("utf-8", errors="replace")

    def splits(self, before: str, after: str) -> bool:
        """Return True: characters have bytes of their own."""
        return True


class FileTokenizer:
    """A tokenizer.json, or what one will contain.

    Special tokens in the text of a document are ordinary text. Truncation, padding, dropout and
    tokens that a template adds are turned off. Raises ValueError for a file that is no tokenizer,
    that has no end-of-text token, or if the library is not installed.
    """

    separates_files = True

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        self.content = path.read_bytes() if content is None else content
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        library = _import_library()
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

    def splits(self, before: str, after: str) -> bool:
        """Return whether two neighbouring parts of a text have the tokens that the whole has."""
        whole, left, right = self.encode([before + after, before, after])
        return np.array_equal(whole, np.concatenate((left, right)))


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


def train_bpe(batches: Iterable[Sequence[str]], vocabulary: int) -> bytes:
    """Return the tokenizer.json of a byte-level byte-pair encoding, trained on batches of text.

    Words are separated as for GPT-2. The vocabulary is smaller than asked for if the text has too
    few different words. Raises ValueError without the library.
    """
    library = _import_library()
    byte_level = library.pre_tokenizers.ByteLevel
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[DEFAULT_END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(batches, trainer)
    return str(made.to_str(pretty=True)).encode()


def _import_library() -> Any:
    try:
        import tokenizers  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ValueError(
            "a tokenizer.json needs the tokenizers library: pip install tokenizers"
        ) from error
    return tokenizers


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
