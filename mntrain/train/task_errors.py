"""Errors of a task's own code, before any work starts."""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mntrain.tasks import Task


def name_of(task: Task) -> str:
    """Return what --task says; of a task that keeps no configuration, the name of its class."""
    given: str | None = getattr(getattr(task, "config", None), "task", None)
    return given or f"{type(task).__module__}:{type(task).__qualname__}"


@contextmanager
def errors_of_task(task: Task, work: str) -> Iterator[None]:
    """Raise ValueError for an exception of the block: one line, with the line of the task."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = inspect.getsourcefile(type(task))
        frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        text = str(error).partition("\n")[0]
        raise ValueError(
            f"--task {name_of(task)}: {work}: {type(error).__name__}: {text} "
            f"({Path(frame.filename).name}, line {frame.lineno})"
        ) from error
