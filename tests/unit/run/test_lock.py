"""One job in a run's directory."""

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from waiting import until

from mntrain.recorder.launch_notes import VARIABLE, LaunchNotes
from mntrain.run import lock
from mntrain.run.lock import RunLock


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Make the times short."""
    for name, seconds in {"BEAT_S": 0.1, "SILENT_S": 1.5, "SETTLE_S": 0.2, "_POLL_S": 0.02}.items():
        monkeypatch.setattr(lock, name, seconds)


def take(folder):
    return RunLock(folder, print)


def elsewhere(folder):
    """Write a holder on another host into the file, as a job that was killed leaves it."""
    own = {**lock.describe_process(), "place": "far", "holder": "on far, process 7"}
    lock.write(folder / ".lock", own)
    return own


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path):
    with closing(take(tmp_path)):
        words = f"on {socket.gethostname()}, process {os.getpid()}, since 2"
        for _ in range(2):
            with pytest.raises(ValueError, match=f"is in use by a job \\({words}.*another run dir"):
                take(tmp_path)
    assert list(tmp_path.iterdir()) == []
    take(tmp_path).close()


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path):
    """A program that may write in the directory could have any file of the user's overwritten."""
    victim, path = tmp_path / "victim", tmp_path / ".lock"
    victim.write_text("words")
    with closing(take(tmp_path)):
        path.unlink()
        path.symlink_to(victim)
        time.sleep(5 * lock.BEAT_S)
    assert victim.read_text() == "words"


def test_a_silent_holder_on_another_host_is_dead(tmp_path, capsys):
    elsewhere(tmp_path)
    take(tmp_path).close()
    assert "names a job on far, process 7: waiting up to 1.5 s" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("holder", "waits"), [(("a", 1), False), (("a", 2), True), (("b", 1), True), (("", 0), True)]
)
def test_a_later_start_of_the_same_launch_does_not_wait_for_a_holder_that_it_has_ended(
    tmp_path, capsys, monkeypatch, holder, waits
):
    run = tmp_path / "run"
    run.mkdir()
    for folder, number in (holder, ("a", 2)):
        if not folder:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, str(tmp_path / folder))
            (tmp_path / folder).mkdir(exist_ok=True)
            LaunchNotes(tmp_path / folder).begin_start(number)
        if not (run / ".lock").exists():
            elsewhere(run)
    take(run).close()
    assert ("waiting up to" in capsys.readouterr().err) == waits


def test_a_holder_on_another_host_that_counts_on_is_alive(tmp_path, monkeypatch):
    holder, looks = elsewhere(tmp_path), []

    def count_on(path, read=lock.read):
        looks.append(path)
        if len(looks) % 10 == 0:
            lock.write(path, {**holder, "count": len(looks)})
        return read(path)

    monkeypatch.setattr(lock, "read", count_on)
    with pytest.raises(ValueError, match=r"in use by a job \(on far, process 7\)"):
        take(tmp_path)
    assert lock.read(tmp_path / ".lock")["place"] == "far"


def test_a_job_that_changes_its_working_directory_keeps_a_relative_lock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    with closing(take(Path("run"))):
        monkeypatch.chdir("/")
        count = lock.read(tmp_path / "run" / ".lock")["count"]
        until(lambda: lock.read(tmp_path / "run" / ".lock")["count"] > count)
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.thorough
def test_a_file_system_that_hangs_for_longer_makes_no_holder_dead(tmp_path, monkeypatch):
    found, looks = elsewhere(tmp_path), []

    def slow(path, read=lock.read):
        looks.append(read(path))
        if len(looks) == 1:
            time.sleep(lock.SILENT_S)
        elif len(looks) == 3:
            return {**found, "count": 1}
        return looks[-1]

    monkeypatch.setattr(lock, "read", slow)
    assert lock._is_alive(tmp_path / ".lock", found)


@pytest.mark.thorough
def test_of_many_that_start_at_once_one_holds_the_lock(tmp_path):
    def attempt(_):
        try:
            return take(tmp_path)
        except ValueError:
            return None

    for left in (lambda: None, lambda: elsewhere(tmp_path)):
        left()
        with ThreadPoolExecutor(6) as jobs:
            held = [made for made in jobs.map(attempt, range(6)) if made]
        assert len(held) == 1
        held[0].close()


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        take(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_let_go(tmp_path):
    with closing(take(tmp_path)) as mine:
        if not (child := os.fork()):
            mine.close()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(ValueError, match="in use"):
            take(tmp_path)


def test_a_folder_that_is_replaced_is_told_of_and_gets_no_lock(tmp_path):
    folder, told = tmp_path / "run", []
    folder.mkdir()
    with closing(RunLock(folder, told.append)):
        folder.rename(tmp_path / "old")
        folder.mkdir()
        until(lambda: told or lock.read(folder / ".lock"))
    assert told == [
        f"{folder} was removed or moved, and there is another folder in its place: this job ends"
    ]
    assert list(folder.iterdir()) == []


def test_a_directory_that_another_job_has_taken_is_told_of(tmp_path):
    told = []
    with closing(RunLock(tmp_path, told.append)):
        elsewhere(tmp_path)
        until(lambda: told)
    assert told == [
        f"{tmp_path} was taken by another job (on far, process 7), which had found no sign of this "
        "one for 1.5 s: this job ends"
    ]
    assert lock.read(tmp_path / ".lock")["place"] == "far"


@pytest.mark.parametrize("text", [b"", b"{"])
def test_a_file_that_was_removed_or_damaged_is_written_again(tmp_path, text, monkeypatch):
    monkeypatch.setattr(lock, "EMPTY_S", 0.3)
    with closing(take(tmp_path)):
        (tmp_path / ".lock").unlink()
        if text:
            (tmp_path / ".lock").write_bytes(text)
        until(lambda: lock.read(tmp_path / ".lock"))
        with pytest.raises(ValueError, match="in use"):
            take(tmp_path)
    (tmp_path / ".lock").write_bytes(text)  # as a job leaves it that is killed while it writes
    take(tmp_path).close()
