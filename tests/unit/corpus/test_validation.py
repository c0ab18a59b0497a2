import numpy as np
import pytest
from corpora import bpe, stories, write_bpe, write_records

from mntrain.corpus.text_files import find_files
from mntrain.corpus.token_folder import write_token_folder
from mntrain.corpus.tokenizer import load_tokenizer
from mntrain.corpus.training_tokens import (
    named_files,
    open_training_tokens,
    open_validation_tokens,
    validation_set,
)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(train, valid, tokenizer="bytes", glob="**/*", name="news"):
    training = open_training_tokens(train, glob, tokenizer, "text")
    with validation_set(name) as options:
        return open_validation_tokens(valid, glob, "text", training, options)


def ids(found):
    return found.tokens.read(0, len(found.tokens)).tolist()


@pytest.fixture
def kinds(tmp_path):
    """Paths of data of each kind, twice."""
    tok, other = write_bpe(tmp_path), tmp_path / "other"
    other.mkdir()
    made = {}
    for i in (1, 2):
        texts = stories(20 * i)
        lines = write_records(tmp_path / f"{i}.jsonl", texts)
        (tmp_path / f"{i}.txt").write_text("".join(texts))
        np.array(range(50 * i), "<u2").tofile(tmp_path / f"{i}.bin")
        for kind, made_by in (
            ("bytes", load_tokenizer("bytes")),
            ("tokens", bpe(tmp_path)),
            ("others", bpe(other, vocabulary=290)),
        ):
            folder = tmp_path / f"{kind}{i}"
            write_token_folder(folder, find_files(lines, "*"), "text", made_by, overwrite=False)
            made[kind, i] = folder
        made |= {("lines", i): lines, ("text", i): tmp_path / f"{i}.txt"}
        made["ids", i] = tmp_path / f"{i}.bin"
    return made, f"bpe:{tok}"


@pytest.mark.parametrize("train", ["text", "lines", "tokens", "ids"])
@pytest.mark.parametrize("valid", ["text", "lines", "tokens"])
def test_the_tokenizer_of_the_training_data_makes_the_tokens(tmp_path, kinds, train, valid):
    paths, given = kinds
    found = opened(paths[train, 1], paths[valid, 2], given)
    end = found.tokenizer.end_of_text
    encoded = found.tokenizer.encode(stories(40))
    records = [token for one in encoded for token in (*one.tolist(), end)]
    whole = [*found.tokenizer.encode(["".join(stories(40))])[0].tolist(), end]
    assert ids(found) == (whole if valid == "text" else records)
    assert found.tokenizer.identity == load_tokenizer(given).identity


@pytest.mark.parametrize(
    ("train", "valid"),
    [
        ("text", "ids"),
        ("tokens", "ids"),
        ("ids", "text"),
        ("ids", "tokens"),
        ("text", "tokens"),
        ("tokens", "others"),
        ("tokens", "bytes"),
    ],
)
def test_data_of_another_or_an_unknown_tokenizer_are_refused(kinds, train, valid):
    paths, _ = kinds
    message = "^--data.valid-path news=.* are of another tokenizer than .*, or of one that is not"
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
            ValueError, match=r"--data.valid-path .*: --data.path .* trains on .*txt, too: give"
        ):
            opened(train, tmp_path / valid, name="")
    assert len(ids(opened(folder, folder / "sub" / "val.txt", glob="a*"))) == 4
    assert len(ids(opened(folder, elsewhere / "b.txt"))) == 4


@pytest.mark.parametrize(
    ("name", "label"), [("", "--data.valid-path"), ("news", "--data.valid-path news")]
)
def test_errors_name_the_option_and_the_set(tmp_path, name, label):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"body": 1}\n')
    given = f"{label}{'=' if name else ' '}{tmp_path}"
    for path, message in [
        ("gone", f"{given}/gone: must be a file or a folder"),
        ("b.jsonl", f"{label}: {tmp_path}/b.jsonl, line 1 has no field 'text'"),
    ]:
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / "a.txt", tmp_path / path, name=name)


def test_compared_files_have_names_of_their_own(kinds):
    paths, given = kinds
    for name, label in (("", "--data.valid-path"), ("news", "--data.valid-path news")):
        with validation_set(name) as options:
            found = opened(paths["text", 1], paths["text", 2], given, name=name)
            assert list(named_files(found.files, options)) == [label, f"{label}: the tokens"]
            found = opened(paths["tokens", 1], paths["tokens", 2], name=name)
            assert named_files(found.files, options) == {
                f"{label}: {file}": paths["tokens", 2] / file
                for file in ("manifest.json", "tokens.bin", "tokenizer.json")
            }
