"""What a checkpoint says of itself: manifest.json, which makes a folder a checkpoint."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mntrain.checkpoint.format import DTYPES, NAMES, ChecksummedRange

FORMAT = "mntrain checkpoint 1"
FILE = "manifest.json"
MODEL = "model.safetensors"  # parameters and buffers, as in the model's state_dict
OPTIMIZER = "optimizer.safetensors"  # "parameter/key": the optimizer's state, and masters
RANDOM = "random.safetensors"  # "rank/source": states of generators
FILES = (MODEL, OPTIMIZER, RANDOM)


@dataclass(frozen=True)
class FileContents:
    """What the optimizer keeps of one parameter, besides the tensors of its shape."""

    shape: tuple[int, ...]
    order: tuple[
        int, ...
    ]  # see `zero.tensor_views.order`; tensors of state are flat, in this order
    by_element: tuple[str, ...]  # keys of these tensors
    others: dict[str, Any]  # numbers, as `written` writes them


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds besides tensors. Step: how many have been taken."""

    step: int
    date: str
    versions: dict[str, str]
    world: dict[str, Any]
    config: dict[str, Any]
    samples: int
    skipped_steps: int
    eval_loss: float | None
    wrote_s: float  # seconds from the copy until every rank's part was on the disk
    groups: list[dict[str, Any]]
    loss_scale: dict[str, Any]
    kept: dict[str, FileContents]
    runs: dict[str, list[ChecksummedRange]]  # by file

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(run.length for runs in self.runs.values() for run in runs)

    def to_json(self) -> str:
        """The text of the file. ValueError for options that JSON has no word for."""
        runs = {
            name: [[run.start, run.length, run.checksum] for run in runs]
            for name, runs in self.runs.items()
        }
        try:
            content = json.dumps({**asdict(self), "runs": runs})
        except TypeError as error:
            raise ValueError(f"the optimizer's options cannot be saved: {error}") from error
        whole = {"format": FORMAT, "checksum": zlib.crc32(content.encode()), "content": content}
        return json.dumps(whole, indent=1) + "\n"


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint. ValueError for one that is missing, foreign or damaged."""
    try:
        text = (folder / FILE).read_bytes()
    except OSError as error:
        raise ValueError(f"{FILE} cannot be read: {error.strerror}") from error
    foreign = ValueError(f"{FILE} is not that of a checkpoint, or is damaged")
    try:
        whole = json.loads(text)
        said, content, checksum = whole["format"], str(whole["content"]), whole["checksum"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise foreign from error
    if said != FORMAT:
        raise ValueError(f"{FILE} is of format {said!r}, and this program reads {FORMAT!r}")
    if zlib.crc32(content.encode()) != checksum:
        raise ValueError(f"{FILE} is damaged: it does not have its checksum")
    try:
        return _from_fields(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise foreign from error


def _from_fields(fields: Mapping[str, Any]) -> Manifest:
    kept = {
        name: FileContents(
            tuple(one["shape"]), tuple(one["order"]), tuple(one["by_element"]), one["others"]
        )
        for name, one in fields["kept"].items()
    }
    runs = {name: [ChecksummedRange(*run) for run in runs] for name, runs in fields["runs"].items()}
    return Manifest(**{**fields, "kept": kept, "runs": runs})


def describe_writers(world: Mapping[str, Any]) -> str:
    """Who saved a checkpoint: "2 ranks on 1 node"."""
    ranks, nodes = world["ranks"], world["nodes"]
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


def written(others: Mapping[str, Any]) -> dict[str, Any]:
    """What is not by element, for JSON: numbers, and tensors of no dimension or of a few numbers.

    ValueError for what cannot be written so.
    """
    return {key: _written(key, value) for key, value in others.items()}


def restored(others: Mapping[str, Any]) -> dict[str, Any]:
    """What `written` was given."""
    return {key: _restored(value) for key, value in others.items()}


def _written(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.dtype not in NAMES:
            raise ValueError(f"the optimizer's {key} is of dtype {value.dtype}: it cannot be saved")
        wide = value.detach().cpu().double() if value.is_floating_point() else value.cpu()
        return {"dtype": NAMES[value.dtype], "value": wide.tolist()}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ValueError(f"the optimizer's {key} is a {type(value).__name__}: it cannot be saved")


def _restored(value: Mapping[str, Any]) -> Any:
    if "dtype" not in value:
        return value["value"]
    return torch.tensor(value["value"], dtype=DTYPES[value["dtype"]])
