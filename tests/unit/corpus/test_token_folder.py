import errno
import json
import multiprocessing
import os
import shutil

import numpy as np
import pytest
from corpora import bpe, stories, write_bpe, write_records

from mntrain.corpus import token_folder
from mntrain.corpus.text_files import find_files
from mntrain.corpus.token_folder import (
    cache_folder,
    cached_tokens,
    is_token_folder,
    open_token_folder,
    write_token_folder,
)
from mntrain.corpus.tokenizer import ByteTokenizer, FileTokenizer


def write(output, source, tokenizer=None):
    files = find_files(source, "**/*")
    return write_token_folder(output, files, "text", tokenizer or ByteTokenizer())


@pytest.fixture
def at_batch(monkeypatch):
    """Calls a function after the first batch of tokens."""
    batches = token_folder.token_batches

    def call(function):
        def calling(*words):
            for batch in batches(*words):
                yield batch
                monkeypatch.setattr(token_folder, "token_batches", batches)
                function()

        monkeypatch.setattr(token_folder, "token_batches", calling)

    return call


@pytest.fixture
def records(tmp_path):
    return write_records(tmp_path / "a.jsonl", stories(20))


@pytest.fixture
def tokens(tmp_path, records):
    write(tmp_path / "tokens", records, bpe(tmp_path))
    return tmp_path / "tokens"


