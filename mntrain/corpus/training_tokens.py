"""The tokens that a job trains on, from text, files of token ids, or a folder of tokens."""

from dataclasses import dataclass
from pathlib import Path

from mntrain.corpus.records import holds_records
from mntrain.corpus.text_files import (
    TRAIN_OPTIONS,
    CorpusFiles,
    OptionNames,
    find_files,
    is_token_ids,
)
from mntrain.corpus.token_cache import cached_tokens
from mntrain.corpus.token_folder import (
    MANIFEST_FILE,
    TokenFolder,
    is_token_folder,
    open_token_folder,
)
from mntrain.corpus.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
)
from mntrain.corpus.tokens import Corpus
from mntrain.corpus.validation import refuse_shared


@dataclass(frozen=True)
class TrainingTokens:
    """Tokens, and what made them."""

    tokens: Corpus
    sources: CorpusFiles
    tokenizer: Tokenizer | None  # None: of token ids that come without one
    end_of_text: int | None  # the id after each document; None: not known, or text that is joined
    checked: bool  # True if no token can be outside the tokenizer's vocabulary
    files: dict[str, Path]  # to compare over nodes and with a checkpoint, by name
    documents: int | None = None

    def describe(self) -> str:
        """Return the amount of data and its tokenizer in one line."""
        number = len(self.sources.files)
        if self.tokenizer is None:
            of = "token ids without a tokenizer"
        elif isinstance(self.tokenizer, FileTokenizer):
            of = f"tokens of {self.tokenizer.path} (vocabulary {self.tokenizer.size:,})"
        else:
            of = "tokens, which are bytes"
        documents = f" in {self.documents:,} documents" if self.documents else ""
        files = f"{number:,} file{'s' if number != 1 else ''}"
        return f"{files}, {len(self.tokens):,} {of}{documents}"


def open_training_tokens(
    path: Path | None, glob: str, tokenizer: str, text_field: str
) -> TrainingTokens:
    """Return the tokens of the options --data.path, .glob, .tokenizer and .text-field. Local.

    Text is tokenized into a cache, unless its tokens are its bytes as they are. Raises ValueError
    for data that is missing or malformed, and OSError.
    """
    given = load_tokenizer(tokenizer)
    if path is not None and is_token_folder(path):
        folder = open_token_folder(path)
        if isinstance(given, FileTokenizer) and given.identity != folder.tokenizer.identity:
            raise ValueError(
                f"--data.tokenizer {given.path} is not the tokenizer of {path}: leave the option "
                "out, or tokenize the text with this one"
            )
        return _of_folder(folder)
    return _of_files(find_files(path, glob), given, text_field, TRAIN_OPTIONS)


def open_validation_tokens(
    path: Path, glob: str, text_field: str, training: TrainingTokens, options: OptionNames
) -> TrainingTokens:
    """Return tokens to validate on, by the tokenizer of those that are trained on. Local.

    `options` has the names of the options, for errors. Raises ValueError as `open_training_tokens`,
    and for data whose tokenizer is another one or is not known, and for data that is trained on.
    """
    tokenizer = training.tokenizer
    if is_token_folder(path):
        folder = open_token_folder(path)
        found = _of_folder(folder)
        refuse_shared(training.sources, found.sources, options)
        if tokenizer is None or folder.tokenizer.identity != tokenizer.identity:
            raise ValueError(
                f"{options.given(path)}: its tokens are of another tokenizer than those of "
                f"{TRAIN_OPTIONS.path}, or of one that is not known: tokenize both with the same"
            )
        return found
    sources = find_files(path, glob, options)
    refuse_shared(training.sources, sources, options)
    have_ids = any(map(is_token_ids, sources.files))
    if have_ids and training.checked:
        raise ValueError(
            f"{options.given(path)} holds token ids of an unknown tokenizer, and "
            f"{TRAIN_OPTIONS.path} does not: give text, or the output of `tokenize`"
        )
    if not have_ids and tokenizer is None:
        raise ValueError(
            f"{options.given(path)} is text, and {TRAIN_OPTIONS.path} holds token ids without "
            "a tokenizer: give token ids, or their --data.tokenizer"
        )
    return _of_files(sources, tokenizer or ByteTokenizer(), text_field, options)


def _of_files(
    sources: CorpusFiles, given: Tokenizer, text_field: str, options: OptionNames
) -> TrainingTokens:
    """Return the tokens of files of text or of token ids."""
    _refuse_parts_of_folders(sources, options)
    files = sources.compared(options)
    from_file = isinstance(given, FileTokenizer)
    if any(map(is_token_ids, sources.files)):
        corpus = Corpus(sources.files)
        return TrainingTokens(corpus, sources, given if from_file else None, None, False, files)
    if from_file or any(map(holds_records, sources.files)):
        made = cached_tokens(sources, text_field, given)
        corpus = Corpus([made.tokens_path], f"<u{made.dtype_bytes}")
        files = {**files, "the tokens": made.tokens_path}
        end, documents = made.manifest.end_of_text, made.manifest.documents
        return TrainingTokens(corpus, sources, given, end, True, files, documents)
    return TrainingTokens(Corpus(sources.files), sources, given, None, True, files)


def _of_folder(folder: TokenFolder) -> TrainingTokens:
    """Return the tokens of a folder."""
    path, manifest = folder.path, folder.manifest
    names = [MANIFEST_FILE, folder.tokens_path.name]
    if isinstance(folder.tokenizer, FileTokenizer):
        names.append(TOKENIZER_FILE)
    return TrainingTokens(
        Corpus([folder.tokens_path], f"<u{folder.dtype_bytes}"),
        CorpusFiles(path, (folder.tokens_path,)),
        folder.tokenizer,
        manifest.end_of_text,
        True,
        {name: path / name for name in names},
        manifest.documents,
    )


def _refuse_parts_of_folders(sources: CorpusFiles, options: OptionNames) -> None:
    """Raise ValueError for a file of a folder of tokens, whose dtype its manifest has."""
    for folder in {file.parent for file in sources.files if is_token_ids(file)}:
        if is_token_folder(folder):
            raise ValueError(
                f"{folder} is a folder of tokens with a manifest: give {options.given(folder)}"
            )
