"""The first batch of a loader, or some samples, by which ranks find out that their data differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, Dataset

from mntrain.data.randomness import SeededDraws
from mntrain.data.sample_digest import SampleDigest, detached, fields_of

Content: TypeAlias = Mapping[str, list[SampleDigest]]
"""Digests of some samples, by the name of the field (`fields_of`)."""


@dataclass(frozen=True)
class FirstBatch:
    """The properties of a loader and its first batch, or of some samples, equal on all ranks.

    `indices` is a digest of the samples' indices, if they have any. `again` reads the samples of
    `content` once more, in the same states of the default generators: what changes is random. None
    if that is impossible. Samples `may_be_random` altogether where their order cannot differ.
    """

    sizes: Mapping[str, object]
    indices: int | None = None
    content: Content = field(default_factory=dict)
    again: Callable[[], Content] | None = None
    may_be_random: bool = False


def of_indices(loader: DataLoader[Any], indices: list[Any], digest: int | None) -> FirstBatch:
    """Describe a batch of a map-style dataset, with its first and its last sample. Local."""
    found = of_samples(loader.dataset, ends(indices))
    return replace(found, sizes=sizes_of(loader, len(indices)), indices=digest)


def of_samples(dataset: Dataset[Any], indices: Sequence[Any]) -> FirstBatch:
    """Describe some samples of a map-style dataset. Local.

    They are read from a copy of the dataset, so that files which it opens at the first access stay
    closed. One that cannot be read counts as the type of its exception, and a dataset that cannot
    be copied as one without samples.
    """
    try:
        copied = detached(dataset)
    except Exception:
        return FirstBatch({})

    def read() -> Content:
        return fields_of([_read(copied, index) for index in indices])

    return FirstBatch({}, None, read(), read, may_be_random=True)


def of_batch(
    loader: Any, batch: Any, samples: int, anew: Callable[[], Iterator[Any]]
) -> FirstBatch:
    """Describe a batch of any loader; `anew` begins to iterate over its batches again. Local."""

    def read() -> Content:
        return fields_of([next(anew(), None)])

    again = None if hasattr(loader, "__next__") else read
    return FirstBatch(sizes_of(loader, samples), None, fields_of([batch]), again)


def sizes_of(loader: Any, samples: int) -> dict[str, object]:
    """Return the lengths of a loader and its dataset, if they have one, and of its first batch."""
    sizes: dict[str, object] = {}
    for name, owner in (
        ("the number of the dataset's samples", getattr(loader, "dataset", None)),
        ("the number of the loader's batches", loader),
    ):
        with suppress(TypeError, NotImplementedError):
            sizes[name] = len(owner)  # type: ignore[arg-type]
    return {**sizes, "the number of samples in a batch": samples}


def ends(samples: list[Any]) -> list[Any]:
    """Return the first and the last of some samples."""
    return [*samples[:1], *samples[1:][-1:]]


def can_be_read_again(dataset: Any) -> bool:
    """Return True unless a dataset holds an iterator, such as a file, which would go on."""
    held = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    return not hasattr(dataset, "__next__") and not any(
        hasattr(value, "__next__") or (isinstance(value, Dataset) and not can_be_read_again(value))
        for value in held
    )


def _read(dataset: Any, index: Any) -> Any:
    """Return a sample, or the name of the exception's type."""
    try:
        with SeededDraws(0):
            return dataset[index]
    except Exception as error:
        return type(error).__name__
