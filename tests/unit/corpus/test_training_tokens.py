import numpy as np
from corpora import ids, write_bpe

from mntrain.corpus.training_tokens import open_training_tokens


def opened(path, tokenizer="bytes", field="text", glob="**/*"):
    return open_training_tokens(path, glob, tokenizer, field)


def test_bytes_of_text_are_read_in_place(tmp_path):
    (tmp_path / "a.txt").write_text("café\r\n")
    (tmp_path / "b.png").write_bytes(b"\0")
    found = opened(tmp_path)
    assert bytes(ids(found)) == (tmp_path / "a.txt").read_bytes()
    assert not (tmp_path / "cache").exists()
    assert found.files == {"a.txt": tmp_path / "a.txt"}
    assert found.end_of_text is None
    assert found.describe() == "1 file, 7 tokens, which are bytes"


def test_token_ids_may_have_a_tokenizer(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9))
    assert opened(tmp_path / "a.npy").tokenizer is None
    found = opened(tmp_path / "a.npy", f"bpe:{write_bpe(tmp_path)}")
    assert found.tokenizer.size == 300
    assert ids(found) == list(range(9))
    assert "9 token ids without" in opened(tmp_path / "a.npy").describe()


def test_text_with_a_space_only_and_empty_files_are_tokens_or_none(tmp_path):
    (tmp_path / "a.txt").write_text("   ")
    (tmp_path / "b.txt").touch()
    assert bytes(ids(opened(tmp_path, glob="*.txt"))) == b"   "
    (tmp_path / "a.txt").write_text("")
    for tokenizer in ("bytes", f"bpe:{write_bpe(tmp_path)}"):
        assert len(opened(tmp_path, tokenizer, glob="*.txt").tokens) == 0
