import pickle

import numpy as np
import pytest
from corpora import ids, write_bpe

from mntrain.corpus import training_tokens
from mntrain.corpus.text_files import find_files
from mntrain.corpus.training_tokens import Corpus, open_training_tokens


def test_a_pickled_corpus_reopens_its_files(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(97, 123)) * 4)
    found = Corpus([tmp_path / "text"])
    unread = len(pickle.dumps(found))
    expected = found.read(3, 9).tolist()
    pickled = pickle.dumps(found)
    assert len(pickled) == unread
    assert pickle.loads(pickled).read(3, 9).tolist() == expected


def test_files_are_read_end_to_end_in_the_order_of_their_paths(tmp_path):
    for name, content in {"b/a": b"12", "b/b": b"", "a": b"345", "b/c": b"6"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = Corpus(find_files(tmp_path, "**/*").files)
    assert len(found) == 6
    for start in range(6):
        for stop in range(start + 1, 7):
            assert bytes(found.read(start, stop).tolist()) == b"345126"[start:stop]
    for path, glob, whole in ((tmp_path, "b/*", b"126"), (tmp_path / "a", "ignored", b"345")):
        assert bytes(Corpus(find_files(path, glob).files).read(0, 3).tolist()) == whole


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "<u4", "<i8"])
def test_npy_files_of_any_integers_hold_tokens(tmp_path, dtype):
    ids = [0, 1, 255, 7]
    np.save(tmp_path / "a.npy", np.array(ids, dtype=dtype))
    found = Corpus([tmp_path / "a.npy"])
    assert found.read(0, 4).tolist() == ids
    assert found.read(0, 4).dtype == np.int64
    assert found.id_range() == (0, 255)


def test_a_bin_file_holds_little_endian_uint16(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes([1, 0, 0, 1, 255, 255]))
    found = Corpus(find_files(tmp_path / "a.bin", "*").files)
    assert found.read(0, 3).tolist() == [1, 256, 65535]
    assert found.id_range() == (0, 65535)


@pytest.mark.parametrize("dtype", ["<i4", "<u4", "<i8"])
def test_a_bin_file_of_wider_ids_is_refused(tmp_path, dtype):
    ids = np.arange(100) * 1300  # the largest needs 17 bits
    (tmp_path / "a.bin").write_bytes(ids.astype(dtype).tobytes())
    with pytest.raises(ValueError, match=r"a.bin has almost nothing in every second uint16"):
        Corpus([tmp_path / "a.bin"]).read(0, 1)
    (tmp_path / "b.bin").write_bytes((ids % 65536).astype("<u2").tobytes())
    assert Corpus([tmp_path / "b.bin"]).read(0, 100).tolist() == (ids % 65536).tolist()


def test_more_files_are_read_than_are_mapped_at_once(tmp_path):
    files = [tmp_path / f"{i:03}" for i in range(150)]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]))
    found = Corpus(files)
    assert found.read(0, 150).tolist() == list(range(150))
    assert found.read(0, 2).tolist() == [0, 1]
    assert training_tokens._map_tokens.cache_info().currsize == 64


def test_the_range_of_ids_is_that_of_all_or_of_the_first(tmp_path):
    for at in (0, 9, 55, 99):
        ids = np.full(100, 7, dtype=np.int32)
        ids[at], ids[99 - at] = -3, 900
        np.save(tmp_path / "a.npy", ids)
        assert Corpus([tmp_path / "a.npy"]).id_range() == (-3, 900)
        low, high = Corpus([tmp_path / "a.npy"]).id_range(20)
        assert ((low == -3), (high == 900)) == (at < 20, 99 - at < 20)


def test_text_with_a_space_only_and_empty_files_are_tokens_or_none(tmp_path):
    def opened(tokenizer):
        return open_training_tokens(tmp_path, "*.txt", tokenizer, "text")

    (tmp_path / "a.txt").write_text("   ")
    (tmp_path / "b.txt").touch()
    assert bytes(ids(opened("bytes"))) == b"   "
    (tmp_path / "a.txt").write_text("")
    for tokenizer in ("bytes", f"bpe:{write_bpe(tmp_path)}"):
        assert len(opened(tokenizer).tokens) == 0
