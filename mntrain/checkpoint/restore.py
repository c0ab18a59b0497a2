"""Reading a checkpoint: every rank what it needs, however many there are, at whatever stage."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mntrain.checkpoint import manifest, random_state
from mntrain.checkpoint.discovery import check, checkpoints_of, opened
from mntrain.checkpoint.format import RangeReader
from mntrain.checkpoint.manifest import FILE, MODEL, OPTIMIZER, RANDOM, Manifest
from mntrain.errors import AgreedError
from mntrain.world import World
from zero.optimizer import ZeroOptimizer
from zero.state import StateSlice

# What stays as the job has it: it may be changed, or is chosen for a device.
OF_THE_JOB = ("lr", "weight_decay", "fused", "foreach", "capturable", "differentiable")


class FoundCheckpoint:
    """A checkpoint that is sound, and what is wrong with newer ones. The same on all ranks."""

    def __init__(self, path: Path, content: Manifest, skipped: Mapping[Path, str]) -> None:
        self.path, self.manifest, self.skipped = path, content, skipped


def newest(world: World, where: Path) -> FoundCheckpoint | None:
    """The newest sound checkpoint of a run, or the one that is named. Collective.

    None for a run without any. AgreedError where there are some, and none of them is sound.
    """
    given = world.gather([where] if (where / FILE).exists() else checkpoints_of(where))[0]
    skipped: dict[Path, str] = {}
    for path in given:
        try:
            with world.agreement():
                content = opened(path)
            with world.agreement():
                check(path, content, world.rank, world.size)
        except AgreedError as error:
            skipped[path] = str(error)
        else:
            return FoundCheckpoint(path, content, skipped)
    if not given:
        return None
    reasons = "; ".join(f"{path.name}: {why}" for path, why in skipped.items())
    raise AgreedError(f"no checkpoint in {where} is sound: {reasons}", world.rank)


@torch.no_grad()
def load(found: FoundCheckpoint, model: nn.Module, optimizer: ZeroOptimizer, world: World) -> None:
    """Take a model's and an optimizer's state from a checkpoint. Collective.

    Learning rates and weight decays stay as they are, so that they may be others, and so does what
    an optimizer is told of its device (`fused`). AgreedError for the state of another model.
    """
    with world.agreement():
        with RangeReader(found.path / MODEL) as reader:
            _take_model(reader, model)
        fresh = [dict(group) for group in optimizer.param_groups]
        with RangeReader(found.path / OPTIMIZER) as reader:
            optimizer.load_state_dict(
                {
                    "slices": _slices(reader, found.manifest, optimizer),
                    "param_groups": found.manifest.groups,
                    "loss_scale": found.manifest.loss_scale,
                }
            )
        for group, before in zip(optimizer.param_groups, fresh, strict=True):
            group.update({key: before[key] for key in OF_THE_JOB if key in before})
            group.update(
                {k: tuple(group[k]) for k, v in before.items() if isinstance(v, tuple)}
            )  # JSON makes lists of them


def restore_randomness(found: FoundCheckpoint, world: World) -> bool:
    """Go on with this rank's random numbers, if as many ranks saved. Local; whether it has."""
    if found.manifest.world["ranks"] != world.size:
        return False
    with RangeReader(found.path / RANDOM) as reader:
        states = {
            name.partition("/")[2]: reader.read(name, 0, entry.shape[0])
            for name, entry in reader.layout.entries.items()
            if name.partition("/")[0] == str(world.rank)
        }
    random_state.restore(states, world.device)
    return True


def _take_model(reader: RangeReader, model: nn.Module) -> None:
    state: dict[str, Tensor] = model.state_dict()
    there = reader.layout.entries
    wrong = [f"it lacks {name}" for name in state if name not in there]
    wrong += [f"it has {name}, which this model has not" for name in there if name not in state]
    wrong += [
        f"{name} is {there[name].shape} there, {tuple(tensor.shape)} here"
        for name, tensor in state.items()
        if name in there and there[name].shape != tuple(tensor.shape)
    ]
    if wrong:
        raise ValueError(f"the checkpoint is of another model: {'; '.join(wrong)}")
    for name, tensor in state.items():
        tensor.copy_(reader.read(name, 0, tensor.numel()).view(tensor.shape))


def _slices(
    reader: RangeReader, content: Manifest, optimizer: ZeroOptimizer
) -> Iterator[dict[str, Any]]:
    """What this rank owns, out of the file: one by one, so that no more is in memory."""
    for mine in optimizer.slices():
        if mine.name not in content.kept:
            continue  # the optimizer says that it is missing
        kept = content.kept[mine.name]
        tensors = {}
        if kept.shape == mine.shape:
            tensors = {
                key: reader.read(f"{mine.name}/{key}", mine.low, mine.high)
                for key in kept.by_element
            }
        yield StateSlice(
            mine.name,
            kept.shape,
            kept.order,
            mine.low,
            mine.high,
            tensors,
            manifest.restored(kept.others),
        )._asdict()
