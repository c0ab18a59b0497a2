"""Folders of checkpoints in the memory of nodes: what of them is of a run, and whose they are."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.checks import local_folder
from mntrain.checks.local_folder import (
    ATTEMPTS_FILE,
    examine,
    new_attempts,
    prepare,
    read_attempts,
    run_folder,
)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6), st.data())
def test_a_state_is_of_the_run_if_no_start_went_back_before_it(history, data):
    """Each start goes back to a step that the run has, and trains some more."""
    attempts, present, made = new_attempts(), {0: ""}, set()
    for back, steps in history:
        start = data.draw(st.sampled_from(sorted(present)), label="start") if back else 0
        attempts = attempts.begun(start)
        present = {step: name for step, name in present.items() if step <= start}
        for step in range(start + 1, start + steps + 1):
            present[step] = attempts.last
            made.add((attempts.last, step))
    for name, step in made:
        assert attempts.valid(name, step) == (present.get(step) == name)
    assert not attempts.valid("another", 1)


def test_a_damaged_file_of_attempts_is_none(tmp_path):
    assert read_attempts(tmp_path) is None
    attempts = new_attempts().begun(0).begun(7)
    (tmp_path / ATTEMPTS_FILE).write_text(attempts.text())
    assert read_attempts(tmp_path) == attempts
    (tmp_path / ATTEMPTS_FILE).write_text(attempts.text()[:-9])
    assert read_attempts(tmp_path) is None


def test_a_run_is_known_by_its_directory_and_its_number(tmp_path):
    one = new_attempts()
    names = [(tmp_path, one), (tmp_path / "b", one), (tmp_path, new_attempts())]
    assert len({run_folder(*given) for given in names}) == 3
    (tmp_path / "link").symlink_to(tmp_path)
    assert run_folder(tmp_path / "link", one) == run_folder(tmp_path, one.begun(3))


def test_a_folder_is_made_for_one_user_or_refused(tmp_path, monkeypatch):
    prepare(tmp_path / "new")
    prepare(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(ValueError, match="is no folder"):
        prepare(tmp_path / "link")
    with pytest.raises(ValueError, match="cannot be made"):
        prepare(tmp_path / "no" / "new")
    (tmp_path / "new").chmod(0o750)
    with pytest.raises(ValueError, match=r"open to other users \(mode 750\)"):
        prepare(tmp_path / "new")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ValueError, match="belongs to the user "):
        prepare(tmp_path / "new")


def test_what_a_run_has_left_is_removed_without_torch(tmp_path, capsys):
    run, folder = tmp_path / "run", tmp_path / "local"
    attempts = new_attempts()
    for path in (run, folder / run_folder(run, attempts) / "node-0", folder / "another"):
        path.mkdir(parents=True)
    (run / ATTEMPTS_FILE).write_text(attempts.text())
    code = (
        "import sys, runpy\n"
        "try: runpy.run_module('mntrain.checks.local_folder', run_name='__main__')\n"
        "finally: assert not {'torch', 'mpi4py'} & set(sys.modules)"
    )
    words = [sys.executable, "-c", code, str(folder), str(run)]
    subprocess.run(words, check=True)
    assert [path.name for path in folder.iterdir()] == ["another"]
    local_folder.clear(folder, run)  # nothing is left to do
    assert local_folder.main([str(folder)]) == 2
    assert local_folder.main([str(folder), str(folder)]) == 1
    assert f"{folder} has no .attempts.json, or a damaged one: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "status", "text"),
    [
        (("", 10**15, True), "warn", " on one, and for 1e+06 GB on another host"),
        (("", 0, True), "warn", "room for 0 GB on two, and for "),
        (("is no folder", 0, True), "fail", "two: is no folder"),
    ],
)
def test_the_doctor_finds_a_host_without_a_folder_or_room(tmp_path, there, status, text):
    """The gather is of two hosts, of which the other one has `there`."""
    found = examine(lambda own: [own, there], 0, tmp_path / "new", ["one", "two"])
    assert (found.status, text in found.text) == (status, True), found
    assert not (tmp_path / "new").exists()
    assert examine(lambda own: [own], 0, tmp_path / "new", ["one"]).status == "pass"
