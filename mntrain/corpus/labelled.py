"""Labelled texts of records, for classification."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mntrain.corpus.records import holds_records, read_fields
from mntrain.corpus.text_files import TRAIN_OPTIONS, CorpusFiles, checked_text


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with the indices of their labels."""

    texts: list[str]
    labels: list[int]  # indices of `names`
    names: list[str]  # sorted, numbers by their value


def read_labelled(
    sources: CorpusFiles,
    text_field: str,
    label_field: str,
    known: Sequence[str] = (),
    *,
    only_known: bool = False,
) -> LabelledTexts:
    """Return all records of some files. Raises ValueError for a malformed one.

    Labels are integers or text. They are numbered in the order of `known` names if these are the
    names of all labels, else in sorted order. `only_known`: they are numbered in the order of
    `known`, of which some may be missing, and others are refused.
    """
    if text_field == label_field:
        raise ValueError(
            f"{TRAIN_OPTIONS.text_field} and --hf.label-field are both {text_field!r}: name two "
            "fields"
        )
    fields = {
        text_field: f"the text by {TRAIN_OPTIONS.text_field}",
        label_field: "the label by --hf.label-field",
    }
    allowed = frozenset(known)
    texts: list[str] = []
    found: list[int | str] = []
    for file in sources.files:
        if not holds_records(file):
            raise ValueError(
                f"{file} has no labels: give .jsonl, .parquet or .arrow files to classify"
            )
        for place, (text, label) in read_fields(file, fields):
            texts.append(checked_text(text, place, text_field))
            found.append(_checked_label(label, found, place, label_field))
            if only_known and str(label) not in allowed:
                raise ValueError(
                    f"{place}: {label_field!r} is {label!r}, which no record of "
                    f"{TRAIN_OPTIONS.path} has"
                )
    distinct: list[Any] = list(set(found))  # of one type
    distinct.sort()
    names = [str(label) for label in distinct]
    if only_known:
        names = list(known)
    elif len(names) < 2:
        raise ValueError(f"{sources.root} has {len(names)} labels: classification needs two")
    elif set(known) == set(names) and len(known) == len(names):
        names = list(known)
    indices = {name: index for index, name in enumerate(names)}
    return LabelledTexts(texts, [indices[str(label)] for label in found], names)


def _checked_label(
    label: object, before: Sequence[int | str], place: str, label_field: str
) -> int | str:
    """Return a label. Raises ValueError if it is none, or of another type than those before."""
    if isinstance(label, bool) or not isinstance(label, int | str):
        kind = type(label).__name__
        raise ValueError(f"{place}: {label_field!r} is a {kind}, and must be an integer or a text")
    if before and type(before[0]) is not type(label):
        raise ValueError(
            f"{place}: {label_field!r} is a {type(label).__name__}, and that of earlier records "
            f"is a {type(before[0]).__name__}: use one type"
        )
    return label
