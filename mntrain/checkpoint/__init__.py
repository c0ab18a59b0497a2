"""Checkpoints: written by all ranks in parallel, readable by any number of ranks at any stage."""

from mntrain.checkpoint.directory_saver import DirectorySaver
from mntrain.checkpoint.format import Manifest
from mntrain.checkpoint.objects import Stateful
from mntrain.checkpoint.reader import (
    FoundCheckpoint,
    list_checkpoints,
    load,
    newest,
    restore_randomness,
    set_aside,
)
from mntrain.checkpoint.saver import Save, Saved
from mntrain.checkpoint.snapshots import random_states, set_random_states

__all__ = [
    "DirectorySaver",
    "FoundCheckpoint",
    "Manifest",
    "Save",
    "Saved",
    "Stateful",
    "list_checkpoints",
    "load",
    "newest",
    "random_states",
    "restore_randomness",
    "set_aside",
    "set_random_states",
]
