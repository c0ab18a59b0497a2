"""The sizes of a task's files, and the samples that are compared."""

from mntrain.run.comparison import describe_files


def write(folder, contents):
    paths = {name: folder / name for name in contents}
    for name, content in contents.items():
        paths[name].write_bytes(content)
    return paths


def test_no_files_are_no_entries():
    assert describe_files({}) == {}


def test_files_differ_by_name_and_by_size(tmp_path):
    usual, same, longer, named = (
        describe_files(write(tmp_path, contents))
        for contents in (
            {"a": b"one", "b": b"two"},
            {"a": b"one", "b": b"twO"},
            {"a": b"one", "b": b"two "},
            {"a": b"one", "c": b"two"},
        )
    )
    assert usual == same
    assert {name for name in usual if usual[name] != longer[name]} == {"the size of b"}
    assert longer["the size of b"].value == "4 bytes"
    assert usual["the list of the data's files"] != named["the list of the data's files"]


def test_of_many_files_all_names_and_some_sizes_are_compared(tmp_path):
    paths = write(tmp_path, {f"{number:04}": b"x" * (number % 7) for number in range(250)})
    told = describe_files(paths)
    assert 50 < len(told) <= 101
    del paths["0124"]
    assert (
        describe_files(paths)["the list of the data's files"]
        != told["the list of the data's files"]
    )
