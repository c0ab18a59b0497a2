"""The file of a rank's last events, and its life beyond that of the process."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from weakref import ref

import pytest

from mntrain.recorder.events import Recorder
from mntrain.recorder.recording import (
    CAPACITY,
    FILE_BYTES,
    HEADER_BYTES,
    MAGIC,
    RECORD_BYTES,
    Kind,
    read,
)


@pytest.fixture
def recorder():
    recorder = Recorder(3, 5)
    yield recorder
    recorder.close()


@pytest.fixture
def opened(recorder, tmp_path):
    """The recorder with its file in a folder."""
    assert recorder.open(tmp_path, "job") == ""
    return recorder


def events(folder, rank=3):
    return read(folder / f"rank-{rank:05}.bin").events


def run(*words, check=False, env=None):
    """Run Python with these words."""
    options = {"capture_output": True, "text": True, "timeout": 60, "env": env}
    return subprocess.run([sys.executable, *map(str, words)], check=check, **options)


def test_events_from_before_and_after_the_file_are_in_it(recorder, tmp_path):
    recorder.begin_phase("start")
    assert recorder.open(tmp_path / "recorder", "job") == ""
    recorder.collective_begins("the world", 7, "gather", "train.py:12", 2)
    recorder.collective_ends("the world", 7)
    recorder.signal_arrived(signal.SIGTERM)
    found = read(tmp_path / "recorder" / "rank-00003.bin")
    header = found.header
    assert (header.rank, header.size, header.job, header.pid) == (3, 5, "job", os.getpid())
    assert abs(header.wall - time.time()) < 20
    kinds = [Kind.PHASE_BEGINS, Kind.COLLECTIVE_BEGINS, Kind.COLLECTIVE_ENDS, Kind.SIGNAL]
    assert [event.kind for event in found.events] == kinds
    begun = found.events[1]
    assert (begun.name, begun.number, begun.text) == ("the world", 7, "gather")
    assert (begun.site, begun.awaited) == ("train.py:12", 2)
    assert found.events[3].text == "SIGTERM"
    assert found.events[0].time < 0 <= begun.time <= found.events[2].time
    assert found.complete


def test_the_thread_keeps_nothing_of_training_and_ends_at_once(opened, tmp_path):
    class Held:
        pass

    def train():
        held = Held()  # such as tensors, which only the training thread may free
        while read(tmp_path / "rank-00003.bin").sign is None:
            time.sleep(0.01)
        return ref(held)

    held = train()
    assert held() is None
    thread = opened._signs
    assert thread.is_alive()
    opened.close()
    assert not thread.is_alive()


def test_a_recorder_that_can_start_no_thread_says_so_and_leaves_no_file(
    recorder, tmp_path, monkeypatch
):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert recorder.open(tmp_path, "job") == f"{tmp_path}: can't start new thread"
    assert not recorder.opened
    assert recorder._crashes is None or not recorder._crashes.alive
    assert list(tmp_path.iterdir()) == []


def test_the_newest_events_replace_the_oldest(recorder, tmp_path):
    recorder.open(tmp_path, "job")
    for number in range(2 * CAPACITY + 5):
        recorder.collective_ends("s", number)
    found = read(tmp_path / "rank-00003.bin")
    assert [event.number for event in found.events] == list(range(CAPACITY + 5, 2 * CAPACITY + 5))
    assert not found.complete
    assert (tmp_path / "rank-00003.bin").stat().st_size == FILE_BYTES


def test_long_texts_are_cut_where_they_tell_least(opened, tmp_path):
    opened.collective_begins("n" * 100, 1, "é" * 200 + "\udcff", "/long" * 50 + "/train.py:123")
    (event,) = events(tmp_path)
    assert event.name == "n" * 30
    assert event.text.startswith("é" * 49)
    assert event.site.endswith("/long/train.py:123")


def test_a_torn_record_is_left_out_and_other_files_are_refused(opened, tmp_path):
    for number in (1, 2, 3):
        opened.collective_ends("s", number)
    path = tmp_path / "rank-00003.bin"
    data = bytearray(path.read_bytes())
    data[(at := HEADER_BYTES + 2 * RECORD_BYTES) : at + 8] = bytes(8)  # as if it was not written
    path.write_bytes(data)
    assert [event.number for event in events(tmp_path)] == [1, 3]
    damaged = path.read_bytes().replace(b'"rank"', b'"tank"')
    for content, said in (
        (damaged, "has a damaged header"),
        *((other, "is no recording") for other in (b"", b"no recording", MAGIC + b"\xff" * 999)),
    ):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            read(tmp_path / "other")


def test_many_threads_write_without_loss_and_a_reader_sees_whole_records_only(opened, tmp_path):
    each = CAPACITY // 4

    def write(name):
        for number in range(each):
            opened.collective_begins(name, number, f"t{name}{number}", f"l{name}{number}")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for event in events(tmp_path):
            of_it = f"{event.name}{event.number}"
            assert (event.text, event.site) == (f"t{of_it}", f"l{of_it}")
    for name in "abcd":
        assert [e.number for e in events(tmp_path) if e.name == name] == list(range(each))


KILLED = """
import os, signal, sys, time
from pathlib import Path
from mntrain.recorder.events import Recorder