def test_a_folder_says_what_its_tokens_are(tmp_path, records, tokens):
    made = bpe(tmp_path)
    expected = [i for text in stories(20) for i in (*made.encode([text])[0], made.end_of_text)]
    assert np.fromfile(tokens / "tokens.bin", dtype="<u2").tolist() == expected
    assert json.loads((tokens / "manifest.json").read_text()) == {
        "format": "mntrain tokens 1",
        "dtype": "uint16",
        "vocabulary": 300,
        "tokens": len(expected),
        "documents": 20,
        "end_of_text": made.end_of_text,
        "tokenizer": "tokenizer.json",
        "tokenizer_sha256": made.sha256,
        "text_field": "text",
        "sources": {"a.jsonl": records.stat().st_size},
    }
    assert open_token_folder(tokens)[1].identity == made.identity
    assert FileTokenizer(tokens / "tokenizer.json").identity == made.identity  # as hf:PATH
    assert not list(tmp_path.glob(".tokens*"))


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_fit_their_dtype_at_the_limit_of_16_bits(tmp_path, size, dtype):
    content = json.loads(write_bpe(tmp_path).read_text())
    vocabulary = content["model"]["vocab"]
    names = [f"word{i}" for i in range(size - len(vocabulary))]
    vocabulary |= {name: len(vocabulary) + i for i, name in enumerate(names)}
    content["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "!"}
    content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (tmp_path / "tok.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text(f"{names[-1]} {names[0]}\n")
    made = FileTokenizer(tmp_path / "tok.json")
    assert made.size == size
    manifest = write(tmp_path / "tokens", tmp_path / "a.txt", made)
    ids = np.fromfile(
        tmp_path / "tokens" / "tokens.bin", dtype="<u2" if dtype == "uint16" else "<u4"
    )
    assert manifest.dtype == dtype
    assert ids.tolist() == [size - 1, 300, 0]
    assert np.dtype(open_token_folder(tmp_path / "tokens")[0].dtype).itemsize == ids.itemsize


def edit(**changes):
    def apply(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def rewrite(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def remove(name):
    return lambda folder: (folder / name).unlink()


NO_MANIFEST = "is no manifest of tokens"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            rewrite("tokens.bin", lambda content: content[:-2]),
            r"the bytes of tokens.bin should be \d+, and is \d+: .*`.*tokenize` again",
        ),
        (remove("tokens.bin"), "tokens.bin should be .* and is 0"),
        (rewrite("manifest.json", lambda content: b"{"), NO_MANIFEST),
        (rewrite("manifest.json", lambda content: b"[]"), NO_MANIFEST),
        (edit(tokens=5), "tokens.bin should be 10"),
        (edit(tokens="5"), f"{NO_MANIFEST}: tokens: Input should be a valid integer"),
        (edit(extra=5), f"{NO_MANIFEST}: extra: Unexpected"),
        (edit(format="mntrain tokens 2"), f"{NO_MANIFEST}: format: .*'mntrain tokens 1'"),
        (edit(dtype="uint32", tokens=1), "tokens.bin should be 4"),
        (edit(tokenizer="bytes"), "tokenizer_sha256 should be .*, and is None"),
        (edit(tokenizer="../other.json"), f"{NO_MANIFEST}: tokenizer: "),
        (rewrite("tokenizer.json", lambda content: content + b"\n"), "tokenizer_sha256 should be "),
        (remove("tokenizer.json"), "No such file or directory: .*tokenizer.json"),
    ],
)
def test_a_folder_that_was_changed_is_refused(tokens, damage, message):
    damage(tokens)
    assert is_token_folder(tokens)
    with pytest.raises((ValueError, OSError), match=message):
        open_token_folder(tokens)


def test_an_output_that_exists_is_kept(tmp_path, records, tokens):
    before, empty = (tokens / "tokens.bin").read_bytes(), tmp_path / "empty"
    with pytest.raises(ValueError, match=r"tokens is not empty: remove it, or"):
        write(tokens, records)
    assert (tokens / "tokens.bin").read_bytes() == before
    empty.mkdir()
    assert not is_token_folder(empty)
    write(empty, records)
    assert open_token_folder(empty)[0].documents == 20
    for kind in ("checkpoint", "tokens"):
        (tmp_path / "manifest.json").write_text(f'{{"format": "mntrain {kind} 1"}}')
        assert is_token_folder(tmp_path) == (kind == "tokens")


def test_changed_files_and_ids_that_the_tokenizer_does_not_list_are_refused(
    tmp_path, records, at_batch
):
    at_batch(lambda: records.write_text(records.read_text() + "\n"))
    with pytest.raises(ValueError, match="changed while they were read: try again"):
        write(tmp_path / "tokens", records)
    made = bpe(tmp_path)
    made.size = 100
    with pytest.raises(ValueError, match=r"the tokenizer made id \d+, which it does not list"):
        write(tmp_path / "tokens", records, made)
    assert not is_token_folder(tmp_path / "tokens")


def test_the_second_of_two_that_write_one_folder_is_refused(tmp_path, records, at_batch):
    def meanwhile():
        if not (tmp_path / "tokens").exists():
            write(tmp_path / "tokens", records)

    at_batch(meanwhile)
    with pytest.raises(OSError, match="not empty"):
        write(tmp_path / "tokens", records, bpe(tmp_path))
    assert open_token_folder(tmp_path / "tokens")[0].tokenizer == "bytes"
    assert not list(tmp_path.glob(".tokens*"))


def test_memory_does_not_grow_with_the_data(tmp_path, monkeypatch):
    sizes, encode = [], ByteTokenizer.encode

    def measured(self, texts):
        sizes.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode", measured)
    monkeypatch.setattr(token_folder, "_BATCH", 100_000)
    monkeypatch.setattr(token_folder, "_PIECE", 10_000)
    (tmp_path / "a.txt").write_text("word " * 600_000)
    write_records(tmp_path / "b.jsonl", ["word " * 600_000, "short"])
    manifest = write(tmp_path / "tokens", tmp_path)
    assert (manifest.tokens, manifest.documents) == (6_000_000 + 1 + 5 + 1, 2)
    assert max(sizes) < 150_000


# ---- the cache ----


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "mntrain" / "tokens"


def cached(path, tokenizer=None, field="text"):
    return cached_tokens(find_files(path, "**/*"), field, tokenizer or ByteTokenizer())


def test_tokens_are_made_once_and_again_when_anything_changes(tmp_path, records, cache, capsys):
    first = cached(records)
    assert first.parent == cache == cache_folder()
    assert "tokenizing 0.0 MB of" in capsys.readouterr().err
    assert cached(records) == first
    assert capsys.readouterr().err == ""
    others = {first, cached(records, bpe(tmp_path))}
    (cache / f".{first.name}.12ab34cd.partial").mkdir()  # of a process that was killed
    shutil.rmtree(first)
    cached(records)
    stat = records.stat()
    os.utime(records, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    others.add(cached(records))
    write_records(records, stories(20), field="story")
    others.add(cached(records, field="story"))
    assert set(cache.iterdir()) == others
    assert len(others) == 4


def test_a_file_that_is_replaced_with_its_old_times_and_damaged_tokens_are_read_again(records):
    first, stat = cached(records), records.stat()
    tokens = first / "tokens.bin"
    expected = tokens.read_bytes()
    tokens.write_bytes(expected[:-2])
    assert cached(records) == first
    assert tokens.read_bytes() == expected
    records.write_text(records.read_text().replace("all", "ALL"))
    os.utime(records, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = cached(records)
    assert again != first
    assert b"ALL" in (again / "tokens.bin").read_bytes().replace(b"\0", b"")


def at_once(barrier, records, cache, results):
    os.environ["XDG_CACHE_HOME"] = cache
    made = []
    write = token_folder.write_token_folder

    def counted(*words):
        made.append(1)
        return write(*words)

    token_folder.write_token_folder = counted
    barrier.wait()
    results.put((cached(records), len(made)))


def test_of_the_processes_of_a_node_one_tokenizes(tmp_path, records, cache):
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(3), spawn.Queue()
    words = (barrier, records, str(tmp_path / "cache"), results)
    children = [spawn.Process(target=at_once, args=words) for _ in range(3)]
    for child in children:
        child.start()
    found = [results.get(timeout=250) for _ in children]
    for child in children:
        child.join()
    (path,) = {path for path, _ in found}
    assert sum(made for _, made in found) == 1
    assert list(cache.iterdir()) == [path]


def test_a_process_that_waited_gets_the_error_of_the_first(records, cache, monkeypatch):
    first = cached(records)
    shutil.rmtree(first)
    first.with_suffix(".lock").write_text("the first one's error")
    monkeypatch.setattr(token_folder, "write_token_folder", lambda *words: 1 / 0)
    with pytest.raises(ValueError, match="the first one's error"):
        cached(records)
    assert not list(cache.iterdir())


def test_of_nodes_without_common_locks_the_first_to_finish_counts(records, monkeypatch):
    write = token_folder.write_token_folder

    def refused(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    def other_node_first(*words):
        write(*words)
        return write(*words)

    monkeypatch.setattr(token_folder.fcntl, "flock", refused)
    monkeypatch.setattr(token_folder, "write_token_folder", other_node_first)
    assert open_token_folder(cached(records))[0].documents == 20


def test_a_cache_that_cannot_be_written_is_refused_with_the_fix(tmp_path, records, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = r"cannot be cached: .*; set XDG_CACHE_HOME to .*, or run `python -m mntrain tokenize`"
    with pytest.raises(ValueError, match=message):
        cached(records)
