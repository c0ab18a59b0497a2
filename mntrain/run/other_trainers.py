"""Refusals of what other trainers have made, and of saves that would overwrite each other."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_NO_DIST = 4  # place of this argument


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a model that other code distributes, as a whole or in part. Local."""
    for name, module in model.named_modules():
        which = f"model.{name} is" if name else "model is"
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ValueError(
                f"{which} wrapped in {type(module).__name__}: give the module inside, its .module; "
                "world.optimizer averages the gradients"
            )
        kind = _sharding_of(module)
        if kind:
            raise ValueError(
                f"{which} sharded by {kind}: leave it out, and give the plain module to "
                "world.optimizer with stage=1 or 2, which shards optimizer state and gradients"
            )


def _sharding_of(module: nn.Module) -> str:
    """Return what has sharded a module's parameters; empty for nothing. Imports nothing."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    if fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ())):
        return "fully_shard"
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and any(
        isinstance(parameter, tensors.DTensor) for parameter in module.parameters(recurse=False)
    ):
        return "torch.distributed.tensor"
    return ""


def lone_accelerator(size: int) -> str:
    """Return one sentence if an Accelerator trains each of `size` ranks alone; else "". Local.

    Trainer makes one, too. Reads the state that accelerate shares between its instances.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if size == 1 or state is None or not getattr(state, "_shared_state", None):
        return ""
    try:
        processes = int(state().num_processes)
    except Exception:
        return ""
    if processes != 1:
        return ""
    return (
        f"accelerate's Accelerator, which Hugging Face's Trainer makes too, trains each of {size} "
        "ranks alone here: use world.optimizer and world.shard in its place, or python -m mntrain "
        "--task hf"
    )


class SaveGuard(MetaPathFinder):
    """Refuses `torch.distributed.checkpoint.save` on ranks other than 0 without a process group.

    torch then takes each rank for a single process, and all write the same files, so what one has
    saved is lost. Replaces one function of torch from `install` to `close`, also if it is imported
    in between. Rank 0 may save alone. With a process group of torch.distributed, any rank may.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._module: Any = None
        self._save: Callable[..., Any] | None = None

    def install(self) -> None:
        """Guard the function, or wait for its import. Local."""
        if not self._rank:
            return
        if _SAVER in sys.modules:
            self._replace(sys.modules[_SAVER])
        else:
            sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Restore the function, unless others have replaced it since. Local."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._module is not None and self._module._save_state_dict == self._refuse:
            self._module._save_state_dict = self._save
        self._rank = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the module be replaced once it has been imported. Of other modules, know nothing."""
        if fullname != _SAVER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            self._replace(module)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def _replace(self, module: Any) -> None:
        if hasattr(module, "_save_state_dict"):
            self._module, self._save = module, module._save_state_dict
            module._save_state_dict = self._refuse

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        assert self._save is not None
        alone = kwargs.get("no_dist", len(args) > _NO_DIST and args[_NO_DIST])
        if alone and self._rank:
            raise RuntimeError(
                f"torch.distributed.checkpoint would save on rank {self._rank} as a single "
                "process, since there is no process group, and overwrite the files of rank 0: use "
                "world.checkpoints, or save on world.master alone"
            )
        return self._save(*args, **kwargs)
