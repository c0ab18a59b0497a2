"""The command on folders of recordings, and what it learns from Slurm and the kernel."""

import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mntrain.recorder import autopsy
from mntrain.recorder.events import Recorder, own_oom_kills
from mntrain.recorder.recording import Event, Kind, Recording, read, recordings


def write(folder, ranks, job="job", size=None):
    """Leave recordings of ranks that closed, in a folder."""
    for rank in ranks:
        recorder = Recorder(rank, size or len(ranks))
        assert recorder.open(folder, job) == ""
        recorder.close()


def examine(folder, header):
    """The autopsy of a job with one rank."""
    return autopsy.examine(folder, [Recording(header, ())])


def test_a_folder_without_recordings_is_bad_input(tmp_path, capsys):
    assert autopsy.run([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"no recordings of ranks (rank-*.bin) in {tmp_path}/recorder" in said
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder" / "rank-00000.bin").write_text("something else")
    assert autopsy.run([str(tmp_path)]) == 2
    assert "is no recording of this version" in capsys.readouterr().err
    with pytest.raises(ValueError, match="required: RUN_DIR"):
        autopsy.run([])


def test_files_of_an_earlier_job_with_more_ranks_do_not_count(tmp_path, capsys):
    write(tmp_path / "recorder", range(4), "old")
    last = tmp_path / "recorder" / "rank-00003.bin"
    future = replace(read(last).header, wall=9e9).to_bytes()
    with last.open("r+b") as file:
        file.write(future)  # of a host whose clock is wrong
    write(tmp_path / "recorder", range(2), "new")
    assert autopsy.run([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 ranks on 1 host")
    assert "The job ended well" in said
    assert "note      2 files are of earlier jobs" in said


def test_files_on_local_disks_are_found_by_config_toml_and_as_copies(tmp_path, capsys):
    run, local, copies = tmp_path / "run", tmp_path / "local", tmp_path / "from node 1"
    assert recordings(run, local) != recordings(tmp_path / "y" / "run", local)  # of one name
    run.mkdir()
    (run / "config.toml").write_text(f"[run]\nrecorder = {str(local)!r}\n")
    write(recordings(run, local), [0, 1], size=2)
    write(copies, [1], size=2)
    (recordings(run, local) / "rank-00001.bin").write_bytes(b"cut")
    assert autopsy.run([str(run)]) == 1
    said = capsys.readouterr().out
    assert "missing   no recording of rank 1" in said
    assert "rank-00001.bin is no recording" in said
    assert autopsy.run([str(run), str(copies)]) == 0


@pytest.mark.parametrize("moves", [True, False])
def test_a_job_on_other_hosts_is_looked_at_twice(tmp_path, capsys, monkeypatch, moves):
    write(tmp_path / "recorder", [0])
    path = tmp_path / "recorder" / "rank-00000.bin"
    header = replace(read(path).header, host="another", wall=9e9)  # its clock is ahead
    signs = [Recording(header, (), sign=Event(t, Kind.SIGN_OF_LIFE)) for t in (5.0, 5.0 + moves)]
    monkeypatch.setattr(autopsy, "read", lambda path: signs.pop(0))
    monkeypatch.setattr(autopsy, "LOOK_S", 0.0)
    assert autopsy.run([str(tmp_path)]) == 1
    assert ("The job still runs, as far" in capsys.readouterr().out) == moves


def test_a_large_job_fits_a_screen(tmp_path, capsys):
    for rank in range(64):
        recorder = Recorder(rank, 64)
        recorder.open(tmp_path / "recorder", "job")
        recorder.begin_phase("forward", rank)
        recorder.leave_to_parent()
        recorder.close()  # records no end any more
    assert autopsy.run([str(tmp_path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) < 40


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def slurm_header(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "bin").mkdir()
    write(tmp_path / "recorder", [0])
    return read(tmp_path / "recorder" / "rank-00000.bin").header


def test_slurm_is_asked_for_the_step_then_the_job_then_scontrol(
    tmp_path, slurm_header, monkeypatch
):
    def state():
        return examine(tmp_path, slurm_header).scheduler

    program(
        tmp_path / "bin",
        "sacct",
        # Only the raw numbers of an array's tasks are those of their environment.
        """[ "$3" = --format=JobIDRaw,State ]; echo '17|RUNNING'; echo '17.2|OUT_OF_MEMORY'""",
    )
    program(tmp_path / "bin", "scontrol", "echo 'JobId=17 JobState=TIMEOUT Reason=None'")
    assert state() == "OUT_OF_MEMORY"
    program(tmp_path / "bin", "sacct", "echo '17|CANCELLED by 1000'; echo '17.0|FAILED'")
    assert state() == "CANCELLED"
    program(tmp_path / "bin", "sacct", "exit 1")
    assert state() == "TIMEOUT"
    program(tmp_path / "bin", "scontrol", "exit 1")
    assert state() == ""
    monkeypatch.setattr(autopsy, "_SLURM_TIMEOUT_S", 0.2)
    for name in ("sacct", "scontrol"):
        program(tmp_path / "bin", name, "exec sleep 600")
    assert state() == ""  # one that does not answer is not waited for


@pytest.mark.parametrize(
    "text",
    [
        "low 0\nhigh 0\nmax 0\noom 3\noom_kill 5\noom_group_kill 0\n",  # memory.events
        "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",  # of version 1
    ],
)
def test_kills_in_the_cgroup_count_since_the_start_and_on_this_host_only(tmp_path, text):
    write(tmp_path, [0])
    counter = tmp_path / "counter"
    counter.write_text(text)
    own = read(tmp_path / "rank-00000.bin").header
    header = replace(own, oom_file=str(counter), oom_kills=3)
    assert examine(tmp_path, header).oom_kills == {0: 2}
    anew, gone = replace(header, oom_kills=7), replace(header, oom_file=str(tmp_path / "none"))
    for other in (anew, gone, replace(header, host="another")):
        assert examine(tmp_path, other).oom_kills == {}


TOO_LARGE = """
import os, sys
from pathlib import Path
from mntrain.recorder.events import Recorder

Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
recorder = Recorder(0, 1)
recorder.open(Path(sys.argv[1]), "job")
recorder.begin_phase("forward", 3)
taken = [bytearray(os.urandom(1 << 20)) for _ in range(1000)]
"""


@pytest.fixture
def small_cgroup():
    """A cgroup of 64 MiB, of either version."""
    file, _ = own_oom_kills()
    folder = Path(file).parent / f"test-{os.getpid()}"
    limit = "memory.max" if file.endswith("memory.events") else "memory.limit_in_bytes"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(64 << 20))
    except OSError:
        pytest.skip("needs root and a memory cgroup")
    yield folder
    folder.rmdir()


def test_an_out_of_memory_kill_is_told(tmp_path, small_cgroup, capsys):
    command = [sys.executable, "-c", TOO_LARGE, tmp_path / "recorder", small_cgroup]
    done = subprocess.run(command, timeout=250, check=False)
    assert done.returncode == -signal.SIGKILL
    assert autopsy.run([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "in forward of step 3" in said
    assert "1 out-of-memory kill, says" in said
    assert "cause     the kernel killed for lack of memory" in said
    assert "--train.micro-batch-size" in said


def test_processes_of_this_host_and_boot_and_the_summary_of_this_job_count(tmp_path):
    write(tmp_path, [0])
    own = read(tmp_path / "rank-00000.bin").header
    assert examine(tmp_path, own).processes == {0: "runs"}
    reused = replace(own, process_start="1")  # another process has the number now
    assert examine(tmp_path, reused).processes == {0: "gone"}
    for other in (replace(own, boot="another"), replace(own, pid_namespace="another")):
        assert examine(tmp_path, other).processes == {}
    summary = tmp_path / "summary.json"
    summary.write_text('{"status": "failed"}')
    assert examine(tmp_path, own).summary == {"status": "failed"}
    os.utime(summary, (own.wall - 100, own.wall - 100))
    assert examine(tmp_path, own).summary == {}
    write(tmp_path / "recorder", [0])
    summary.touch()
    ahead = replace(own, wall=own.wall + 3600)  # the clock of the host, not that of its files
    assert examine(tmp_path, ahead).summary == {"status": "failed"}
    os.utime(summary, (own.wall - 100, own.wall - 100))
    assert examine(tmp_path, ahead).summary == {}
