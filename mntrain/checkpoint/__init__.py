"""One checkpoint, written by all ranks at once, that any number of ranks can read."""

from mntrain.checkpoint.finding import checkpoints_of, set_aside
from mntrain.checkpoint.loading import Found, load, newest, restore_randomness
from mntrain.checkpoint.manifest import writers
from mntrain.checkpoint.saving import Moment, Saved, Saver

__all__ = [
    "Found",
    "Moment",
    "Saved",
    "Saver",
    "checkpoints_of",
    "load",
    "newest",
    "restore_randomness",
    "set_aside",
    "writers",
]
