import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import stories, write_bpe, write_records

from mntrain.__main__ import main
from mntrain.corpus.token_folder import open_token_folder


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(3):
        write_records(folder / f"{i}.jsonl", stories(20 + i), field="story")
    (folder / "a.png").write_bytes(b"\0")
    return folder


def test_a_vocabulary_is_trained_and_applied_to_more_text(tmp_path, corpus, capsys):
    words = ["tokenize", str(corpus), str(tmp_path / "t"), "--text-field", "story"]
    assert main([*words, "--bpe-vocab", "300"]) == 0
    out, err = capsys.readouterr()
    manifest, tokenizer = open_token_folder(tmp_path / "t")
    assert f"{manifest.tokens:,} tokens (uint16, vocabulary 300) of 63 documents in 3" in out
    assert "skipped 1 binary file: a.png" in err
    given = f"bpe:{tmp_path / 't' / 'tokenizer.json'}"
    words[2] = str(tmp_path / "t2")
    assert main([*words, "--tokenizer", given]) == 0
    tokens = tmp_path / "t2" / "tokens.bin"
    assert tokens.read_bytes() == (tmp_path / "t" / "tokens.bin").read_bytes()
    ids = np.fromfile(tokens, dtype="<u2")
    text = "".join(t + "<|endoftext|>" for i in range(3) for t in stories(20 + i))
    assert tokenizer.decode(ids.tolist()) == text


def test_a_vocabulary_larger_than_the_text_gives_is_said(tmp_path, corpus, capsys):
    words = ["tokenize", str(corpus), str(tmp_path / "t"), "--text-field", "story"]
    assert main([*words, "--bpe-vocab", "9000"]) == 0
    size = open_token_folder(tmp_path / "t")[0].vocabulary
    assert size < 9000
    assert f"too small for 9,000 tokens: the vocabulary has {size:,}" in capsys.readouterr().err


def test_any_number_of_threads_makes_the_same_tokens_without_torch_and_mpi(tmp_path, corpus):
    path, made = write_bpe(tmp_path), []
    for workers in ("1", "9"):
        words = ["tokenize", str(corpus), str(tmp_path / workers), "--text-field", "story"]
        words += ["--tokenizer", f"bpe:{path}"]
        program = (
            "import sys\nfrom mntrain.__main__ import main\n"
            f"assert main({words!r}) == 0\n"
            "assert not {'torch', 'mpi4py'} & set(sys.modules)\n"
        )
        environment = {**os.environ, "RAYON_NUM_THREADS": workers}
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)
        made.append((tmp_path / workers / "tokens.bin").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("IN OUT --bpe-vocab 256", "--bpe-vocab 256: must be at least 257: all bytes, and"),
        ("IN OUT --bpe-vocab 300", "line 1 has no field 'text': its fields are id, story;"),
        ("IN/x OUT --bpe-vocab 300", "IN/x: must be a file or a folder"),
        ("IN OUT/x --tokenizer bytes", "OUT/x: OUT is not a folder: make it"),
        ("IN IN --tokenizer bytes", "IN is not empty: remove it"),
        ("IN OUT --tokenizer gpt2", "tokenizer gpt2: must be bytes, bpe:FILE"),
        ("IN OUT --tokenizer bytes --glob *.md", "glob '*.md' matches no file"),
        ("IN/a.png OUT --tokenizer bytes", "IN/a.png has no text: a.png has"),
        ("ids.npy OUT --tokenizer bytes", "ids.npy holds token ids already"),
    ],
)
def test_bad_input_is_one_sentence(corpus, monkeypatch, capsys, words, message):
    monkeypatch.chdir(corpus.parent)
    corpus.rename("IN")
    np.save("ids.npy", np.arange(5))
    assert main(["tokenize", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("mntrain: ")
    assert sorted(path.name for path in Path().iterdir()) == ["IN", "ids.npy"]


@pytest.mark.parametrize(
    "words", [[], ["IN", "OUT"], ["IN", "OUT", "--bpe-vocab", "300", "--tokenizer", "bytes"]]
)
def test_a_malformed_command_line_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tokenize", *words])
    assert ended.value.code == 2
    assert "tokenize: error: " in capsys.readouterr().err
