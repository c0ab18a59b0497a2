"""One job in a run's directory, also where the file system has no file locks."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace

import pytest

from mntrain.run import lock
from mntrain.run.lock import RunLock

HOLD = """
import fcntl, sys, time
fcntl.flock = lambda *_: None
from pathlib import Path
from mntrain.run.lock import RunLock
held = RunLock(Path(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
"""


def not_supported(*_):
    raise OSError(errno.ENOTSUP, "Operation not supported")


@pytest.fixture(params=["works", "not supported", "local"])
def flock(request, monkeypatch):
    """File locks of different file systems; the times are short."""
    shims = {
        "works": fcntl.flock,
        "not supported": not_supported,
        "local": lambda *_: None,  # as another host sees them
    }
    monkeypatch.setattr(fcntl, "flock", shims[request.param])
    for name, seconds in {"BEAT_S": 0.1, "SILENT_S": 1.5, "CLAIM_S": 1.5, "_POLL_S": 0.02}.items():
        monkeypatch.setattr(lock, name, seconds)
    return request.param


def take(folder):
    return RunLock(folder, print)


def read(folder):
    return json.loads((folder / ".lock").read_text())


def elsewhere(folder):
    """Write a holder on another host into the file, as a job that was killed leaves it."""
    holder = replace(lock._own_name(), host="far", boot="another", holder="on far, process 7")
    (folder / ".lock").write_text(json.dumps(asdict(holder)).ljust(1000))
    return holder


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_second_job_is_refused_until_the_first_has_ended(flock, tmp_path):
    with closing(take(tmp_path)):
        words = f"on {socket.gethostname()}, process {os.getpid()}, since 2"
        for _ in range(2):
            with pytest.raises(ValueError, match=f"is in use by a job \\({words}.*another run dir"):
                take(tmp_path)
    assert (tmp_path / ".lock").read_text() == ""
    take(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]


def test_the_lock_of_a_process_that_was_killed_is_taken_at_once(flock, tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=f"process {holder.pid}, "):
            take(tmp_path)
        holder.kill()
    assert read(tmp_path)["pid"] == holder.pid
    take(tmp_path).close()


def test_a_silent_holder_on_another_host_is_dead(flock, tmp_path, capsys):
    elsewhere(tmp_path)
    take(tmp_path).close()
    assert "names a job on far, process 7: waiting up to 1.5 s" in capsys.readouterr().err


def test_a_holder_on_another_host_that_counts_on_is_alive(flock, tmp_path):
    holder, ended = elsewhere(tmp_path), threading.Event()

    def count_on():
        count = 0
        while not ended.wait(0.1):
            count += 1
            lock._write(tmp_path / ".lock", replace(holder, count=count))

    with ThreadPoolExecutor() as pool:
        pool.submit(count_on)
        try:
            with pytest.raises(ValueError, match=r"in use by a job \(on far, process 7\)"):
                take(tmp_path)
        finally:
            ended.set()
    assert read(tmp_path)["host"] == "far"


def test_a_file_system_that_hangs_for_longer_makes_no_holder_dead(flock, tmp_path, monkeypatch):
    found, looks = elsewhere(tmp_path), []

    def slow(path, read=lock._read):
        looks.append(read(path))
        if len(looks) == 1:
            time.sleep(lock.SILENT_S)
        elif len(looks) == 3:
            return replace(found, count=1)
        return looks[-1]

    monkeypatch.setattr(lock, "_read", slow)
    assert lock._counts_on(tmp_path / ".lock", found)


def test_of_many_that_start_at_once_one_holds_the_lock(flock, tmp_path):
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


def test_what_the_dead_and_an_earlier_version_left_keeps_nobody_out(flock, tmp_path):
    far = replace(lock._own_name(), host="far", boot="another")
    dead = replace(lock._own_name(), start="1")  # another process has its number now
    for text in (json.dumps(asdict(far)), json.dumps(asdict(dead)), ""):
        (tmp_path / ".lock.claim").write_text(text)
        take(tmp_path).close()
    assert not (tmp_path / ".lock.claim").exists()
    for text in (json.dumps(asdict(dead)), "on a host, process 7"):
        (tmp_path / ".lock").write_text(text)
        with closing(take(tmp_path)):
            assert read(tmp_path)["pid"] == os.getpid()
    made = take(tmp_path)
    del made  # a lock that nobody refers to is let go
    take(tmp_path).close()


def test_a_full_disk_leaves_no_claim(flock, tmp_path, monkeypatch):
    def full(holder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock, "_to_bytes", full)
    with pytest.raises(OSError, match="No space"):
        take(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_forked_child_does_not_let_go(flock, tmp_path):
    with closing(take(tmp_path)) as mine:
        if not (child := os.fork()):
            mine.close()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(ValueError, match="in use"):
            take(tmp_path)


def test_a_forked_child_that_outlives_a_killed_holder_keeps_nobody_out(flock, tmp_path):
    child, ready = os.pipe()
    if not (holder := os.fork()):
        try:
            held = take(tmp_path)  # noqa: F841 - until this process is killed
            if not os.fork():
                os.write(ready, str(os.getpid()).encode())
            time.sleep(60)
        finally:
            os._exit(0)
    number = int(os.read(child, 100))
    try:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        take(tmp_path).close()
    finally:
        os.kill(number, signal.SIGKILL)
        os.close(child)
        os.close(ready)


def test_a_file_that_was_removed_is_made_again(flock, tmp_path):
    with closing(take(tmp_path)):
        (tmp_path / ".lock").unlink()
        until((tmp_path / ".lock").exists)
        until((tmp_path / ".lock").read_text)
        with pytest.raises(ValueError, match="in use"):
            take(tmp_path)
