"""A run directory and the notes of rank 0, and what they say of a start."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mntrain.launch.evidence import Evidence
from mntrain.launch.verdict import EndCause
from mntrain.options.config import CheckpointConfig
from mntrain.recorder.autopsy import examine, find_recordings
from mntrain.recorder.launch_notes import VARIABLE, LaunchNotes
from mntrain.train.job import warn_of_launch

# Rank 1 of two ends as the word says; rank 0 sees some end in an order.
RANK = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from mntrain.recorder import events
from mntrain.recorder.events import Recorder

folder, rank, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
events.pid_namespace = lambda: "1"  # as on another host, where this one sees no processes
recorder = Recorder(rank, 2)
assert recorder.open(folder / "recorder", "job") == ""
recorder.begin_phase("forward", 3)
if end == "raise" and rank == 1:
    recorder.error_raised(KeyError("a bug"))
if rank == 0:
    for other in map(int, sys.argv[4]):
        recorder.peer_ended(other)
if end == "close":
    recorder.close()
    sys.exit()
if end == "in MPI" and rank == 1:
    place = folder / "mntrain" / "comm" / "mpi.py"
    place.parent.mkdir(parents=True)
    place.write_text("import os, signal\\nos.kill(os.getpid(), signal.SIGSEGV)\\n")
    exec(compile(place.read_text(), place, "exec"))
os.kill(os.getpid(), getattr(signal, end) if rank == 1 and end[:3] == "SIG" else signal.SIGKILL)
"""
NOBODY = EndCause(None, "exit code 1")
LOST = EndCause(True, "rank 1 on n2 is lost: its process has ended without a word", "the ranks")


def found_in(folder):
    """Let a start begin to use a run directory; return what it notes of that."""
    (folder / "notes").mkdir(exist_ok=True)
    notes = LaunchNotes(folder / "notes")
    notes.use_run(folder)
    return notes.run


def end_of_ranks(folder, end, seen="1"):
    """Let two ranks end; return what the run directory says of it."""
    found = found_in(folder)
    for rank in (1, 0):
        subprocess.run([sys.executable, "-c", RANK, folder, str(rank), end, seen], check=False)
    return Evidence.of(found)


@pytest.mark.parametrize(("end", "fault"), [("kill", True), ("raise", False)])
def test_recordings_tell_a_rank_that_was_killed_from_one_that_raised(tmp_path, end, fault):
    verdict = end_of_ranks(tmp_path, end).judge(NOBODY)
    assert (verdict.fault, verdict.by) == (fault, "the recordings")
    assert verdict.hosts == (os.uname().nodename,)
    assert f"rank 1 on {os.uname().nodename}: " in verdict.what
    later = Evidence.of(found_in(tmp_path))  # these are of an earlier start
    assert later.judge(NOBODY) is NOBODY
    assert Evidence.of(None).judge(NOBODY) is NOBODY


def test_ranks_that_have_closed_their_recordings_have_ended_well(tmp_path):
    assert end_of_ranks(tmp_path, "close").judge(NOBODY).fault is False
    assert Evidence.of(found_in(tmp_path)).judge(NOBODY) is NOBODY


@pytest.mark.parametrize(
    ("end", "fault"),
    [("SIGKILL", True), ("SIGSEGV", False), ("SIGABRT", False), ("SIGBUS", True), ("raise", True)],
)
def test_a_rank_that_others_have_seen_end_may_have_crashed_by_itself(tmp_path, end, fault):
    evidence = end_of_ranks(tmp_path, end)
    assert evidence.judge(LOST).fault == fault
    other = EndCause(True, LOST.what.replace("rank 1 on n2", "rank 0 on n1"))
    assert evidence.judge(other) is other
    unsure = EndCause(True, "a rank on n2 ended: EXIT CODE: 9", "mpirun")
    assert evidence.judge(unsure).fault == (end != "SIGSEGV")


