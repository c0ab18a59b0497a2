import numpy as np
import pytest
from corpora import ids, stories, write_bpe, write_records

from mntrain.corpus.text_files import find_files
from mntrain.corpus.token_folder import write_token_folder
from mntrain.corpus.tokenizer import load_tokenizer
from mntrain.corpus.training_tokens import open_training_tokens


def opened(path, tokenizer="bytes", field="text", glob="**/*"):
    return open_training_tokens(path, glob, tokenizer, field)


@pytest.fixture
def tokenized(tmp_path, corpus):
    """Makes the folder of tokens t of the corpus."""

    def make(tokenizer, glob="*"):
        folder, sources = tmp_path / "t", find_files(corpus, glob)
        write_token_folder(folder, sources, "text", load_tokenizer(tokenizer))
        return folder

    return make


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("café\r\n")
    (folder / "b.png").write_bytes(b"\0")
    write_records(folder / "c.jsonl", stories(5))
    return folder


@pytest.mark.parametrize("glob", ["*.txt", "*.jsonl", "*"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_raw_text_has_the_tokens_of_its_token_folder(tmp_path, corpus, tokenized, kind, glob):
    given = "bytes" if kind == "bytes" else f"bpe:{write_bpe(tmp_path)}"
    raw, made = opened(corpus, given, glob=glob), opened(tokenized(given, glob))
    assert ids(raw) == ids(made)
    assert raw.end_of_text == made.end_of_text
    assert raw.tokenizer.identity == made.tokenizer.identity
    assert raw.checked
    assert made.checked
    assert (raw.end_of_text is None) == (kind == "bytes" and glob == "*.txt")


def test_bytes_of_text_are_read_in_place(tmp_path, corpus):
    found = opened(corpus, glob="*.txt")
    assert bytes(ids(found)) == (corpus / "a.txt").read_bytes()
    assert not (tmp_path / "cache").exists()
    assert found.files == {"a.txt": corpus / "a.txt"}
    assert found.describe() == "1 file, 7 tokens, which are bytes"


def test_what_nodes_compare_includes_the_tokens_and_the_tokenizer(tmp_path, corpus, tokenized):
    given = f"bpe:{write_bpe(tmp_path)}"
    found = opened(corpus, given)
    assert list(found.files) == ["a.txt", "c.jsonl", "the tokens"]
    assert "6 documents" in found.describe()
    folder = tokenized(given)
    assert list(opened(folder, given).files) == ["manifest.json", "tokens.bin", "tokenizer.json"]
    write_bpe(tmp_path, vocabulary=290)
    other = r"tok.json is not the tokenizer of .*t: .* or leave out --data.tokenizer"
    with pytest.raises(ValueError, match=other):
        opened(folder, given)
    for path, glob in ((folder / "tokens.bin", "*"), (tmp_path, "t/*.bin")):
        with pytest.raises(ValueError, match=r"/t is a folder of tokens .*: give the folder"):
            opened(path, glob=glob)


def test_token_ids_may_have_a_tokenizer(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9))
    assert opened(tmp_path / "a.npy").tokenizer is None
    found = opened(tmp_path / "a.npy", f"bpe:{write_bpe(tmp_path)}")
    assert found.tokenizer.size == 300
    assert not found.checked
    assert "9 token ids without" in opened(tmp_path / "a.npy").describe()


def test_text_with_a_space_only_and_empty_files_are_tokens_or_none(tmp_path):
    (tmp_path / "a.txt").write_text("   ")
    (tmp_path / "b.txt").touch()
    assert bytes(ids(opened(tmp_path, glob="*.txt"))) == b"   "
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="has no text: its 2 files are empty"):
        opened(tmp_path, f"bpe:{write_bpe(tmp_path)}", glob="*.txt")
