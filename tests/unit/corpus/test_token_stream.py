import random

import numpy as np
import pytest
from corpora import WORDS, bpe, write_records

from mntrain.corpus import token_folder
from mntrain.corpus.text_files import find_files
from mntrain.corpus.token_folder import resplit, text_batches, token_batches
from mntrain.corpus.tokenizer import ByteTokenizer, FileTokenizer


def tokens_of(path, tokenizer, field="text"):
    batches = list(token_batches(find_files(path, "**/*"), field, tokenizer))
    ids = [one for _, batch in batches for one in batch]
    return np.concatenate([np.zeros(0, int), *ids]).tolist(), sum(n for n, _ in batches)


def random_text(chance, words):
    text = "".join(chance.choice(WORDS) + chance.choice(" \n  ,.") for _ in range(words))
    return text.replace(",.", "\r\n").replace(" .", "\n\n\n")


@pytest.mark.parametrize("seed", range(5))
def test_a_document_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(token_folder, "_PIECE", 200)
    monkeypatch.setattr(token_folder, "_CONTEXT", 40)
    chance = random.Random(seed)
    texts = [random_text(chance, 400), "x" * 1000, random_text(chance, 3), "日本" * 300]
    made = bpe(tmp_path, texts=texts, vocabulary=400)
    for text in texts:
        cuts = sorted(chance.sample(range(len(text)), 2))
        parts = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
        pieces = list(resplit([*((part, False) for part in parts), ("", True)], made))
        assert "".join(piece for piece, _ in pieces) == text
        assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
        ids = np.concatenate(made.encode([piece for piece, _ in pieces]))
        assert ids.tolist() == made.encode([text])[0].tolist()
        if text == texts[0]:
            assert len(pieces) > 5
            assert max(len(piece) for piece, _ in pieces) < 1000


def test_a_document_is_not_split_where_its_tokens_would_change(tmp_path, monkeypatch):
    monkeypatch.setattr(token_folder, "_PIECE", 100)
    made = bpe(tmp_path)
    monkeypatch.setattr(FileTokenizer, "splits", lambda self, before, after: False)
    text = "some words \n" * 100
    assert list(resplit([(text, False), ("", True)], made)) == [(text, True)]


def test_long_lines_are_split_in_linear_time(tmp_path):
    pieces = list(resplit([("word " * (2 << 20), True)], ByteTokenizer()))  # 10 MiB
    assert len(pieces) > 100
    assert max(len(piece) for piece, _ in pieces) <= 2 << 16


@pytest.mark.parametrize("kind", ["records", "files"])
def test_an_end_of_text_follows_each_record_and_file_but_bytes_of_files_are_joined(tmp_path, kind):
    made, folder = bpe(tmp_path), tmp_path / "corpus"
    folder.mkdir()
    documents, expected = ["first", "second <|endoftext|>\n"], b"first\0second <|endoftext|>\n\0"
    if kind == "records":
        write_records(folder / "a.jsonl", ["first", "", documents[1]])
    else:
        documents, expected = ["first", " \r\n"], b"\xef\xbb\xbffirst \r\n"
        for name, content in {"a": b"\xef\xbb\xbffirst", "b": b"", "c": b" \r\n"}.items():
            (folder / name).write_bytes(content)
    encoded = [[*ids.tolist(), made.end_of_text] for ids in made.encode(documents)]
    assert tokens_of(folder, made) == ([*encoded[0], *encoded[1]], 2)
    found, count = tokens_of(folder, ByteTokenizer())
    assert found == list(expected)
    assert kind == "files" or count == 2


@pytest.mark.parametrize("size", [1, 50, 1 << 22])
def test_batches_of_any_size_have_the_same_tokens(tmp_path, monkeypatch, size):
    texts = [f"document {i}\n" for i in range(30)]
    path = write_records(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(token_folder, "_BATCH", size)
    expected = "".join(text + "\0" for text in texts)
    assert tokens_of(path, ByteTokenizer()) == (list(expected.encode()), 30)
    batches = list(text_batches(find_files(path, ""), "text"))
    assert [text for batch in batches for text in batch] == texts
    assert (len(batches) > 1) == (size < 1 << 22)
