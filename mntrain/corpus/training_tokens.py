"""The tokens that a job trains on, from text, files of token ids, or a folder of tokens."""

from dataclasses import dataclass
from pathlib import Path

from mntrain.corpus.records import holds_records
from mntrain.corpus.text_files import (
    CorpusFiles,
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
from mntrain.corpus.tokenizer import TOKENIZER_FILE, FileTokenizer, Tokenizer, load_tokenizer
from mntrain.corpus.tokens import Corpus


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
        return _of_folder(path, open_token_folder(path), given)
    sources = find_files(path, glob)
    _refuse_parts_of_folders(sources)
    alone = sources.root.is_file()  # it may have another name on another node
    files = {"--data.path": sources.root} if alone else sources.by_name()
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


def _of_folder(path: Path, folder: TokenFolder, given: Tokenizer) -> TrainingTokens:
    """Return the tokens of a folder. Raises ValueError if another tokenizer is given."""
    if isinstance(given, FileTokenizer) and given.identity != folder.tokenizer.identity:
        raise ValueError(
            f"--data.tokenizer {given.path} is not the tokenizer of {path}: leave the option out, "
            "or tokenize the text with this one"
        )
    tokens = Corpus([folder.tokens_path], f"<u{folder.dtype_bytes}")
    names = [MANIFEST_FILE, folder.tokens_path.name]
    if isinstance(folder.tokenizer, FileTokenizer):
        names.append(TOKENIZER_FILE)
    files = {name: path / name for name in names}
    manifest = folder.manifest
    return TrainingTokens(
        tokens,
        CorpusFiles(path, (folder.tokens_path,)),
        folder.tokenizer,
        manifest.end_of_text,
        True,
        files,
        manifest.documents,
    )


def _refuse_parts_of_folders(sources: CorpusFiles) -> None:
    """Raise ValueError for a file of a folder of tokens, whose dtype its manifest has."""
    for folder in {file.parent for file in sources.files if is_token_ids(file)}:
        if is_token_folder(folder):
            raise ValueError(
                f"{folder} is a folder of tokens with a manifest: give --data.path {folder}"
            )