@pytest.mark.parametrize(("seen", "fault"), [("21", True), ("12", False), ("", False)])
def test_a_crash_after_another_rank_has_ended_is_no_cause(tmp_path, seen, fault):
    unsure = EndCause(True, "a rank on n3 ended: EXIT CODE: 9", "mpirun")
    assert end_of_ranks(tmp_path, "SIGSEGV", seen).judge(unsure).fault == fault


@pytest.mark.parametrize("end", ["in MPI", "SIGSEGV"])
def test_a_crash_in_a_call_of_mpi_may_come_of_another_ranks_end(tmp_path, end):
    """MPICH's send crashes in a rank whose peer was killed just now; nobody has seen either end."""
    evidence, by_itself = end_of_ranks(tmp_path, end, ""), end == "SIGSEGV"
    unsure = EndCause(True, "a rank on n3 ended: EXIT CODE: 9", "mpirun", ("n3",))
    assert (evidence.judge(unsure) is unsure) == (not by_itself)
    banner = EndCause(False, "a rank on n2 ended: Segmentation fault (signal 11)", "mpirun")
    judged = evidence.judge(banner)
    assert judged.fault == (not by_itself)
    assert ("in a call of MPI, as after the loss of another one" in judged.what) == judged.fault
    assert evidence.judge(LOST).fault == (not by_itself)
    assert evidence.judge(NOBODY).fault == (not by_itself)
    autopsy = examine(tmp_path, find_recordings(tmp_path)[0])
    assert (autopsy.first, autopsy.sure) == ([1], by_itself)
    what = "native code" if by_itself else "MPI"
    assert autopsy.cause == f"{what} crashed: Segmentation fault"


def test_a_summary_counts_if_this_start_has_written_it(tmp_path):
    found = found_in(tmp_path)
    assert (Evidence.of(found).summary, Evidence.of(found).last_step) == (None, 0)
    summary = tmp_path / "summary.json"
    summary.write_text('{"status": "lost"}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "loss": 1}\n{"step": 12, "loss": 1}\n{"st')
    assert Evidence.of(found).summary == {"status": "lost"}
    assert Evidence.of(found).last_step == 12
    later = found_in(tmp_path)
    assert Evidence.of(later).summary is None
    os.utime(summary, ns=(0, 1 + later.summary_ns))  # the same, written again
    assert Evidence.of(later).summary == {"status": "lost"}
    summary.unlink()
    assert Evidence.of(later).summary is None


def test_rank_0_notes_its_first_step_and_later_ones_once_a_second(tmp_path, monkeypatch):
    assert LaunchNotes.of({}) is None
    notes, reader = LaunchNotes.of({VARIABLE: str(tmp_path)}), LaunchNotes(tmp_path)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert (reader.steps, reader.run) == (None, None)
    for step in range(1, 6):
        notes.take_step()
        now[0] += 0.4
        assert reader.steps == {1: 1, 2: 1, 3: 1, 4: 4, 5: 4}[step]
    notes.use_run(tmp_path / "run")
    assert reader.run == (tmp_path / "run", 0, 0)
    assert notes.start == 0
    reader.begin_start(2)
    assert (reader.steps, reader.run, notes.start) == (None, None, 2)
    assert [notes.has_begun(tmp_path / name) for name in ("run", "other")] == [True, False]
    gone = LaunchNotes(tmp_path / "gone")  # training goes on
    gone.take_step()
    gone.use_run(tmp_path)


@pytest.mark.parametrize(
    ("launched", "job", "warned"),
    [
        (True, (None, "auto"), True),
        (True, ("runs/a", "0"), True),
        (True, ("runs/a", "10"), False),
        (False, (None, "0"), False),
    ],
)
def test_a_job_that_launch_cannot_resume_is_warned_of(monkeypatch, capsys, launched, job, warned):
    monkeypatch.delenv(VARIABLE, raising=False)
    if launched:
        monkeypatch.setenv(VARIABLE, "folder")
    run, checkpoint = SimpleNamespace(dir=job[0]), CheckpointConfig(every=job[1])
    warn_of_launch(SimpleNamespace(checkpoint=checkpoint, run=run))
    assert ("mntrain launch cannot resume this job" in capsys.readouterr().err) == warned
