"""Every Python process that a test starts imports this file: the folder is on PYTHONPATH.

On SIGRTMAX a process of a launch writes the stack of each of its threads to a file of its own in
the folder of the launch. The handler is C code: it needs no GIL, so a process that is stuck in a
library call answers too, and no permission to trace it is needed.

Torch imports much that few tests need, and that is half of the processor time of a short job's
start, and of one with DDP two thirds: its compiler torch._dynamo, which its optimizers tell what
need not be compiled, and of which DDP and checkpoints read an option; and, for the meta device,
operations that are written in Python. A stand-in takes what the optimizers say and has the defaults
of these options, and whoever wants anything else of the compiler gets the real one; another takes
the place of the operations until a module is imported that needs them. The first comparison of
tensors would take as long again. While torch is imported, the search for garbage, which would find
none, takes a sixth of a start more: there is none then.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.machinery
import os
import signal
import sys
from types import ModuleType, SimpleNamespace


def write_stacks_on_signal() -> None:
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "none"))
    path = f"{os.environ['MPI_LAUNCH_FOLDER']}/rank {rank}, process {os.getpid()}.stacks"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGRTMAX, file=descriptor, all_threads=True)


class StandIn(ModuleType):
    """A module that is loaded when something is needed that the stand-in does not have."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self.load()
        return getattr(self, name)

    def load(self):
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)


class CompilerPart:
    """Names of a module of torch._dynamo that others use; the rest is the real one's."""

    def __init__(self, name, **known):
        self.__dict__.update(known, _name=name)

    def __getattr__(self, name):
        return getattr(self._real(), name)

    def __setattr__(self, name, value):
        setattr(self._real(), name, value)

    def _real(self):
        compiler = sys.modules["torch._dynamo"]
        if isinstance(compiler, StandIn):
            compiler.load()
        return getattr(compiler, self._name)


class CompilerStandIn(StandIn):
    """Names of torch._dynamo that much of torch uses, until something else is needed of it."""

    config = CompilerPart("config", error_on_nested_fx_trace=True)  # which checkpoints read
    utils = CompilerPart("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = CompilerPart("trace_rules", clear_lru_cache=lambda: None)

    def graph_break(self, *_, **__):
        pass

    def set_stance(self, *_, **__):
        return contextlib.nullcontext()

    def disable(self, function, *args, **options):
        @functools.wraps(function)
        def call(*call_args, **call_options):
            if type(self) is CompilerStandIn:
                return function(*call_args, **call_options)
            return self.disable(function, *args, **options)(*call_args, **call_options)

        call.__code__ = call.__code__.replace(
            co_filename=self.__spec__.origin
        )  # torch's, in stacks
        return call


class CheckpointStandIn(StandIn):
    """The functions of torch.distributed.checkpoint that are guarded, until a script imports it."""

    state_dict = SimpleNamespace(_get_optim_state_dict=None, _load_optim_state_dict=None)
    state_dict_loader = SimpleNamespace(_load_state_dict=None)
    state_dict_saver = SimpleNamespace(_save_state_dict=None)


META, CHECKPOINT = "torch._meta_registrations", "torch.distributed.checkpoint"
STAND_INS = {"torch._dynamo": CompilerStandIn, META: StandIn, CHECKPOINT: CheckpointStandIn}
# Besides what is in it: what torch imports for META alone, or uses models without memory.
NEED = {"torch._decomp": META, "torch._prims": META, "torch._refs": META}
NEED |= {"torch.utils._content_store": META, "mntrain.train.plan.job_plan": META}
NEED |= {"transformers": META}


class Finder:
    """Finds torch and the stand-ins, and loads the real one before a module that needs it."""

    def find_spec(self, name, path, target=None):
        if name == "torch" or name in STAND_INS:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader = (TorchLoader if name == "torch" else StandInLoader)(spec.loader)
            return spec
        parents = (name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
        needed = NEED.get(name) or next((parent for parent in parents if parent in STAND_INS), "")
        module = sys.modules.get(needed) if needed in STAND_INS else None
        if isinstance(module, StandIn):
            module.load()
            if needed == META and name in sys.modules:  # since that has imported it
                return Loaded(sys.modules[name]).spec
        return None


class StandInLoader:
    def __init__(self, real):
        self.real = real

    def create_module(self, spec):
        return STAND_INS[spec.name](spec.name)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.real


class Loaded:
    """Gives a module as it is: Python would load again what is imported while it looks for it."""

    def __init__(self, module):
        self.module, self.real = module, module.__spec__
        # Of a module that is there, Python takes its own specification, not what a finder returns.
        self.spec = module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, self)

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.real


class TorchLoader:
    """Loads torch without garbage collection."""

    def __init__(self, real):
        self.real = real

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.real
        gc.disable()
        try:
            self.real.exec_module(module)
            if hasattr(module._C, "_set_generator_metaclass"):  # which META sets, too
                base = importlib.import_module("torch._opaque_base")
                module._C._set_generator_metaclass(base.OpaqueBaseMeta)
        finally:
            gc.enable()
        gc.freeze()
        compare_plain_tensors(importlib.import_module("torch.testing._comparison"))


def compare_plain_tensors(comparison):
    """Let comparisons import torch.distributed.tensor no more: without it, there is no DTensor."""
    unwrap = getattr(comparison, "_unwrap_dtensor_for_comparison", None)  # of newer versions

    def unwrapped(*compared):
        return unwrap(*compared) if "torch.distributed.tensor" in sys.modules else compared

    if unwrap is not None:
        comparison._unwrap_dtensor_for_comparison = unwrapped


if "MPI_LAUNCH_FOLDER" in os.environ:
    write_stacks_on_signal()
    # A forked data-loader worker would write into its parent's file.
    os.register_at_fork(after_in_child=write_stacks_on_signal)
sys.meta_path.insert(0, Finder())
