"""Records of JSON lines, Parquet files and Arrow streams, and folders of the datasets library.

`save_to_disk` of that library writes a dataset as Arrow files beside state.json, which lists them
in their order.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_LINES = (".jsonl", ".jsonl.gz")
_PARQUET = ".parquet"
_ARROW = ".arrow"
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
_ROWS = 256  # that are read at once
_STATE_FILE = "state.json"


def holds_records(path: Path) -> bool:
    """Return whether a file holds records with fields, by its name."""
    return path.name.lower().endswith((*_LINES, _PARQUET, _ARROW))


def read_fields(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Return the place of each record, for errors, and its values of some fields.

    Raises ValueError with the place for a record without such a field, and for malformed files.
    """
    lines = path.name.lower().endswith(_LINES)
    return (_line_fields if lines else _column_fields)(path, fields)


def _line_fields(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    packed = path.name.lower().endswith(".gz")
    with gzip.open(path, "rb") if packed else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    place = f"{path}, line {number}"
                    yield place, _parse(line, fields, place)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


def _parse(line: bytes, fields: Sequence[str], place: str) -> list[Any]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} is a JSON {type(record).__name__}, and must be an object")
    _expect(fields, record, place)
    return [record[name] for name in fields]


def _column_fields(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    try:
        import pyarrow  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from error
    read = _parquet_batches if path.name.lower().endswith(_PARQUET) else _arrow_batches
    row = 0
    try:
        for batch in read(path, fields):
            columns = [batch.column(name).to_pylist() for name in fields]
            for values in zip(*columns, strict=True):
                row += 1
                yield f"{path}, row {row}", list(values)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _parquet_batches(path: Path, fields: Sequence[str]) -> Iterator[Any]:
    from pyarrow import parquet  # noqa: PLC0415 - optional

    with parquet.ParquetFile(path) as file:
        _expect(fields, file.schema_arrow.names, str(path))
        yield from file.iter_batches(batch_size=_ROWS, columns=fields)


def _arrow_batches(path: Path, fields: Sequence[str]) -> Iterator[Any]:
    import pyarrow  # noqa: PLC0415 - optional

    with path.open("rb") as ending:
        ending.seek(-min(len(_ARROW_END), path.stat().st_size), os.SEEK_END)
        if ending.read() != _ARROW_END:  # a stream that is cut between two batches has no error
            raise ValueError(f"{path} has no end: it was cut short, or is not an Arrow stream")
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        _expect(fields, stream.schema.names, str(path))
        for batch in stream:
            for start in range(0, batch.num_rows, _ROWS):
                yield batch.slice(start, _ROWS)


def _expect(fields: Sequence[str], present: Any, place: str) -> None:
    """Raise ValueError for a field that is not present."""
    for name in fields:
        if name not in present:
            raise ValueError(
                f"{place} has no field {name!r}: its fields are {', '.join(present) or 'none'}; "
                "name another by the option text-field or label-field"
            )


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder is a dataset that was saved by `save_to_disk`, sound or not."""
    described = (path / "dataset_info.json").is_file() or any(path.glob(f"*{_ARROW}"))
    return described and (path / _STATE_FILE).is_file()


def saved_files(path: Path) -> list[Path]:
    """Return the Arrow files of a saved dataset in the order of their records.

    Raises ValueError for a malformed state.json, and for one by which the records are not those of
    the files: of a selection, or in another order.
    """
    try:
        state = json.loads((path / _STATE_FILE).read_bytes())
        files = [path / entry["filename"] for entry in state["_data_files"]]
        whole = all(entry.keys() == {"filename"} for entry in state["_data_files"])
        moved = state.get("_indices_data_files") or state.get("_indices_files")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        files, whole, moved = [], False, None
    if moved or not whole or not files or not all(file.is_file() for file in files):
        raise ValueError(
            f"{path / _STATE_FILE} does not name whole files that exist, with all records in their "
            "order: load it with the datasets library, and save dataset.flatten_indices()"
        )
    return files
