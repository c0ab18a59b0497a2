"""The weights that a new run begins with, and the parameters that do not train."""

import fnmatch
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mntrain.alike.naming import first_names
from mntrain.checkpoint.format import FILE, MODEL, open_tensors
from mntrain.checkpoint.reader import find_sound, list_checkpoints

_INDEX = "model.safetensors.index.json"  # of Hugging Face: files by name of the tensor
_SHOWN = 4  # names in a list


@torch.no_grad()
def load_weights(model: nn.Module, path: Path) -> tuple[str, list[str]]:
    """Copy weights from a file into a model's parameters and buffers of the same names. Local.

    `path` is a checkpoint or a run of mntrain, a file as torch.save writes it of a state_dict, a
    safetensors file, or a folder of Hugging Face with `model.safetensors` or its parts. Tensors are
    cast to the model's dtypes. Returns words for those that the model has taken, and for others
    that do not fit. Raises ValueError if there is no such file, or nothing matches.
    """
    targets = model.state_dict()
    found: set[str] = set()
    unused, other_shape = [], {}
    try:
        for name, tensor in _read_tensors(path):
            if name not in targets:
                unused.append(name)
            elif tensor.shape != targets[name].shape:
                was, now = tuple(tensor.shape), tuple(targets[name].shape)
                other_shape[name] = f"{name} ({was}, the model's is {now})"
            else:
                targets[name].copy_(tensor)
                found.add(name)
        if not found:
            shown = first_names(unused or list(other_shape.values()), _SHOWN) or "no tensor"
            raise ValueError(
                f"nothing matches the model. The file has {shown}; the model has "
                f"{first_names(list(targets), _SHOWN)}"
            )
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"--init.from {path}: {error}") from error
    storages = {targets[name].data_ptr() for name in found}  # tied weights have one, and two names
    present = {name for name, tensor in targets.items() if tensor.data_ptr() in storages} | found
    missing = [name for name in targets if name not in present | other_shape.keys()]
    named = {
        "not in the file, so they keep their initial values": missing,
        "of another shape in the file, so they keep their initial values": [*other_shape.values()],
        "in the file, but not in the model": unused,
    }
    loaded = len(targets) - len(missing) - len(other_shape)
    return (
        f"{loaded} of {len(targets)} tensors from {path}",
        [f"{first_names(names, _SHOWN)}: {why}" for why, names in named.items() if names],
    )


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.suffix in (".bin", ".pt", ".pth"):
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
            raise ValueError("holds more than tensors by name: save model.state_dict() alone")
        yield from tensors.items()
        return
    for file in _find_files(path):
        with open_tensors(file) as content:
            for name in content.keys():  # noqa: SIM118 - not a mapping
                yield name, content.get_tensor(name)


def _find_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / FILE).exists() or list_checkpoints(path):
        return [find_sound(path, (MODEL,))[0] / MODEL]
    if (path / _INDEX).exists():
        by_name = json.loads((path / _INDEX).read_text())["weight_map"]
        return [path / name for name in sorted(set(by_name.values()))]
    if (path / MODEL).exists():
        return [path / MODEL]
    raise ValueError(
        "has no weights: give a checkpoint or a run, a .safetensors or .pt file, or a folder with "
        f"{MODEL} (of Hugging Face)"
    )


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters whose names match any pattern from training. In place.

    Raises ValueError for a pattern that matches none.
    """
    named = dict(model.named_parameters(remove_duplicate=False))  # tied ones have several names
    for pattern in patterns:
        matching = fnmatch.filter(named, pattern)
        if not matching:
            raise ValueError(
                f"--init.freeze {pattern}: matches no parameter of the model, which has "
                f"{first_names(list(named), _SHOWN)}"
            )
        for name in matching:
            named[name].requires_grad_(False)
