"""Which checkpoints are removed, and what else in their folder is left alone."""

from mntrain.checkpoint.reader import checkpoint_name, list_checkpoints
from mntrain.checkpoint.writer import remove_old


def make(run_dir, *names):
    for name in names:
        (run_dir / "checkpoints" / name).mkdir(parents=True)


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_files_of_others_neither_stop_the_removal_nor_are_removed(tmp_path):
    make(tmp_path, *map(checkpoint_name, range(1, 6)), ".snapshot")
    for name in (".DS_Store", ".nfs0001", ".step-notes", "notes.txt"):
        (tmp_path / "checkpoints" / name).touch()
    remove_old(tmp_path, keep=2, metric="eval_loss")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005", "step-00000004"]
    assert names(tmp_path)[:5] == [".DS_Store", ".nfs0001", ".snapshot", ".step-notes", "notes.txt"]


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


def test_leftovers_of_interrupted_saves_are_removed(tmp_path):
    make(tmp_path, checkpoint_name(1), ".step-00000002.a1b2", ".step-00000002.a1b2.new")
    (tmp_path / "checkpoints" / ".step-00000002.a1b2" / "part").touch()
    remove_old(tmp_path, keep=1, metric="eval_loss")
    assert names(tmp_path) == ["step-00000001"]


def test_a_run_without_checkpoints_has_nothing_to_remove(tmp_path):
    remove_old(tmp_path, keep=1, metric="eval_loss")
    assert list(tmp_path.iterdir()) == []
