"""The built-in tasks on small data."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from corpora import write_records

from mntrain.options.config import Config
from mntrain.tasks import Task, load


def language_model(path: Path, context: int = 4, vocab: int = 0, **data: object) -> Task:
    """A small transformer on a text or on token ids."""
    config = Config()
    shape = {"layers": 2, "heads": 2, "width": 16, "context": context, "vocab": vocab}
    changed = replace(config.data, path=path, **data)
    return load("lm", replace(config, data=changed, model=replace(config.model, **shape)))


def hf_task(
    model: Path, path: Path, *, data: dict[str, object] | None = None, **hf: object
) -> Task:
    """A Hugging Face model on a text or on records."""
    config = Config()
    changed = replace(config.data, path=path, **(data or {}))
    return load("hf", replace(config, data=changed, hf=replace(config.hf, model=model, **hf)))


def write_reviews(path: Path, labels: Sequence[object], times: int = 1) -> Path:
    """A saved dataset of short texts with labels."""
    texts = [f"{i % 5} and " * (i % 5) * times for i in range(len(labels))]
    return write_records(path, texts, label=list(labels))
