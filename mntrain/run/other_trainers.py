"""Refusals of what other trainers have made, and of what torch would save and load wrongly."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mntrain.run.guarded_function import GuardedFunction
from zero.full_state import PartOfState

_NO_DIST = 4  # place of this argument of torch's _save_state_dict


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


class CheckpointGuards:
    """Refusals in `torch.distributed.checkpoint` from construction to `close`.

    Without a process group, torch takes each rank for a single process. All would `save` the same
    files, so what one has saved would be lost: only rank 0 may save. With a process group, any rank
    may. One rank's part of an optimizer's state is neither saved nor loaded: torch would take that
    of one rank for that of all.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        torch_checkpoint = "torch.distributed.checkpoint.state_dict_"
        self._functions = [
            GuardedFunction(f"{torch_checkpoint}saver", "_save_state_dict", self._check_save),
            GuardedFunction(f"{torch_checkpoint}loader", "_load_state_dict", self._check_load),
        ]

    def close(self) -> None:
        """Refuse no more. Local."""
        for function in self._functions:
            function.close()

    def _check_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        alone = kwargs.get("no_dist", len(args) >= _NO_DIST and args[_NO_DIST - 1])
        if alone and self._rank:
            raise RuntimeError(
                f"torch.distributed.checkpoint would save on rank {self._rank} as a single "
                "process, since there is no process group, and overwrite the files of rank 0: use "
                "world.checkpoints, or save on world.master alone"
            )
        _expect_no_part(state_dict, "save")

    def _check_load(self, state_dict: Any, *_: Any, **__: Any) -> None:
        _expect_no_part(state_dict, "load")


def _expect_no_part(state: Any, verb: str) -> None:
    """Raise RuntimeError for a state that has one rank's part of a sharded optimizer's. Local."""
    parts: Iterable[Any] = ()
    if isinstance(state, Mapping):
        parts = state.values()
    elif isinstance(state, list | tuple):
        parts = state
    if isinstance(state, PartOfState):
        raise RuntimeError(
            f"torch.distributed.checkpoint cannot {verb} optimizer.state_dict() of a sharded "
            "optimizer, which has only this rank's slices: use world.checkpoints, or "
            "mntrain.checkpoint.load of what it has saved, or save optimizer.full_state_dict(), "
            "load it on every rank, and give it to optimizer.load_state_dict"
        )
    for part in parts:
        _expect_no_part(part, verb)
