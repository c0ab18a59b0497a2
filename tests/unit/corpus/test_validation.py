import numpy as np
import pytest
from corpora import ids, stories, write_bpe, write_records

from mntrain.corpus.tokenizer import load_tokenizer
from mntrain.corpus.training_tokens import (
    named_in_errors,
    open_training_tokens,
    open_validation_tokens,
)


def opened(train, valid, tokenizer="bytes", glob="**/*", name="news"):
    training = open_training_tokens(train, glob, tokenizer, "text")
    with named_in_errors("--data.valid-path", name) as label:
        return open_validation_tokens(valid, glob, "text", training, label)


@pytest.fixture
def kinds(tmp_path):
    """Paths of data of each kind, twice, and a tokenizer."""
    made = {}
    for i in (1, 2):
        texts = stories(20 * i)
        made["records", i] = write_records(tmp_path / f"records{i}", texts)
        made["text", i], made["ids", i] = tmp_path / f"{i}.txt", tmp_path / f"{i}.bin"
        made["text", i].write_text("".join(texts))
        np.array(range(50 * i), "<u2").tofile(made["ids", i])
    return made, f"bpe:{write_bpe(tmp_path)}"


def test_the_tokenizer_of_the_training_data_makes_the_tokens(kinds):
    paths, given = kinds
    tokenizer = load_tokenizer(given)
    end, encoded = tokenizer.end_of_text, tokenizer.encode(stories(40))
    records = [token for one in encoded for token in (*one.tolist(), end)]
    whole = [*tokenizer.encode(["".join(stories(40))])[0].tolist(), end]
    for train in ("text", "records", "ids"):
        for valid, expected in (("text", whole), ("records", records)):
            found = opened(paths[train, 1], paths[valid, 2], given)
            assert ids(found) == expected
            assert found.tokenizer.identity == tokenizer.identity


def test_data_of_another_or_an_unknown_tokenizer_are_refused(kinds):
    paths, given = kinds
    message = "^--data.valid-path news: .* are of another tokenizer than .*, or of one that is not"
    for train, valid, tokenizer in (
        ("text", "ids", "bytes"),
        ("records", "ids", given),
        ("ids", "text", "bytes"),
        ("ids", "records", "bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(paths[train, 1], paths[valid, 2], tokenizer)


def test_data_that_are_trained_on_are_refused_by_any_path(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    (folder / "sub").mkdir(parents=True)
    elsewhere.mkdir()
    for path in (folder / "a.txt", folder / "sub" / "val.txt", elsewhere / "b.txt"):
        path.write_text("text")
    (elsewhere / "link.txt").symlink_to(folder / "sub" / "val.txt")
    (tmp_path / "linked").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for train, valid in [
        (folder / "a.txt", folder / "a.txt"),
        (folder, folder),
        (folder, tmp_path / "linked"),
        (folder, folder / "sub" / "val.txt"),
        (folder, "folder/../folder/sub"),
        (folder, elsewhere / "link.txt"),
        (folder, elsewhere),
        (folder / "sub" / "val.txt", folder),
    ]:
        with pytest.raises(
            ValueError, match=r"^--data.valid-path: --data.path .* trains on .*txt, too: give"
        ):
            opened(train, tmp_path / valid, name="")
    assert len(ids(opened(folder, folder / "sub" / "val.txt", glob="a*"))) == 4
    assert len(ids(opened(folder, elsewhere / "b.txt"))) == 4
