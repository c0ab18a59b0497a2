import gzip
import sys

import pytest
from corpora import write_records

from mntrain.corpus import text_files
from mntrain.corpus.text_files import find_files, read_pieces, why_binary


def texts_of(path, field="text", *, as_bytes=False):
    """The documents of a file, each joined from its pieces."""
    documents, text = [], ""
    for piece, ends in read_pieces(path, field, as_bytes=as_bytes):
        text += piece
        if ends:
            documents.append(text)
            text = ""
    assert not text
    return documents


# ---- which files ----


def test_pythons_own_sources_are_the_default_and_none_is_skipped():
    found = find_files(None, "ignored")
    assert list(found.files) == sorted(found.files) == list(find_files(None, "ignored").files)
    names = {file.name for file in found.files}
    assert {"os.py", "dataclasses.py"} <= names
    assert "test_os.py" not in names
    assert not any("site-packages" in file.parts for file in found.files)
    assert sum(file.stat().st_size for file in found.files) > 1_000_000
    assert not found.skipped


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a", b"text\0more", "has a NUL byte at offset 4"),
        ("a.txt", b"caf\xe9 au lait", "is not UTF-8 at offset 3"),
        ("a.txt", "\N{SNOWMAN}".encode()[:2], "is not UTF-8 at offset 0"),
        ("a.txt", "utf-16".encode("utf-16"), "has a NUL byte at offset 3"),
        ("a.txt", b"", ""),
        ("a.txt", b"   \r\n ", ""),
        ("a.txt", b"\xef\xbb\xbfwith a mark", ""),
        ("a.jsonl", b"\0", ""),  # refused when it is read
    ],
)
def test_binary_files_are_told_from_text(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    found = why_binary(tmp_path / name)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_characters_that_a_sample_cuts_in_two_are_text(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_SAMPLE", 7)
    for shift in range(4):
        for character in ("é", "日", "😀"):
            (tmp_path / "a").write_text("x" * shift + character * 20)
            assert why_binary(tmp_path / "a") == ""


def test_binary_files_and_what_an_interrupted_tokenization_left_are_skipped(tmp_path):
    left = tmp_path / ".tokens.12ab34cd.partial"
    for folder in (tmp_path / "b", left):
        folder.mkdir()
    (left / "tokenizer.json").write_text("{}")
    for name in ("d.zip", "b/a.png", "b/c", "e"):
        (tmp_path / name).write_bytes(b"\0")
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "z.npy").write_bytes(b"\0 ids are not skipped")
    found = find_files(tmp_path, "**/*")
    assert [file.name for file in found.files] == ["a.txt", "z.npy"]
    assert found.describe_skipped() == "skipped 4 binary files: b/a.png, b/c, d.zip and 1 more"
    assert find_files(tmp_path, "a*").describe_skipped() == ""
    with pytest.raises(ValueError, match=r"matches no file .*: give another pattern"):
        find_files(left, "**/*")
    alone = r"d.zip has no text: d.zip has a NUL byte at offset 0; give"
    with pytest.raises(ValueError, match=alone):
        find_files(tmp_path / "d.zip", "**/*")
    with pytest.raises(ValueError, match=r"has no text: a.png has a NUL byte"):
        find_files(tmp_path, "b/*")


# ---- text in files ----


@pytest.mark.parametrize("block", [1, 2, 3, 1 << 20])
def test_text_is_one_document_without_its_byte_order_mark(tmp_path, monkeypatch, block):
    monkeypatch.setattr(text_files, "_BLOCK", block)
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n\xf0\x9f\x98\x80")
    assert texts_of(tmp_path / "a") == ["café\r\n😀"]
    assert texts_of(tmp_path / "a", as_bytes=True) == ["\ufeffcafé\r\n😀"]
    (tmp_path / "a").write_bytes(b"")
    assert texts_of(tmp_path / "a") == []


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_text_that_is_not_utf8_is_refused_with_the_place_but_bytes_are_kept(
    tmp_path, monkeypatch, block
):
    monkeypatch.setattr(text_files, "_BLOCK", block)
    content = "日本".encode() + b"\xffabc"
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="a is not UTF-8: convert it"):
        texts_of(tmp_path / "a")
    (kept,) = texts_of(tmp_path / "a", as_bytes=True)
    assert kept.encode("utf-8", "surrogateescape") == content


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.jsonl.gz"])
def test_a_field_of_each_line_is_a_document_and_empty_ones_are_left_out(tmp_path, name):
    texts = ["first\nsecond\r\n", "", " ", "日本", "x" * (10 << 20)]
    write_records(tmp_path / name, texts, field="story")
    assert texts_of(tmp_path / name, "story") == [text for text in texts if text]
    # Byte order marks, line ends and empty lines do not matter.
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\\u00e9"}')
    assert texts_of(tmp_path / "b.jsonl") == ["a", "bé"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "is not JSON: Invalid control character at"),
        (b"plain text", "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON: .*utf-8"),
        (b"[" * 100_000, "is not JSON: "),
        (b'["text"]', "is a JSON list, and must be an object"),
        (b'{"id": 1, "body": "x"}', "has no field 'text': its fields are id, body; name .* text-f"),
        (b"{}", "has no field 'text': its fields are none"),
        (b'{"text": null}', "'text' is a NoneType, and must be text"),
        (b'{"text": ["a"]}', "'text' is a list, and must be text"),
        (rb'{"text": "ab\ud800"}', r"'text' has half of a surrogate pair"),
    ],
)
def test_a_line_without_the_text_is_refused_with_its_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"a.jsonl, line 3:? {message}"):
        list(read_pieces(path, "text", as_bytes=False))


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = write_records(tmp_path / "a.jsonl.gz", ["some text " * 100] * 50)
    for content in (path.read_bytes()[:-20], b"no gzip"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.jsonl.gz cannot be read"):
            texts_of(path)
    path.write_bytes(gzip.compress(b""))
    assert texts_of(path) == []


def test_a_column_of_parquet_is_read_row_by_row(tmp_path, monkeypatch):
    path, texts = tmp_path / "a.parquet", ["first\n", "", "日本"] * 300
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    codes = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
    for kind in (pyarrow.string(), pyarrow.large_string(), codes):
        table = pyarrow.table({"id": list(range(900)), "story": pyarrow.array(texts, kind)})
        parquet.write_table(table, path, row_group_size=100)
        assert texts_of(path, "story") == [text for text in texts if text]
    with pytest.raises(ValueError, match=r"a.parquet has no field 'text': its fields are id, st"):
        texts_of(path)
    with pytest.raises(ValueError, match=r"a.parquet, row 1: 'id' is a int, and must be text"):
        texts_of(path, "id")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"a.parquet cannot be read"):
        texts_of(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install pyarrow"):
        texts_of(path)