recorder = Recorder(0, 1)
recorder.open(Path(sys.argv[1]), "job")
if os.fork() == 0:
    recorder.leave_to_parent()
    recorder.collective_ends("of the child", 1)
    os._exit(0)
os.wait()
recorder.begin_phase("forward", 4)
time.sleep(1.5)  # this line
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_events_and_the_last_line_survive_sigkill_and_a_forked_child_writes_none(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    done = run(script, tmp_path)
    assert done.returncode == -signal.SIGKILL
    found = read(tmp_path / "rank-00000.bin")
    assert [(e.kind, e.name, e.number) for e in found.events] == [(Kind.PHASE_BEGINS, "forward", 4)]
    assert found.sign is not None
    line = KILLED[: KILLED.index("# this line")].count("\n") + 1
    assert found.sign.site == f"{script}:{line}"


def test_the_end_of_the_interpreter_is_a_clean_end(opened, tmp_path):
    script = (
        "from pathlib import Path; from mntrain.recorder.events import Recorder\n"
        f"recorder = Recorder(0, 1); recorder.open(Path({str(tmp_path)!r}), 'job')"
    )
    run("-c", script, check=True)
    opened.close()
    opened.begin_phase("forward")  # after the end, nothing is recorded
    assert [[e.kind for e in events(tmp_path, rank)] for rank in (0, 3)] == [[Kind.END]] * 2


def test_an_error_has_the_innermost_line_of_the_user_and_its_phase_does_not_end(tmp_path):
    recorder = Recorder(0, 1)
    recorder.open(tmp_path, "job")
    with recorder.phase("data", 1):
        pass
    try:
        with recorder.phase("forward", 1):
            Path("/no/such/file").read_text()  # raises in the standard library
    except OSError as error:
        recorder.error_raised(error)
        line = error.__traceback__.tb_lineno
    *phases, event = events(tmp_path, 0)
    recorder.close()
    begins, ends = Kind.PHASE_BEGINS, Kind.PHASE_ENDS
    assert [(e.kind, e.name) for e in phases] == [
        *((kind, "data") for kind in (begins, ends)),
        (begins, "forward"),
    ]
    assert event.kind == Kind.ERROR
    assert event.text.startswith("FileNotFoundError: [Errno 2]")
    assert event.site == f"{__file__}:{line}"[-96:]


def test_a_folder_that_cannot_hold_the_file_is_told_and_recording_goes_on_in_memory(
    recorder, tmp_path
):
    (tmp_path / "file").write_text("")
    assert "Not a directory" in recorder.open(tmp_path / "file" / "recorder", "job")
    recorder.begin_phase("forward")


FULL = """
import os, sys
from pathlib import Path
from mntrain.recorder.events import Recorder
folder = Path(sys.argv[1])
said = [Recorder(0, 1).open(folder, job) for job in ("an earlier job", "job")]
recorder = Recorder(0, 1)
recorder.open(folder, "job")
for _ in range(2000):
    recorder.begin_phase("x")
print(said, os.listdir(folder))
"""


def test_a_full_disk_does_not_end_the_process_and_leaves_no_file_of_an_earlier_job(tmp_path):
    """The file system is a real one, with room for one file."""
    mount = f'mount -t tmpfs -o size=400k x {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    command = ["unshare", "--mount", "sh", "-c", mount, FULL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("needs root")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"['', '{tmp_path}: No space left on device'] []\n"


def test_what_a_file_has_not_taken_is_written_with_the_next_sign_of_life(opened, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 2 * RECORD_BYTES, limits[1]))
    try:
        for number in range(1, 5):
            opened.collective_ends("s", number)
        assert [event.number for event in events(tmp_path)] == [1]  # slots 1, 2, ...
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    deadline = time.monotonic() + 30
    while len(events(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [event.number for event in events(tmp_path)] == [1, 2, 3, 4]


def test_a_new_job_replaces_the_file_of_an_earlier_one_that_still_writes(tmp_path):
    old, new = Recorder(0, 1), Recorder(0, 1)
    old.open(tmp_path, "old")
    new.open(tmp_path, "new")
    old.begin_phase("of the old")
    found = read(tmp_path / "rank-00000.bin")
    assert (found.header.job, found.events) == ("new", ())
    old.close()
    new.close()


def test_a_link_that_another_user_has_put_in_place_of_the_file_is_not_followed(recorder, tmp_path):
    (tmp_path / "file").write_text("words")
    (tmp_path / f".rank-00003.bin.{os.getpid()}").symlink_to(tmp_path / "file")
    assert recorder.open(tmp_path, "job") == ""
    assert (tmp_path / "file").read_text() == "words"
    assert read(tmp_path / "rank-00003.bin").header.job == "job"


CRASH = """
import ctypes, faulthandler, os, sys
from pathlib import Path
from mntrain.recorder.events import Recorder
if sys.argv[2] == "the user's":
    faulthandler.enable()
recorder = Recorder(0, 1)
os.register_at_fork(after_in_child=recorder.leave_to_parent)
recorder.open(Path(sys.argv[1]), "job")
recorder.begin_phase("forward", 1)
if sys.argv[2] == "the user's, set later":
    faulthandler.enable()
if sys.argv[2] in ("closed", "the user's, set later"):
    recorder.close()
if sys.argv[2] != "child" or not os.fork():
    ctypes.string_at(0)
os.wait()
"""


@pytest.mark.parametrize("kind", ["own", "the user's", "the user's, set later", "closed", "child"])
def test_a_crash_of_native_code_is_recorded_with_its_line(tmp_path, kind):
    program = tmp_path / "program.py"
    program.write_text(CRASH)
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONFAULTHANDLER"}
    ended = run(program, tmp_path, kind, env=environment)
    assert ended.returncode == (0 if kind == "child" else -signal.SIGSEGV)
    assert ("Segmentation fault" in ended.stderr) == kind.startswith("the user's")
    recorded = events(tmp_path, 0)
    found = [event for event in recorded if event.kind == Kind.CRASH]
    if kind != "own":
        assert found == []
        return
    line = CRASH[: CRASH.index("ctypes.string_at")].count("\n") + 1
    assert (found[0].text, found[0].site) == ("Segmentation fault", f"{program}:{line}")
    assert [event.kind for event in recorded] == [Kind.PHASE_BEGINS, Kind.CRASH]
