"""Folders that `save_to_disk` of the Hugging Face datasets library has written.

A dataset is Arrow files beside state.json, which lists them in their order; a DatasetDict is a
folder of datasets, the splits, beside dataset_dict.json.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
_SPLITS_FILE = "dataset_dict.json"
_INFO_FILE = "dataset_info.json"
_VALIDATION = ("validation", "valid", "val", "dev", "eval", "test")  # usual names, best first


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder is a saved dataset, sound or not."""
    if not (path / STATE_FILE).is_file():
        return False
    return (path / _INFO_FILE).is_file() or next(path.glob("*.arrow"), None) is not None


def saved_files(path: Path) -> list[Path]:
    """Return the Arrow files of a saved dataset in the order of their records.

    Raises ValueError for a state.json that is malformed, that names missing files, or by which the
    records are not those of the files: of a selection, or in another order.
    """
    state = _read_object(path / STATE_FILE)
    names = state.get("_data_files")
    again = "load it with the datasets library, and save it with save_to_disk again"
    if not isinstance(names, list) or not all(_is_plain(entry) for entry in names):
        raise ValueError(f"{path / STATE_FILE} has no list of whole files as _data_files: {again}")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(
            f"{path} is a selection of its files' records, or has another order of them, by "
            f"_indices_data_files in {STATE_FILE}: load it with the datasets library, and save "
            "dataset.flatten_indices()"
        )
    files = [path / entry["filename"] for entry in names]
    if missing := next((file for file in files if not file.is_file()), None):
        raise ValueError(f"{path / STATE_FILE} names {missing}, which does not exist: {again}")
    if not files:
        raise ValueError(f"{path} has no records: its {STATE_FILE} names no file")
    return files


def list_splits(path: Path) -> list[Path]:
    """Return the datasets of a DatasetDict; none of another folder. Raises ValueError."""
    if not (path / _SPLITS_FILE).is_file():
        return []
    names = _read_object(path / _SPLITS_FILE).get("splits")
    listed = names if isinstance(names, list) else []
    found = [path / name for name in listed if isinstance(name, str) and (path / name).is_dir()]
    if not found:
        raise ValueError(f"{path} is a DatasetDict without splits: give the folder of a dataset")
    return found


def validation_split(splits: Sequence[Path]) -> Path | None:
    """Return the split that is for validation, by its name; else one for tests, or None."""
    named = {path.name: path for path in splits}
    return next((named[name] for name in _VALIDATION if name in named), None)


def dataset_of(file: Path) -> Path | None:
    """Return the saved dataset that an Arrow file is a part of, or None."""
    is_part = file.suffix.lower() == ".arrow" and is_saved_dataset(file.parent)
    return file.parent if is_part else None


def _is_plain(entry: Any) -> bool:
    """Return whether an entry of _data_files names a whole file."""
    return (
        isinstance(entry, dict) and entry.keys() == {"filename"} and type(entry["filename"]) is str
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is a JSON {type(content).__name__}, and must be an object")
    return content
