"""`python -m mntrain tokenize`: turn text into a folder of tokens.

One process, without MPI and torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mntrain.corpus.text_files import find_files
from mntrain.corpus.token_folder import check_output, text_batches, write_token_folder
from mntrain.corpus.tokenizer import (
    MIN_BPE_VOCABULARY,
    TOKENIZER_FILE,
    FileTokenizer,
    load_tokenizer,
    train_bpe,
)


def run(words: Sequence[str]) -> int:
    """Run a command line and return exit code 0.

    Raises ValueError and OSError for bad input, and SystemExit, with 2 for a malformed command line
    and 0 after --help.
    """
    _tokenize(_parser().parse_args(words))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mntrain tokenize",
        description="Tokenize text into a folder of tokens for --data.path. Text is UTF-8 files, "
        "or a field of JSON lines (.jsonl, .jsonl.gz), Parquet (.parquet) or a dataset that the "
        "datasets library has saved; other files are skipped and named.",
    )
    parser.add_argument("input", metavar="INPUT", type=Path, help="a file, or a folder of files")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="a new folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--bpe-vocab",
        metavar="N",
        type=int,
        help="train a byte-level byte-pair encoding with so many tokens, and apply it",
    )
    which.add_argument(
        "--tokenizer",
        metavar="TOKENIZER",
        help="apply bytes, bpe:FILE (a tokenizer.json) or hf:PATH (of Hugging Face)",
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="field of records (default: text)"
    )
    parser.add_argument(
        "--glob", default="**/*", help="pattern of the files to read in a folder (default: **/*)"
    )
    return parser


def _tokenize(options: argparse.Namespace) -> None:
    """Check the options, tokenize, and print what was made. Raises ValueError and OSError."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    output, field, vocabulary = options.output, options.text_field, options.bpe_vocab
    if vocabulary is not None and vocabulary < MIN_BPE_VOCABULARY:
        raise ValueError(
            f"--bpe-vocab {vocabulary}: must be at least {MIN_BPE_VOCABULARY}: all bytes, and the "
            "end-of-text token"
        )
    check_output(output)
    tokenizer = load_tokenizer(options.tokenizer) if vocabulary is None else None
    sources = find_files(options.input, options.glob)
    if skipped := sources.describe_skipped():
        _tell(skipped)
    if tokenizer is None:
        _tell(f"training a vocabulary of {vocabulary:,}")
        content = train_bpe(text_batches(sources, field), vocabulary)
        tokenizer = FileTokenizer(output / TOKENIZER_FILE, content)
        if tokenizer.size < vocabulary:
            _tell(
                f"the text is too small for {vocabulary:,} tokens: the vocabulary has "
                f"{tokenizer.size:,}"
            )
    manifest = write_token_folder(output, sources, field, tokenizer)
    print(
        f"{output}: {manifest.tokens:,} tokens ({manifest.dtype}, vocabulary "
        f"{manifest.vocabulary:,}) of {manifest.documents:,} documents in "
        f"{len(manifest.sources):,} files, {sum(manifest.sources.values()) / 1e6:.1f} MB"
    )


def _tell(text: str) -> None:
    print(f"mntrain: {text}", file=sys.stderr)
