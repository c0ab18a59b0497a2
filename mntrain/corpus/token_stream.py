"""The tokens of documents, in blocks of bounded size."""

import re
from collections.abc import Iterable, Iterator

import numpy as np

from mntrain.corpus.records import holds_records
from mntrain.corpus.text_files import (
    TRAIN_OPTIONS,
    CorpusFiles,
    OptionNames,
    Piece,
    read_pieces,
)
from mntrain.corpus.tokenizer import Ids, Tokenizer

_PIECE = 1 << 16  # characters that are encoded as one text
_BATCH = 1 << 22  # characters that are encoded at once, by all threads
_CONTEXT = 256  # characters on both sides of a split that are encoded to check it
_ATTEMPTS = 8  # places of each kind at which a split is tried
# Places at which most tokenizers split a text: after a line break, before a space, before a mark.
_PLACES = (
    re.compile(r"(?<=\S\n)(?=\S)"),
    re.compile(r"(?<=\w)(?= \w)"),
    re.compile(r"(?<=\w)(?=[^\w\s])"),
)


def token_batches(
    sources: CorpusFiles,
    text_field: str,
    tokenizer: Tokenizer,
    options: OptionNames = TRAIN_OPTIONS,
) -> Iterator[tuple[int, int, list[Ids]]]:
    """Yield the tokens of all files in their order, 1-D, in batches.

    Each with the number of files that were complete before it, and of documents that end in it. An
    end-of-text token follows each record, and each text file if the tokenizer separates files.
    Documents without text have no tokens. Raises ValueError for text that cannot be read.
    """
    end = np.array([tokenizer.end_of_text])
    for files, batch in _batches(sources, text_field, tokenizer, options):
        ids: list[Ids] = []
        encoded = tokenizer.encode([text for text, _ in batch])
        for (_, ends), one in zip(batch, encoded, strict=True):
            ids += [one, end] if ends else [one]
        yield files, sum(ends for _, ends in batch), ids


def text_batches(
    sources: CorpusFiles, text_field: str, options: OptionNames = TRAIN_OPTIONS
) -> Iterator[list[str]]:
    """Yield the text of all files in batches, to train a tokenizer on."""
    for _, batch in _batches(sources, text_field, None, options):
        yield [text for text, _ in batch]


def _batches(
    sources: CorpusFiles, text_field: str, tokenizer: Tokenizer | None, options: OptionNames
) -> Iterator[tuple[int, list[Piece]]]:
    """Yield batches of pieces, each with the number of files that were read before it."""
    batch: list[Piece] = []
    characters = 0
    as_bytes = tokenizer is not None and not tokenizer.separates_files
    for index, path in enumerate(sources.files):
        pieces = read_pieces(path, text_field, as_bytes=as_bytes, options=options)
        ends_count = holds_records(path) or not as_bytes
        for text, ends in resplit(pieces, tokenizer):
            batch.append((text, ends and ends_count))
            characters += len(text) + 1
            if characters >= _BATCH:
                yield index, batch
                batch, characters = [], 0
    yield len(sources.files), batch


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
        for _, match in zip(range(_ATTEMPTS), found, strict=False):
            at = match.start()
            before, after = text[max(begin, at - _CONTEXT) : at], text[at : at + _CONTEXT]
            if tokenizer is None or tokenizer.splits(before, after):
                return at
    return 0
