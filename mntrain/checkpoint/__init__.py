"""One checkpoint, written by all ranks at once, that any number of ranks can read."""

from mntrain.checkpoint.discovery import checkpoints_of, set_aside
from mntrain.checkpoint.manifest import describe_writers
from mntrain.checkpoint.restore import FoundCheckpoint, load, newest, restore_randomness
from mntrain.checkpoint.saver import RunProgress, SavedCheckpoint, Saver

__all__ = [
    "FoundCheckpoint",
    "RunProgress",
    "SavedCheckpoint",
    "Saver",
    "checkpoints_of",
    "describe_writers",
    "load",
    "newest",
    "restore_randomness",
    "set_aside",
]
