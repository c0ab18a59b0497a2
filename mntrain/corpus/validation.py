"""Sets of validation data, by --data.valid-path: their names in errors, and their files."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mntrain.corpus.text_files import TRAIN_OPTIONS, VALID_PATH, CorpusFiles, OptionNames


@contextmanager
def validation_set(name: str) -> Iterator[OptionNames]:
    """Yield the names of a set's options. A ValueError in the context names the option and the set.

    The name of an only set may be empty.
    """
    options = OptionNames(VALID_PATH, dataset=name)
    try:
        yield options
    except ValueError as error:
        if options.label in str(error):
            raise
        raise ValueError(f"{options.label}: {error}") from error


def refuse_shared(training: CorpusFiles, valid: CorpusFiles, options: OptionNames) -> None:
    """Raise ValueError for a file of the validation data that is trained on, by any path."""
    trained = {os.path.realpath(file) for file in training.files}
    if found := next((file for file in valid.files if os.path.realpath(file) in trained), None):
        raise ValueError(
            f"{options.given(valid.root)}: {TRAIN_OPTIONS.given(training.root)} trains on {found}, "
            f"too: give other data, move it out, or let {TRAIN_OPTIONS.glob} leave it out"
        )


def named_files(files: Mapping[str, Path], options: OptionNames) -> dict[str, Path]:
    """Return the files of a set by names that no file of the training data has."""
    label = options.label
    return {name if name == label else f"{label}: {name}": file for name, file in files.items()}
