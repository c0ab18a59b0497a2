"""Validation data of their own, by --data.valid-path, in the built-in tasks."""

import numpy as np
import pytest
from corpora import stories, write_records
from hf_models import write_bert, write_gpt2
from text_tasks import hf_task, language_model, write_reviews

from mntrain.corpus.tokenizer import FileTokenizer

# Of several workers, one imports the libraries, which takes seconds.
pytestmark = pytest.mark.xdist_group("large libraries")


def lm(path, valid, vocab=0):
    return language_model(path, vocab=vocab, valid_path=valid)


def hf(model, path, valid, **options):
    return hf_task(model, path, data={"valid_path": valid}, **options)


def samples(dataset):
    return [dataset[i] for i in range(len(dataset))]


def tokens(windows):
    """The tokens of windows of the language model, which overlap by one."""
    found = samples(windows)
    return [int(found[0][0]), *(int(token) for window in found for token in window[1:])]


# ---- the language model ----


def test_train_bin_trains_as_a_whole_and_val_bin_validates(tmp_path):
    np.arange(41, dtype="<u2").tofile(tmp_path / "train.bin")
    np.array([40, 3, 0, 5, 6, 7, 8, 9, 10, 0], "<u2").tofile(tmp_path / "val.bin")
    made = lm(tmp_path / "train.bin", tmp_path / "val.bin")
    assert tokens(made.dataset("train")) == list(range(41))
    assert tokens(made.dataset("valid")) == [40, 3, 0, 5, 6, 7, 8, 9, 10]
    assert made.model().embedding.weight.shape[0] == 41
    assert made.compared_files() == {
        "--data.path": tmp_path / "train.bin",
        "--data.valid-path": tmp_path / "val.bin",
    }
    assert made.describe_data().splitlines() == [
        "data: 1 file, 41 token ids without a tokenizer; ids are below 41",
        "10 training windows of 4 tokens; 200 steps of 32 windows are 200 epochs",
        "validation: 1 file, 10 token ids without a tokenizer, 2 windows",
    ]


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path):
    np.arange(40).astype("<u2").tofile(tmp_path / "train.bin")
    np.array([1, 2, 3, 4, 50]).astype("<u2").tofile(tmp_path / "val.bin")
    given = {"code": tmp_path / "val.bin"}
    for vocab, known in ((0, 40), (50, 50)):
        message = rf"^--data.valid-path code: .* id 50, outside the vocabulary of {known}, "
        with pytest.raises(ValueError, match=message):
            lm(tmp_path / "train.bin", given, vocab)
    lm(tmp_path / "train.bin", given, vocab=51)


def test_sets_are_named_everywhere(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_text("all of this trains")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.txt").write_text("code, in a folder")
    (tmp_path / "code" / "b.png").write_bytes(b"\0")
    (tmp_path / "news.txt").write_text("some news")
    given = {"code": tmp_path / "code", "news": tmp_path / "news.txt"}
    made = lm(tmp_path / "train", given)
    sets = made.dataset("valid")
    assert {name: bytes(tokens(windows)) for name, windows in sets.items()} == {
        "code": b"code, in a folder",
        "news": b"some news",
    }
    assert bytes(tokens(made.dataset("train"))) == b"all of this trains"[:17]
    assert made.compared_files() == {
        "a.txt": tmp_path / "train" / "a.txt",
        "--data.valid-path code: a.txt": tmp_path / "code" / "a.txt",
        "--data.valid-path news": tmp_path / "news.txt",
    }
    assert made.describe_data().splitlines()[2:] == [
        "validation code: 1 file, 17 tokens, which are bytes, 4 windows",
        "--data.valid-path code: skipped 1 file that is not text: b.png",
        "validation news: 1 file, 9 tokens, which are bytes, 2 windows",
    ]


def test_data_too_short_for_a_window_are_refused_with_the_set(tmp_path):
    long, short = tmp_path / "a.txt", tmp_path / "b.txt"
    long.write_text("12345")
    short.write_text("1234")
    too_short = r"the data has 4 tokens, but {} needs a window, 5 tok"
    with pytest.raises(ValueError, match="^--data.valid-path b: " + too_short.format("validation")):
        lm(long, {"b": short})
    with pytest.raises(ValueError, match="^" + too_short.format("training")):
        lm(short, long)


# ---- Hugging Face models ----


@pytest.fixture
def text(tmp_path):
    return write_records(tmp_path / "a", stories(50))


def test_a_causal_model_validates_on_text_by_its_own_tokenizer(tmp_path, text):
    other = write_records(tmp_path / "b", stories(90)[50:])
    folder = write_gpt2(tmp_path / "gpt2")
    made = hf(folder, text, {"b": other})
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    encoded = [token for one in tokenizer.encode(stories(90)[50:]) for token in (*one, 0)]
    assert tokens(made.dataset("valid")["b"]) == encoded[: (len(encoded) - 1) // 32 * 32 + 1]
    names = ["data-00000-of-00001.arrow", "the tokens"]
    names += [f"--data.valid-path b: {name}" for name in names]
    assert list(made.compared_files())[: len(names)] == names
    np.full(99, 304, "<u2").tofile(tmp_path / "v.bin")
    np.zeros(99, "<u2").tofile(tmp_path / "t.bin")
    with pytest.raises(ValueError, match=r"valid-path: .* 304, outside the vocabulary of 304"):
        hf(folder, tmp_path / "t.bin", tmp_path / "v.bin")


def test_records_to_validate_on_have_the_labels_of_the_training_data(tmp_path):
    train = write_reviews(tmp_path / "a", ["pos", "neg", "none"] * 4)
    given = {
        "one": write_reviews(tmp_path / "b", ["pos", "pos"]),
        "two": write_reviews(tmp_path / "c", ["none", "neg", "pos"]),
    }
    folder = write_bert(tmp_path / "bert")
    made = hf(folder, train, given, head="classification")
    assert made.model().config.label2id == {"neg": 0, "none": 1, "pos": 2}
    assert len(made.dataset("train")) == 12
    sets = {name: samples(data) for name, data in made.dataset("valid").items()}
    assert [label for _, label in sets["one"]] == [2, 2]
    assert [label for _, label in sets["two"]] == [1, 0, 2]
    encoded = FileTokenizer(folder / "tokenizer.json").encode_samples(["", "1 and "], 24)
    assert [ids.tolist() for ids, _ in sets["one"]] == [one.tolist() for one in encoded]
    names = [
        f"{of}data-00000-of-00001.arrow"
        for of in ("", *map("--data.valid-path {}: ".format, given))
    ]
    assert list(made.compared_files())[:3] == names
    described = made.describe_data()
    assert "data: 12 records with 3 labels: neg 4, none 4, pos 4\n" in described
    assert "\nvalidation one: 2 records with 3 labels: neg 0, none 0, pos 2\n" in described
    assert len(hf(folder, train, given["one"], head="classification").dataset("valid")) == 2


def test_records_that_cannot_validate_are_refused(tmp_path):
    train = write_reviews(tmp_path / "a", ["pos", "neg"] * 4)
    given = {"news": write_reviews(tmp_path / "b", ["pos", "odd"])}
    folder = write_bert(tmp_path / "bert")
    with pytest.raises(
        ValueError, match=r"^--data.valid-path news: no record of --data.path has the label 'odd'"
    ):
        hf(folder, train, given, head="classification")
    with pytest.raises(ValueError, match=r"trains on .*arrow, too"):
        hf(folder, train, {"news": train}, head="classification")
