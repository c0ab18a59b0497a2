"""The weights that a new run begins with, and the parameters that do not train."""

import fnmatch
import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mntrain.checkpoint.format import FILE, MODEL, open_tensors
from mntrain.checkpoint.reader import find_sound, list_checkpoints

_INDEX = "model.safetensors.index.json"  # of Hugging Face: files by name of the tensor
_PICKLED = (".bin", ".pt", ".pth")
_SHOWN = 4  # names in a list


@dataclass(frozen=True)
class LoadedWeights:
    """The tensors that a model has taken from a file, by the names of its state_dict."""

    path: Path
    loaded: int  # tensors of the model
    missing: list[str]  # of the model, which keep their initial values
    unused: list[str]  # of the file
    other_shape: list[str]  # with both shapes; these keep their initial values, too

    def __str__(self) -> str:
        total = self.loaded + len(self.missing) + len(self.other_shape)
        return f"{self.loaded} of {total} tensors from {self.path}"

    def problems(self) -> list[str]:
        """Return what did not match, in words."""
        named = {
            "not in the file, so they keep their initial values": self.missing,
            "of another shape in the file, so they keep their initial values": self.other_shape,
            "in the file, but not in the model": self.unused,
        }
        return [f"{_listed(names)}: {why}" for why, names in named.items() if names]


@torch.no_grad()
def load_weights(model: nn.Module, path: Path) -> LoadedWeights:
    """Copy weights from a file into a model's parameters and buffers of the same names. Local.

    `path` is a checkpoint or a run of mntrain, a file as torch.save writes it of a state_dict, a
    safetensors file, or a folder of Hugging Face with `model.safetensors` or its parts. Tensors are
    cast to the model's dtypes. Raises ValueError if there is no such file, or nothing matches.
    """
    targets = model.state_dict()
    found: set[str] = set()
    unused, other_shape = [], {}
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
        shown = _listed(unused or list(other_shape.values())) or "no tensor"
        raise ValueError(
            f"--init.from {path}: nothing matches the model. The file has {shown}; the model has "
            f"{_listed(list(targets))}"
        )
    storages = {targets[name].data_ptr() for name in found}  # tied weights have one, and two names
    present = {name for name, tensor in targets.items() if tensor.data_ptr() in storages} | found
    missing = [name for name in targets if name not in present | other_shape.keys()]
    loaded = len(targets) - len(missing) - len(other_shape)
    return LoadedWeights(path, loaded, missing, unused, list(other_shape.values()))


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    if not path.exists():
        raise ValueError(f"--init.from {path}: does not exist")
    if path.suffix in _PICKLED:
        yield from _read_pickled(path)
        return
    for file in _find_files(path):
        try:
            with open_tensors(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    yield name, tensors.get_tensor(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"--init.from {path}: {error}") from error


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / FILE).exists() or list_checkpoints(path):
        try:
            return [find_sound(path, (MODEL,))[0] / MODEL]
        except ValueError as error:
            raise ValueError(f"--init.from {error}") from error
    if (path / MODEL).exists():
        return [path / MODEL]
    if (path / _INDEX).exists():
        by_name = json.loads((path / _INDEX).read_text())["weight_map"]
        return [path / name for name in sorted(set(by_name.values()))]
    raise ValueError(
        f"--init.from {path}: has no weights: give a checkpoint or a run, a .safetensors or .pt "
        f"file, or a folder with {MODEL} (of Hugging Face)"
    )


def _read_pickled(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"--init.from {path}: is not a file of tensors by torch.save: {error}"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(
            f"--init.from {path}: holds more than tensors by name: save model.state_dict() alone"
        )
    yield from tensors.items()


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Exclude the parameters whose names match any pattern from training; return their elements.

    In place. Raises ValueError for a pattern that matches none.
    """
    named = dict(model.named_parameters(remove_duplicate=False))  # tied ones have several names
    frozen: set[nn.Parameter] = set()
    for pattern in patterns:
        matching = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"--init.freeze {pattern}: matches no parameter of the model, which has "
                f"{_listed(list(named))}"
            )
        frozen |= {named[name] for name in matching}
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in frozen)


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
