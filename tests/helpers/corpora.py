"""Small corpora and tokenizers for tests."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from mntrain.corpus.tokenizer import FileTokenizer, train_bpe
from mntrain.corpus.training_tokens import TrainingTokens

WORDS = [
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("café", "größe", "日本", "12", "345", "!?", "--", "(a)", "it's\tx"),
]


def write_records(path: Path, texts: Iterable[str], field: str = "text") -> Path:
    """JSON lines with a text in one field, packed if the name says so."""
    lines = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def write_saved_dataset(
    folder: Path, records: Sequence[dict], files: int = 1, **state: object
) -> Path:
    """A folder as save_to_disk of the datasets library writes it, in record batches of 3 rows."""
    import pyarrow

    folder.mkdir(parents=True)
    schema = pyarrow.Table.from_pylist(list(records)).schema
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        part = records[len(records) * i // files : len(records) * (i + 1) // files]
        table = pyarrow.Table.from_pylist(part, schema)
        with pyarrow.ipc.new_stream(folder / name, schema) as stream:
            stream.write_table(table, max_chunksize=3)
    listed = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps({**listed, "_fingerprint": "0", **state}))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return folder


def ids(found: TrainingTokens) -> list[int]:
    """All tokens of some data."""
    return found.tokens.read(0, len(found.tokens)).tolist()


def stories(count: int) -> list[str]:
    """Short documents that have something to learn."""
    return [f"{i} and {i + 1} make {2 * i + 1}.\nThat is all\n" for i in range(count)]


def write_bpe(folder: Path, texts: Sequence[str] | None = None, vocabulary: int = 300) -> Path:
    """The tokenizer.json of a byte-pair encoding of stories, or of other texts."""
    path = folder / "tok.json"
    path.write_bytes(train_bpe([texts or stories(50)], vocabulary))
    return path


def bpe(folder: Path, **options: object) -> FileTokenizer:
    """A byte-pair encoding."""
    return FileTokenizer(write_bpe(folder, **options))  # type: ignore[arg-type]
