"""One checkpoint, written by all ranks at once, that any number of ranks can read."""

from mntrain.checkpoint.discovery import checkpoints_of, set_aside
from mntrain.checkpoint.manifest import writers
from mntrain.checkpoint.restore import FoundCheckpoint, load, newest, restore_randomness
from mntrain.checkpoint.saver import SavedCheckpoint, Saver, TrainingState

__all__ = [
    "FoundCheckpoint",
    "SavedCheckpoint",
    "Saver",
    "TrainingState",
    "checkpoints_of",
    "load",
    "newest",
    "restore_randomness",
    "set_aside",
    "writers",
]
