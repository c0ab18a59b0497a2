import json

import pytest
from corpora import ids, stories, write_bpe, write_records, write_saved_dataset

from mntrain.corpus.text_files import find_files, read_pieces
from mntrain.corpus.training_tokens import open_training_tokens
from mntrain.tasks.hf import read_labelled

pytest.importorskip("pyarrow")


def records(count=20):
    return [{"id": i, "text": text, "label": i % 3} for i, text in enumerate(stories(count))]


def texts(path, field="text"):
    files = find_files(path, "**/*").files
    return [text for file in files for text, _ in read_pieces(file, field, as_bytes=False)]


@pytest.fixture
def saved(tmp_path):
    return write_saved_dataset(tmp_path / "saved", records(), files=3)


def change_state(folder, **changes):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, **changes}))


def test_records_are_read_from_the_listed_files_in_their_order(saved):
    assert texts(saved) == stories(20)
    (saved / "cache-1.arrow").write_bytes((saved / "data-00000-of-00003.arrow").read_bytes())
    assert texts(saved) == stories(20)
    files = json.loads((saved / "state.json").read_text())["_data_files"]
    change_state(saved, _data_files=files[::-1])
    assert texts(saved) == [*stories(20)[13:], *stories(20)[6:13], *stories(20)[:6]]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_tokens_are_those_of_the_same_records_as_json_lines(tmp_path, saved, kind):
    given = "bytes" if kind == "bytes" else f"bpe:{write_bpe(tmp_path)}"
    lines = write_records(tmp_path / "a.jsonl", stories(20))
    first, second = (open_training_tokens(path, "**/*", given, "text") for path in (saved, lines))
    assert ids(first) == ids(second)
    assert list(first.files)[:3] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]


def test_labelled_records_are_those_of_json_lines_and_parquet(tmp_path, saved):
    import pyarrow
    from pyarrow import parquet

    lines = "".join(json.dumps(record) + "\n" for record in records())
    (tmp_path / "a.jsonl").write_text(lines)
    parquet.write_table(pyarrow.Table.from_pylist(records()), tmp_path / "a.parquet")
    first, second, third = (
        read_labelled(find_files(path, "**/*"), "text", "label")
        for path in (saved, tmp_path / "a.jsonl", tmp_path / "a.parquet")
    )
    assert first == second == third
    assert first == (stories(20), [i % 3 for i in range(20)])


def test_an_arrow_stream_alone_is_a_file_of_records(tmp_path, saved):
    path = tmp_path / "alone.arrow"
    path.write_bytes((saved / "data-00001-of-00003.arrow").read_bytes())
    assert texts(path) == stories(20)[6:13]
    with pytest.raises(ValueError, match=r"alone.arrow has no field 'story': its fields are id"):
        texts(path, "story")


def cut(folder, count):
    """Cut bytes from the end of the last file."""
    path = folder / "data-00002-of-00003.arrow"
    path.write_bytes(path.read_bytes()[:-count])


def cut_at_a_batch(folder):
    """Leave the schema and the first two of three record batches of the last file."""
    import pyarrow

    path = folder / "data-00002-of-00003.arrow"
    content = path.read_bytes()
    with pyarrow.BufferReader(content) as file, pyarrow.ipc.open_stream(file) as stream:
        for _ in range(2):
            stream.read_next_batch()
        path.write_bytes(content[: file.tell()])
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        assert stream.read_all().num_rows == 6  # of 7: the library does not notice


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: change_state(f, _indices_data_files=[{"filename": "indices.arrow"}]),
        lambda f: change_state(f, _data_files=[{"filename": "gone.arrow"}]),
        lambda f: change_state(f, _data_files=[{"filename": "a", "skip": 3}]),
        lambda f: change_state(f, _data_files=[]),
        lambda f: (f / "state.json").write_text("[]"),
        lambda f: (f / "state.json").write_text("{"),
    ],
)
def test_a_state_that_would_give_other_records_is_refused(saved, damage):
    damage(saved)
    with pytest.raises(ValueError, match=r"state.json does not name .* dataset.flatten_indices"):
        texts(saved)


END = b"\xff\xff\xff\xff\0\0\0\0"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: cut(f, 8), "00002-of-00003.arrow has no end: it was cut short"),
        (lambda f: cut(f, 100), "00002-of-00003.arrow has no end: it was cut short"),
        (cut_at_a_batch, "00002-of-00003.arrow has no end: it was cut short"),
        (lambda f: (f / "data-00000-of-00003.arrow").write_bytes(END), "arrow cannot be read"),
        (lambda f: (f / "data-00000-of-00003.arrow").write_bytes(b""), "00003.arrow has no end"),
    ],
)
def test_an_arrow_stream_that_was_cut_is_refused(saved, damage, message):
    damage(saved)
    with pytest.raises(ValueError, match=message):
        texts(saved)


def test_a_part_of_a_dataset_one_among_other_files_and_splits_are_refused(tmp_path, saved):
    for path in (saved / "data-00000-of-00003.arrow", tmp_path):
        with pytest.raises(ValueError, match=r"saved is a dataset .* give .*/saved$"):
            find_files(path, "**/*")
    folder = tmp_path / "D"
    for name in ("train", "validation"):
        write_saved_dataset(folder / name, records(4))
    (folder / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match=r"D is a DatasetDict: .*D/train, .*D/validation$"):
        find_files(folder, "**/*")
    assert texts(folder / "train") == stories(4)
    (tmp_path / "E").mkdir()
    (tmp_path / "E" / "state.json").write_text('{"phase": 3}')  # of something else
    assert [file.name for file in find_files(tmp_path / "E", "**/*").files] == ["state.json"]
