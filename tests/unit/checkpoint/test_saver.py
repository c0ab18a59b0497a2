"""The folder of a new checkpoint, and which old ones are removed."""

import os

import pytest

from mntrain.checkpoint import saver
from mntrain.checkpoint.directory_saver import remove_old
from mntrain.checkpoint.format import checkpoint_name
from mntrain.checkpoint.reader import list_checkpoints


def make(run_dir, *names):
    for name in names:
        (run_dir / "checkpoints" / name).mkdir(parents=True)


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_old_checkpoints_and_leftovers_are_removed_and_files_of_others_are_not(tmp_path):
    remove_old(tmp_path, keep=1, metric="eval_loss")
    assert list(tmp_path.iterdir()) == []
    make(tmp_path, *map(checkpoint_name, range(1, 6)), ".snapshot")
    make(tmp_path, ".step-00000002.a1b2", ".step-00000002.a1b2.new")
    (tmp_path / "checkpoints" / ".step-00000002.a1b2" / "part").touch()
    for name in (".DS_Store", ".nfs0001", ".step-notes", "notes.txt"):
        (tmp_path / "checkpoints" / name).touch()
    remove_old(tmp_path, keep=2, metric="eval_loss")
    others = [".DS_Store", ".nfs0001", ".snapshot", ".step-notes", "notes.txt"]
    assert names(tmp_path) == [*others, "step-00000004", "step-00000005"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005", "step-00000004"]


def test_what_cannot_be_removed_stops_nothing(tmp_path, monkeypatch):
    make(tmp_path, *map(checkpoint_name, range(1, 5)))
    make(tmp_path, ".step-00000002.old/stuck")  # in the way of step 2
    original = type(tmp_path).rename

    def rename(path, target):
        if path.name == checkpoint_name(2):
            raise OSError("busy")
        return original(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    remove_old(tmp_path, keep=1, metric="eval_loss")
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_a_new_folder_is_seen_where_the_file_system_remembers_what_was_missing(
    tmp_path, monkeypatch
):
    folder = tmp_path / "checkpoints" / ".step-00000001.a1b2"
    missing = {folder.parent, folder}  # as NFS keeps it, until the folder above is opened
    late = [folder] * 3  # and the folder itself for some time behind that
    make, read = os.open, os.listdir

    def listed(above):
        names = [] if above in missing else read(above)
        missing.difference_update(above / name for name in names)
        return names

    def opened(path, *arguments):
        if path.parent in missing or (late and late.pop()):
            raise FileNotFoundError
        return make(path, *arguments)

    folder.mkdir(parents=True)
    monkeypatch.setattr(saver.os, "open", opened)
    monkeypatch.setattr(saver.os, "listdir", listed)
    monkeypatch.setattr(saver, "_SEEN_S", 1.0)
    os.close(saver._open(folder / "file", made_here=False))
    assert list(folder.iterdir()) == [folder / "file"]


def test_a_folder_that_is_moved_is_not_waited_for_by_the_rank_that_made_it(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "_SEEN_S", 1000.0)  # longer than a test may take
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path} was removed or moved$"):
        saver._open(tmp_path / ".step-00000001.a1b2" / "file", made_here=True)
