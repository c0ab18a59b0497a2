"""Tokenizers: the bytes of a text, or the tokenizer.json of the tokenizers library."""

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mntrain.corpus.text_files import TRAIN_OPTIONS, OptionNames

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
# Names of the end-of-text token, the likeliest first, where no tokenizer_config.json has it.
_END_OF_TEXT = (
    *(DEFAULT_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),
    "[SEP]",  # of BERT, which has no other
)
# Names of other special tokens, by their names in tokenizer_config.json.
_SPECIAL = {
    "mask_token": ("[MASK]", "<mask>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
}
MIN_BPE_VOCABULARY = BYTE_VALUES + 1  # all bytes, and the end-of-text token


class Tokenizer(ABC):
    """A tokenizer: text to token ids, and back."""

    size: int  # of the vocabulary: above all ids
    end_of_text: int  # the id that follows each document
    separates_files: (
        bool  # False: only records are documents, and text files are joined as they are
    )
    identity: str  # equal for equal tokenizers

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, 1-D int64, without an end-of-text token."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    @abstractmethod
    def splits(self, before: str, after: str) -> bool:
        """Return whether two neighbouring parts of a text have the tokens that the whole has."""


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 text. A NUL byte follows each record."""

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


class FileTokenizer(Tokenizer):
    """A tokenizer.json, or what one will contain. The library is loaded at the first use.

    Special tokens in the text of a document are ordinary text. Truncation, padding, dropout and
    tokens that a template adds are turned off. Raises ValueError for a file that is no tokenizer,
    that has no end-of-text token, or if the library is not installed.
    """

    separates_files = True

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        self._content = _read(path) if content is None else content
        self.sha256 = hashlib.sha256(self._content).hexdigest()
        ids = _ids_by_token(path, self._content)
        if not ids:
            raise ValueError(f"{path} has no tokens")
        self.size = max(ids.values()) + 1
        self.end_of_text_token = _end_of_text(path, ids)
        self.end_of_text = ids[self.end_of_text_token]
        self.identity = f"sha256 {self.sha256}, end of text {self.end_of_text_token!r}"
        if find_spec("tokenizers") is None:
            raise ValueError(f"{path} needs the tokenizers library: pip install 'mntrain[data]'")

    @functools.cached_property
    def _library(self) -> Any:
        from tokenizers import Tokenizer as Library  # noqa: PLC0415 - optional

        try:
            made = Library.from_str(self._content.decode())
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"{self.path} is not a tokenizer.json: {error}") from error
        made.no_truncation()
        made.no_padding()
        made.encode_special_tokens = True
        if getattr(made.model, "dropout", None):
            made.model.dropout = None
        return made

    @property
    def content(self) -> bytes:
        """The bytes of the file that was read."""
        return self._content

    def exported_files(self) -> dict[str, bytes]:
        """Return the files by name that AutoTokenizer needs beside a model.

        The settings name a class: otherwise AutoTokenizer takes one by the model, which changes the
        file's normalization.
        """
        settings: dict[str, Any] = {"tokenizer_class": GENERIC_CLASS}
        beside: dict[str, bytes] = {}
        if self.path.name == TOKENIZER_FILE:
            settings |= _read_settings(self.path.with_name(SETTINGS_FILE))
            paths = (self.path.with_name(name) for name in BESIDE_TOKENIZER)
            beside = {path.name: _read(path) for path in paths if path.is_file()}
        if not settings.get("eos_token"):
            settings["eos_token"] = self.end_of_text_token
        text = json.dumps(settings, indent=2)
        return {TOKENIZER_FILE: self._content, SETTINGS_FILE: text.encode(), **beside}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, by several threads."""
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

    def special_token(self, kind: str) -> int | None:
        """Return the id of a special token, or None: of mask_token, cls_token or sep_token.

        It is named so in tokenizer_config.json, or has a usual name.
        """
        ids = _ids_by_token(self.path, self._content)
        named = _named_in_settings(self.path, kind)
        return next((ids[name] for name in (named, *_SPECIAL[kind]) if name in ids), None)

    def special_ids(self) -> set[int]:
        """Return the ids of all special tokens."""
        added = json.loads(self._content).get("added_tokens") or []
        return {self.end_of_text} | {int(one["id"]) for one in added if one.get("special")}

    def splits(self, before: str, after: str) -> bool:
        """Return whether the tokens of both parts are those of the whole."""
        whole, left, right = self.encode([before + after, before, after])
        return np.array_equal(whole, np.concatenate((left, right)))


def load_tokenizer(given: str, options: OptionNames = TRAIN_OPTIONS) -> Tokenizer:
    """Return the tokenizer of an option's value: bytes, bpe:FILE or hf:PATH. Raises ValueError."""
    kind, _, where = given.partition(":")
    if given == "bytes":
        return ByteTokenizer()
    if kind not in ("bpe", "hf") or not where:
        raise ValueError(
            f"{options.tokenizer} {given}: must be bytes, bpe:FILE (a tokenizer.json) or hf:PATH "
            "(the folder or the tokenizer.json of a Hugging Face tokenizer)"
        )
    path = Path(where)
    if kind == "hf" and path.is_dir():
        path /= TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(
            f"{options.tokenizer} {given}: there is no file {path}; give one that exists"
        )
    return FileTokenizer(path)


def train_bpe(batches: Iterable[Sequence[str]], vocabulary: int) -> bytes:
    """Return the tokenizer.json of a byte-level byte-pair encoding, trained on batches of text.

    Words are separated as for GPT-2. The vocabulary is smaller than asked for if the text has too
    few different words. Raises ValueError without the library.
    """
    if find_spec("tokenizers") is None:
        raise ValueError(
            "a byte-pair encoding needs the tokenizers library: pip install 'mntrain[data]'"
        )
    from tokenizers import Tokenizer as Library  # noqa: PLC0415 - optional
    from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    made = Library(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[DEFAULT_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(batches, trainer)
    return str(made.to_str(pretty=True)).encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _ids_by_token(path: Path, content: bytes) -> dict[str, int]:
    """Return the ids of a tokenizer.json by token. Raises ValueError."""
    try:
        parsed = json.loads(content)
        vocabulary = parsed["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: [token, score]
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in parsed.get("added_tokens") or []}
        return {token: int(index) for token, index in {**vocabulary, **added}.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a tokenizer.json of the tokenizers library: "
            f"{type(error).__name__} {error}"
        ) from error


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json; nothing without one. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(_read(path)).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not the settings of a tokenizer: {error}") from error


def _named_in_settings(path: Path, kind: str) -> str | None:
    """Return the special token that tokenizer_config.json names, if any. Raises ValueError."""
    if path.name != TOKENIZER_FILE:
        return None
    named = _read_settings(path.with_name(SETTINGS_FILE)).get(kind)
    token = named.get("content") if isinstance(named, dict) else named
    return None if token is None else str(token)


def _end_of_text(path: Path, ids: dict[str, int]) -> str:
    """Return the end-of-text token. Raises ValueError if there is none."""
    settings = path.with_name(SETTINGS_FILE)
    token = _named_in_settings(path, "eos_token")
    if token is not None:
        if token not in ids:
            raise ValueError(f"{settings}: the eos_token {token!r} is no token of {path}")
        return token
    for token in _END_OF_TEXT:
        if token in ids:
            return token
    raise ValueError(
        f"{path} has no end-of-text token, which separates documents: name it as eos_token in "
        f"{settings}, or add one of {', '.join(_END_OF_TEXT)}"
    )
