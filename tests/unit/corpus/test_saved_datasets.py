import pickle
import sys

import pytest
from corpora import ids, stories, write_bpe, write_records

from mntrain.corpus.text_files import find_files
from mntrain.corpus.tokenizer import load_tokenizer
from mntrain.corpus.training_tokens import open_training_tokens
from mntrain.tasks.hf import read_labelled

# Of several workers, one imports the libraries, which takes seconds.
pytestmark = pytest.mark.xdist_group("large libraries")


@pytest.fixture
def given(tmp_path):
    return f"bpe:{write_bpe(tmp_path)}"


def expected(given, texts):
    tokenizer = load_tokenizer(given)
    return [
        i
        for one in tokenizer.encode([text or "" for text in texts])
        for i in ([*one, 0] if len(one) else [])
    ]


def test_the_tokens_are_those_of_each_text_with_an_end_in_the_order_of_the_rows(tmp_path, given):
    import datasets

    texts = [*stories(2500), None, "", "日本 <|endoftext|>"]  # of several chunks
    saved = write_records(tmp_path / "saved", texts, field="story")
    whole = datasets.load_from_disk(saved)
    whole.select(range(2501, 9, -7)).save_to_disk(tmp_path / "chosen", num_shards=3)
    for path, rows in ((saved, texts), (tmp_path / "chosen", texts[2501:9:-7])):
        found = open_training_tokens(path, "*", given, "story")
        assert ids(found) == expected(given, rows)
        assert found.end_of_text == 0
        middle = found.tokens.read(100, 30_000 if path == saved else 900).tolist()
        assert middle == ids(found)[100 : 100 + len(middle)]
        assert pickle.loads(pickle.dumps(found.tokens)).read(7, 9).tolist() == ids(found)[7:9]
        assert len(pickle.dumps(found.tokens)) < 10_000
        assert found.describe().endswith("tok.json (vocabulary 300)")
    names = [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    assert [*found.files] == [*names, "the tokens"]


def test_tokens_are_made_once_and_anew_for_other_texts_tokenizers_and_fields(
    tmp_path, given, capfd
):
    saved = write_records(tmp_path / "saved", stories(9), other=stories(20)[11:])
    other = write_records(tmp_path / "other", stories(8))
    second = f"bpe:{write_bpe(tmp_path, vocabulary=290).rename(tmp_path / 'second.json')}"
    write_bpe(tmp_path)
    made = []
    for path, tokenizer, field in (
        (saved, given, "text"),
        (saved, given, "text"),
        (saved, given, "other"),
        (saved, second, "text"),
        (other, given, "text"),
    ):
        made.append(open_training_tokens(path, "*", tokenizer, field).files["the tokens"])
    assert made[0] == made[1]
    assert len(set(made)) == 4
    assert capfd.readouterr().err.count("mntrain: tokenizing ") == 4


def test_text_files_are_a_document_each(tmp_path, given):
    (tmp_path / "t").mkdir()
    for name, content in {"b": "\ufeffcafé\r\n", "a": "12", "c": ""}.items():
        (tmp_path / "t" / name).write_bytes(content.encode())
    found = open_training_tokens(tmp_path / "t", "*", given, "text")
    assert ids(found) == expected(given, ["12", "café\r\n"])
    (tmp_path / "t" / "d").write_bytes(b"x" * 9000 + b"\xff")
    with pytest.raises(ValueError, match=r"^--data.path: .*/t/d is not UTF-8: convert it"):
        open_training_tokens(tmp_path / "t", "*", given, "text")


def test_labelled_records_have_their_texts_and_labels(tmp_path):
    saved = write_records(tmp_path / "saved", stories(20), label=[i % 3 for i in range(20)])
    found = read_labelled(find_files(saved, "*"), "text", "label")
    assert found == (stories(20), [i % 3 for i in range(20)])


def test_what_has_no_such_text_and_damaged_folders_are_refused(tmp_path, given, monkeypatch):
    import datasets

    saved = write_records(tmp_path / "saved", stories(3))
    for field, tokenizer, message in (
        ("story", given, "has no field 'story': its fields are id, text; name another"),
        ("id", given, "field 'id' must be text"),
        ("text", "bytes", "is a saved dataset: name a --data.tokenizer for its text"),
    ):
        with pytest.raises(ValueError, match=f"^--data.path: .*{message}"):
            open_training_tokens(saved, "*", tokenizer, field)
    datasets.DatasetDict({"train": datasets.load_from_disk(saved)}).save_to_disk(tmp_path / "D")
    with pytest.raises(ValueError, match=r"D is a DatasetDict: give the folder of one of its spl"):
        find_files(tmp_path / "D", "*")
    (tmp_path / "cache").touch()
    with pytest.raises(ValueError, match=r"cannot be cached: .*; set XDG_CACHE_HOME"):
        open_training_tokens(saved, "*", given, "text")
    (saved / "data-00000-of-00001.arrow").write_bytes(b"cut short")
    with pytest.raises(ValueError, match=r"saved cannot be loaded by the datasets library"):
        find_files(saved, "*")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"saved needs the datasets library: pip install datasets"):
        find_files(saved, "*")
