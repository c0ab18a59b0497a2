import json
import sys

import numpy as np
import pytest
import tokenizers
from corpora import write_bpe
from tokenizers.processors import TemplateProcessing

from mntrain.corpus.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer

TEXTS = ["", " ", "1 and 2 make 3\r\n\tcafé 日本 😀\0", "<|endoftext|> in a text"]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_text_is_what_its_tokens_decode_to(tmp_path, kind):
    made = load_tokenizer("bytes" if kind == "bytes" else f"bpe:{write_bpe(tmp_path)}")
    for text, ids in zip(TEXTS, made.encode(TEXTS), strict=True):
        assert ids.dtype == np.int64
        assert made.decode(ids.tolist()) == text
        assert not len(ids) or (ids.min() >= 0 and ids.max() < made.size)
    if kind == "bpe":  # in a document, the end of text is ordinary text
        assert made.end_of_text not in ids
        assert made.decode([*ids, made.end_of_text]) == f"{TEXTS[-1]}<|endoftext|>"


def test_bytes_are_those_of_utf8():
    made = ByteTokenizer()
    assert [ids.tolist() for ids in made.encode(TEXTS)] == [list(t.encode()) for t in TEXTS]
    assert made.decode([0xFF, 97]) == "\N{REPLACEMENT CHARACTER}a"


def test_what_a_tokenizer_file_adds_or_cuts_off_is_turned_off(tmp_path):
    path = write_bpe(tmp_path)
    plain = FileTokenizer(path).encode(TEXTS)
    made = tokenizers.Tokenizer.from_file(str(path))
    end = "<|endoftext|>"
    made.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    made.enable_truncation(3)
    made.enable_padding(length=64, pad_token=end)
    made.model.dropout = 0.9
    made.save(str(path))
    for ids, expected in zip(FileTokenizer(path).encode(TEXTS), plain, strict=True):
        assert ids.tolist() == expected.tolist()


def test_a_folder_of_hugging_face_names_its_end_of_text(tmp_path):
    write_bpe(tmp_path).rename(tmp_path / "tokenizer.json")
    settings = tmp_path / "tokenizer_config.json"
    assert load_tokenizer(f"hf:{tmp_path}").end_of_text == 0
    for named in ("!", {"content": "!", "lstrip": False}):
        settings.write_text(json.dumps({"eos_token": named}))
        for given in (f"hf:{tmp_path}", f"hf:{tmp_path}/tokenizer.json"):
            made = load_tokenizer(given)
            assert made.decode([made.end_of_text]) == "!"
            assert made.identity != load_tokenizer(f"bpe:{write_bpe(tmp_path)}").identity
    for content, message in (
        ('{"eos_token": "absent"}', r"tokenizer.json has no end-of-text token 'absent'"),
        ("[", r"tokenizer_config.json is not the settings"),
    ):
        settings.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(f"hf:{tmp_path}")


def word_level(vocabulary, *added):
    """A tokenizer.json of words; of the added tokens, the first two are special."""
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [
        {"content": name, "id": vocabulary[name], "special": i < 2, **flags}
        for i, name in enumerate(added)
    ]
    return json.dumps({"version": "1.0", "model": model, "added_tokens": tokens}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a tokenizer.json of the tokenizers library"),
        (b"{}", "is not a tokenizer.json"),
        (b"\x89PNG", "is not a tokenizer.json"),
        (word_level({}), "has no end-of-text token, which separates documents"),
        (word_level({"a": 0}), "has no end-of-text token, which separates documents"),
        (b'{"model": {"vocab": {"a": "b"}}}', "is not a tokenizer.json"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"a.json {message}"):
        load_tokenizer(f"bpe:{tmp_path}/a.json")


def test_an_unknown_kind_of_tokenizer_and_an_absent_file_are_refused(tmp_path):
    for given in ("gpt2", "bpe:", "hf", "bytes:x", "tok.json", ":x"):
        kinds = rf"tokenizer {given}: must be bytes, bpe:FILE .* or hf:PATH"
        with pytest.raises(ValueError, match=kinds):
            load_tokenizer(given)
    for given in (f"bpe:{tmp_path}", f"bpe:{tmp_path}/x", f"hf:{tmp_path}"):
        with pytest.raises(ValueError, match=r"there is no file .*; give one that exists"):
            load_tokenizer(given)


def test_without_the_library_the_package_to_install_is_named(tmp_path, monkeypatch):
    path = write_bpe(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install tokenizers"):
        load_tokenizer(f"bpe:{path}")


def test_the_end_of_text_has_a_usual_name_or_that_of_the_settings(tmp_path):
    path = tmp_path / "tokenizer.json"
    names = ["[CLS]", "[SEP]", "a", "</s>"]
    path.write_bytes(word_level({name: i for i, name in enumerate(names[:3])}))
    assert FileTokenizer(path).end_of_text == 1  # BERT has no other
    path.write_bytes(word_level({name: i for i, name in enumerate(names)}))
    assert FileTokenizer(path).end_of_text == 3
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}}')
    assert FileTokenizer(path).end_of_text == 2


def test_exported_settings_name_a_class_and_the_end_of_text_unless_the_folder_does(tmp_path):
    def exported(path):
        files = FileTokenizer(path).exported_files()
        return files.keys(), json.loads(files["tokenizer_config.json"])

    plain = write_bpe(tmp_path)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    settings, both = tmp_path / "tokenizer_config.json", {"tokenizer.json", "tokenizer_config.json"}
    (tmp_path / "vocab.json").write_text("{}")
    settings.write_text('{"model_max_length": 7, "eos_token": "a"}')
    assert exported(plain) == (both, named)  # the other files are not those of tok.json
    path = plain.rename(tmp_path / "tokenizer.json")
    here = {*both, "vocab.json"}
    assert exported(path) == (here, {**named, "eos_token": "a", "model_max_length": 7})
    settings.write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": null}')
    assert exported(path) == (here, {**named, "tokenizer_class": "GPT2Tokenizer"})
    settings.unlink()
    assert exported(path) == (here, named)
