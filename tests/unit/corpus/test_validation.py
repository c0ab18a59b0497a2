import numpy as np
import pytest
from corpora import bpe, ids, stories, write_bpe, write_records

from mntrain.corpus.text_files import find_files
from mntrain.corpus.token_folder import write_token_folder
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
    """Paths of data of each kind, twice."""
    other, made = tmp_path / "other", {}
    other.mkdir()
    given = f"bpe:{write_bpe(tmp_path)}"
    tokenizers = {"bytes": load_tokenizer("bytes"), "tokens": load_tokenizer(given)}
    tokenizers["others"] = bpe(other, vocabulary=290)
    for i in (1, 2):
        texts = stories(20 * i)
        made["lines", i] = write_records(tmp_path / f"{i}.jsonl", texts)
        made["text", i], made["ids", i] = tmp_path / f"{i}.txt", tmp_path / f"{i}.bin"
        made["text", i].write_text("".join(texts))
        np.array(range(50 * i), "<u2").tofile(made["ids", i])
        for kind, tokenizer in tokenizers.items():
            folder, lines = tmp_path / f"{kind}{i}", find_files(made["lines", i], "*")
            write_token_folder(folder, lines, "text", tokenizer)
            made[kind, i] = folder
    return made, given


def test_the_tokenizer_of_the_training_data_makes_the_tokens(kinds):
    paths, given = kinds
    tokenizer = load_tokenizer(given)
    end, encoded = tokenizer.end_of_text, tokenizer.encode(stories(40))
    records = [token for one in encoded for token in (*one.tolist(), end)]
    whole = [*tokenizer.encode(["".join(stories(40))])[0].tolist(), end]
    for train in ("text", "lines", "tokens", "ids"):
        for valid, expected in (("text", whole), ("lines", records), ("tokens", records)):
            found = opened(paths[train, 1], paths[valid, 2], given)
            assert ids(found) == expected
            assert found.tokenizer.identity == tokenizer.identity


def test_data_of_another_or_an_unknown_tokenizer_are_refused(kinds):
    paths, _ = kinds
    message = "^--data.valid-path news: .* are of another tokenizer than .*, or of one that is not"
    refused = ["text ids", "tokens ids", "ids text", "ids tokens", "text tokens", "tokens others"]
    for train, valid in map(str.split, [*refused, "tokens bytes"]):
        with pytest.raises(ValueError, match=message):
            opened(paths[train, 1], paths[valid, 2])


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
