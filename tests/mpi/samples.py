"""A dataset as users write it, whose module data-loader workers import too."""

import os
import sys
import threading

import torch
from torch.utils.data import Dataset

import mntrain


class Witness(Dataset):
    """Item i is i, and where it was made: the process, its threads, and whether it has MPI."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert callable(mntrain.init)  # imports what it needs, in the worker
        names = [thread.name for thread in threading.enumerate()]
        return (
            torch.tensor(index),
            os.getpid(),
            "mntrain communication" in names,
            "mpi4py.MPI" in sys.modules,
        )
