import pytest

from mntrain.corpus import text_files
from mntrain.corpus.text_files import find_files, why_not_text


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
        ("a.jsonl", b"{}", "holds records"),
        ("a.JSONL.gz", b"", "holds records"),
    ],
)
def test_binary_files_are_told_from_text(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    found = why_not_text(tmp_path / name)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_characters_that_a_sample_cuts_in_two_are_text(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_SAMPLE", 7)
    for shift in range(4):
        for character in ("é", "日", "😀"):
            (tmp_path / "a").write_text("x" * shift + character * 20)
            assert why_not_text(tmp_path / "a") == ""


def test_files_that_are_not_text_are_skipped_and_token_ids_are_taken_alone(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("d.zip", "b/a.png", "b/c", "e.pdf"):
        (tmp_path / name).write_bytes(b"\0")
    (tmp_path / "a.txt").write_bytes(b"text")
    found = find_files(tmp_path, "**/*")
    assert [file.name for file in found.files] == ["a.txt"]
    told = "skipped 4 files that are not text: b/a.png, b/c, d.zip and 1 more"
    assert found.describe_skipped() == told
    assert find_files(tmp_path, "a*").describe_skipped() == ""
    alone = r"d.zip has no text: d.zip has a NUL byte at offset 0; give"
    with pytest.raises(ValueError, match=alone):
        find_files(tmp_path / "d.zip", "**/*")
    with pytest.raises(ValueError, match=r"has no text: a.png has a NUL byte"):
        find_files(tmp_path, "b/*")
    (tmp_path / "z.npy").write_bytes(b"\0")
    ids = find_files(tmp_path / "z.npy", "**/*")
    assert ids.holds_ids > found.holds_ids
    assert ids.by_name("alone") == {"alone": tmp_path / "z.npy"}


@pytest.mark.parametrize(
    ("name", "what"),
    [("part.jsonl", "records"), ("a/B.PARQUET", "records"), ("t.bin", "token ids")],
)
def test_data_that_would_be_left_out_beside_text_is_refused(tmp_path, name, what):
    (tmp_path / "a").mkdir()
    (tmp_path / name).write_bytes(b'{"text": "a story"}')
    (tmp_path / "README.md").write_text("about the data")
    with pytest.raises(ValueError, match=f"has 1 of 2 files .* as {name} with {what}: give"):
        find_files(tmp_path, "**/*")
    assert [file.name for file in find_files(tmp_path, "*.md").files] == ["README.md"]
