"""manifest.json of a checkpoint: all that is not a tensor, and the checksums of the other files.

A folder with a manifest is a checkpoint.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mntrain.checkpoint.format import DTYPE_NAMES, DTYPES, ChecksummedRange

FORMAT = "mntrain checkpoint 1"
FILE = "manifest.json"
MODEL = "model.safetensors"  # parameters and buffers, as in the model's state_dict
OPTIMIZER = "optimizer.safetensors"  # "parameter/key": optimizer state and master weights
RANDOM = "random.safetensors"  # "rank/source": states of random generators
FILES = (MODEL, OPTIMIZER, RANDOM)


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of one parameter, without the tensors of the parameter's shape."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # the dimensions in memory order (`zero.kernels.order`)
    tensor_keys: tuple[str, ...]  # keys of the tensors in OPTIMIZER, which lie in this order
    others: dict[str, Any]  # other values, as `encode_values` returns them


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json."""

    step: int  # number of steps taken
    date: str
    versions: dict[str, str]
    world: dict[str, Any]  # "ranks" and "nodes" that wrote it
    config: dict[str, Any]
    samples: int
    skipped_steps: int
    eval_loss: float | None
    wrote_s: float  # seconds from the snapshot until every rank's part was on the disk
    param_groups: list[dict[str, Any]]
    loss_scale: dict[str, Any]
    parameter_states: dict[str, ParameterState]
    checksums: dict[str, list[ChecksummedRange]]  # by file, in order, without gaps

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(part.length for parts in self.checksums.values() for part in parts)

    def to_json(self) -> str:
        """Return the text of the file. Raises ValueError for an option that JSON cannot hold."""
        fields = asdict(self)
        for name, key in _KEYS.items():
            fields[key] = fields.pop(name)
        for state in fields["kept"].values():
            state["by_element"] = state.pop("tensor_keys")
        fields["runs"] = {
            name: [[part.start, part.length, part.checksum] for part in parts]
            for name, parts in self.checksums.items()
        }
        try:
            content = json.dumps(fields)
        except TypeError as error:
            raise ValueError(f"the optimizer's options cannot be saved: {error}") from error
        whole = {"format": FORMAT, "checksum": zlib.crc32(content.encode()), "content": content}
        return json.dumps(whole, indent=1) + "\n"


# Names in the file of fields that have other names here.
_KEYS = {"param_groups": "groups", "parameter_states": "kept", "checksums": "runs"}


def read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises ValueError if it is missing or damaged."""
    try:
        text = (folder / FILE).read_bytes()
    except OSError as error:
        raise ValueError(f"{FILE} cannot be read: {error.strerror}") from error
    damaged = ValueError(f"{FILE} is not that of a checkpoint, or is damaged")
    try:
        whole = json.loads(text)
        version, content, checksum = whole["format"], str(whole["content"]), whole["checksum"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged from error
    if version != FORMAT:
        raise ValueError(f"{FILE} is of format {version!r}, and this program reads {FORMAT!r}")
    if zlib.crc32(content.encode()) != checksum:
        raise ValueError(f"{FILE} is damaged: its checksum differs")
    try:
        return _from_fields(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged from error


def _from_fields(fields: dict[str, Any]) -> Manifest:
    for name, key in _KEYS.items():
        fields[name] = fields.pop(key)
    fields["parameter_states"] = {
        name: ParameterState(
            tuple(s["shape"]), tuple(s["order"]), tuple(s["by_element"]), s["others"]
        )
        for name, s in fields["parameter_states"].items()
    }
    fields["checksums"] = {
        name: [ChecksummedRange(*part) for part in parts]
        for name, parts in fields["checksums"].items()
    }
    return Manifest(**fields)


def describe_writers(world: Mapping[str, Any]) -> str:
    """Return the size of the world that wrote a checkpoint, as in "2 ranks on 1 node"."""
    ranks, nodes = world["ranks"], world["nodes"]
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Encode small optimizer state (numbers, strings and small tensors) for JSON.

    Raises ValueError for a value of another type.
    """
    return {key: _encode(key, value) for key, value in values.items()}


def decode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `encode_values`."""
    return {key: _decode(value) for key, value in values.items()}


def _encode(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        if value.dtype not in DTYPE_NAMES:
            raise ValueError(f"the optimizer's {key} is of dtype {value.dtype}: it cannot be saved")
        wide = value.detach().cpu().double() if value.is_floating_point() else value.cpu()
        return {"dtype": DTYPE_NAMES[value.dtype], "value": wide.tolist()}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ValueError(f"the optimizer's {key} is a {type(value).__name__}: it cannot be saved")


def _decode(value: Mapping[str, Any]) -> Any:
    if "dtype" not in value:
        return value["value"]
    return torch.tensor(value["value"], dtype=DTYPES[value["dtype"]])
