import errno
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from corpora import bpe, stories, write_records

from mntrain.corpus import token_cache
from mntrain.corpus.text_files import find_files
from mntrain.corpus.token_cache import cache_folder, cached_tokens
from mntrain.corpus.tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(token_cache.tempfile, "gettempdir", lambda: str(tmp_path / "locks"))
    return tmp_path / "cache" / "mntrain" / "tokens"


@pytest.fixture
def records(tmp_path):
    return write_records(tmp_path / "a.jsonl", stories(20))


def cached(path, tokenizer=None, field="text"):
    return cached_tokens(find_files(path, "**/*"), field, tokenizer or ByteTokenizer())


def test_tokens_are_made_once_and_again_when_anything_changes(tmp_path, records, cache, capsys):
    first = cached(records)
    assert first.path.parent == cache == cache_folder()
    assert "tokenizing 0.0 MB of" in capsys.readouterr().err
    assert cached(records).path == first.path
    assert capsys.readouterr().err == ""
    others = {first.path, cached(records, bpe(tmp_path)).path}
    stat = records.stat()
    os.utime(records, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    others.add(cached(records).path)
    write_records(records, stories(20), field="story")
    others.add(cached(records, field="story").path)
    assert len(others) == 4
    assert not list((tmp_path / "locks").iterdir())


def test_a_file_that_is_replaced_with_its_old_times_is_read_again(records):
    first, stat = cached(records), records.stat()
    content = records.read_text().replace("all", "ALL")
    records.write_text(content)
    os.utime(records, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = cached(records)
    assert again.path != first.path
    assert b"ALL" in again.tokens_path.read_bytes().replace(b"\0", b"")


def test_damaged_tokens_are_made_again(records):
    first = cached(records)
    expected = first.tokens_path.read_bytes()
    first.tokens_path.write_bytes(expected[:-2])
    assert cached(records).tokens_path.read_bytes() == expected


def at_once(barrier, records, cache, locks, results):
    os.environ["XDG_CACHE_HOME"] = cache
    token_cache.tempfile.tempdir = locks
    made = []
    write = token_cache.write_token_folder

    def counted(*words, **options):
        made.append(1)
        return write(*words, **options)

    token_cache.write_token_folder = counted
    sources = find_files(records, "")
    barrier.wait()
    try:
        results.put(
            (len(made), str(cached_tokens(sources, "text", ByteTokenizer()).path), sum(made))
        )
    except ValueError as error:
        results.put((0, str(error), sum(made)))


def of_three_processes(target, tmp_path, records):
    """Run a function in three processes at once, and return what each has put in the queue."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(3), spawn.Queue()
    words = (barrier, records, str(tmp_path / "cache"), str(tmp_path / "locks"), results)
    children = [spawn.Process(target=target, args=words) for _ in range(3)]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    return found


@pytest.mark.parametrize("sound", [True, False])
def test_of_the_processes_of_a_node_one_tokenizes(tmp_path, records, sound):
    if not sound:
        with records.open("a") as file:
            file.write('{"other": 1}\n')
    found = of_three_processes(at_once, tmp_path, records)
    (path,) = {text for _, text, _ in found}
    if sound:
        assert sum(made for *_, made in found) == 1
        assert Path(path, "tokens.bin").is_file()
    else:  # a process that comes when the others have failed tries again
        assert "a.jsonl, line 21 has no field 'text'" in path
    assert not list((tmp_path / "locks").iterdir())


def at_once_without_file_locks(*words):
    def refused(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    token_cache.fcntl.flock = refused
    at_once(*words)


def test_without_file_locks_the_first_process_to_finish_counts(tmp_path, records):
    found = of_three_processes(at_once_without_file_locks, tmp_path, records)
    (path,) = {text for _, text, _ in found}
    assert sum(made for *_, made in found) >= 1, path
    folder = token_cache.open_token_folder(Path(path))
    assert folder.manifest.documents == 20
    assert not list((tmp_path / "locks").iterdir())
    assert len(list((tmp_path / "cache" / "mntrain" / "tokens").iterdir())) == 1


def test_a_process_that_waited_gets_the_error_of_the_first(tmp_path, records, monkeypatch):
    key = token_cache._key(find_files(records, ""), "text", ByteTokenizer())
    path = tmp_path / "locks" / f"mntrain-tokens-{os.getuid()}-{key}.lock"
    path.write_text("the first one's error")
    monkeypatch.setattr(token_cache, "write_token_folder", lambda *words, **options: 1 / 0)
    with pytest.raises(ValueError, match="the first one's error"):
        cached(records)


@pytest.mark.parametrize("kind", ["of another user", "pipe", "link"])
def test_a_file_that_another_user_has_put_in_place_of_the_lock_is_left_alone(
    tmp_path, records, kind
):
    key = token_cache._key(find_files(records, ""), "text", ByteTokenizer())
    path, file = tmp_path / "locks" / f"mntrain-tokens-{os.getuid()}-{key}.lock", tmp_path / "file"
    file.write_text("words")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(file)
    elif os.getuid():
        pytest.skip("gives a file to another user")
    else:
        path.write_text("words")
        os.chown(path, 65534, 65534)
    assert cached(records).manifest.documents == 20
    assert file.read_text() == "words"


def test_of_nodes_that_share_a_cache_the_first_to_finish_counts(records, monkeypatch):
    write = token_cache.write_token_folder

    def other_node_first(*words, **options):
        write(*words, **options)
        return write(*words, **options)

    monkeypatch.setattr(token_cache, "write_token_folder", other_node_first)
    assert cached(records).manifest.documents == 20


def test_a_cache_that_cannot_be_written_is_refused_with_the_fix(tmp_path, records, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = r"cannot be cached: .*; set XDG_CACHE_HOME to .*, or run `python -m mntrain tokenize`"
    with pytest.raises(ValueError, match=message):
        cached(records)
    shutil.rmtree(tmp_path / "locks")
    with pytest.raises(ValueError, match=message):
        cached(records)
