"""The built-in tasks on small data."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mntrain.config import Config
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
    """JSON lines of short texts with labels."""
    lines = [
        {"text": f"{i % 5} and " * (i % 5) * times, "label": one} for i, one in enumerate(labels)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
