"""Damages to a checkpoint, and what is said of them."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from mntrain.checkpoint.format import FILE, MODEL, OPTIMIZER


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


def change(file: Path, before: str, after: str) -> None:
    file.write_text(file.read_text().replace(before, after, 1))


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = {
    "a manifest cut": (lambda path: cut(path / FILE, -20), f"{FILE} is not that of a checkpoint"),
    "a manifest emptied": (lambda path: cut(path / FILE, 0), f"{FILE} is not that of a check"),
    "another manifest": (
        lambda path: (path / FILE).write_text('{"name": "an app", "icons": []}'),
        f"{FILE} is not that of a checkpoint",
    ),
    "a later manifest": (
        lambda path: change(path / FILE, "checkpoint 3", "checkpoint 9"),
        f"{FILE} is of format 'mntrain checkpoint 9'",
    ),
    "a changed manifest": (
        lambda path: change(path / FILE, "step", "stop"),
        f"{FILE} is damaged: its checksum differs",
    ),
    "a model cut": (lambda path: cut(path / MODEL, -1), f"{MODEL} has "),
    "a model emptied": (
        lambda path: cut(path / MODEL, 0),
        f"{MODEL} has 0 bytes, and was written with",
    ),
    "a pickle": (lambda path: torch.save({"a": 1}, path / MODEL), f"{MODEL} has "),
    "another model": (
        lambda path: save_file({"a": torch.ones(3)}, path / MODEL),
        f"{MODEL} has 76 bytes, and was written with",
    ),
    "no optimizer": (lambda path: (path / OPTIMIZER).unlink(), f"{OPTIMIZER} is missing"),
    "a folder for a model": (
        lambda path: folder_instead(path / MODEL),
        f"{MODEL} is missing",
    ),
}
