"""Every Python process that a test starts imports this file: the folder is on PYTHONPATH.

On SIGRTMAX a process of a launch writes the stack of each of its threads to a file of its own in
the folder of the launch. The handler is C code: it needs no GIL, so a process that is stuck in a
library call answers too, and no permission to trace it is needed.

Torch's optimizers import its compiler, torch._dynamo, to tell it what it need not compile. That is
40 % of the processor time of a short job's start, and few tests compile: a stand-in takes what the
optimizers say, and whoever wants anything else of the compiler gets the real one.
"""

import contextlib
import faulthandler
import functools
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from types import ModuleType


def write_stacks_on_signal() -> None:
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "none"))
    path = f"{os.environ['MPI_LAUNCH_FOLDER']}/rank {rank}, process {os.getpid()}.stacks"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGRTMAX, file=descriptor, all_threads=True)


class StandIn(ModuleType):
    """What torch.optim and jobs call of torch._dynamo until something else of it is needed."""

    def graph_break(self, *_, **__):
        pass

    def set_stance(self, *_, **__):
        return contextlib.nullcontext()

    def disable(self, function, *args, **options):
        @functools.wraps(function)
        def call(*call_args, **call_options):
            if type(self) is StandIn:
                return function(*call_args, **call_options)
            return self.disable(function, *args, **options)(*call_args, **call_options)

        call.__code__ = call.__code__.replace(
            co_filename=self.__spec__.origin
        )  # torch's, in stacks
        return call

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self.load()
        return getattr(self, name)

    def load(self):
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)


class StandInFinder(importlib.abc.MetaPathFinder):
    """Finds the stand-in for torch._dynamo, and loads the real one before a module in it."""

    def find_spec(self, name, path, target=None):
        module = sys.modules.get("torch._dynamo")
        if name == "torch._dynamo":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader = StandInLoader(spec.loader)
            return spec
        if name.startswith("torch._dynamo.") and type(module) is StandIn:
            module.load()
        return None


class StandInLoader(importlib.abc.Loader):
    def __init__(self, real):
        self.real = real

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.real


if "MPI_LAUNCH_FOLDER" in os.environ:
    write_stacks_on_signal()
    # A forked data-loader worker would write into its parent's file.
    os.register_at_fork(after_in_child=write_stacks_on_signal)
sys.meta_path.insert(0, StandInFinder())
