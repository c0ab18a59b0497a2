import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launch import MPI_TESTS, TESTS, mpirun, run_suite

HANG = """
import threading, time

def sleep_in_main_thread():
    time.sleep(600)

def sleep_in_helper_thread():
    time.sleep(600)

threading.Thread(target=sleep_in_helper_thread, daemon=True).start()
print("started", flush=True)
sleep_in_main_thread()
"""


def living(mark: str) -> list[str]:
    """The command lines of all processes in which `mark` occurs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found


@pytest.fixture
def suite(tmp_path):
    """A function that writes a test file beside a copy of the suite's conftest and runs it."""

    def run(ranks, source, **limits):
        conftest = (MPI_TESTS / "conftest.py").read_text()
        (tmp_path / "conftest.py").write_text(conftest)
        header = "import pytest\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        (tmp_path / "test_sample.py").write_text(header + textwrap.dedent(source))
        return run_suite(ranks, [tmp_path], **{"timeout": 60, "everything": False, **limits})

    return run


@pytest.mark.thorough
def test_hanging_command_ends_at_its_limit_with_the_stack_of_every_thread():
    result = mpirun(3, [sys.executable, "-c", HANG], timeout=4)
    assert result.timed_out
    assert result.returncode != 0
    assert result.stdout.count("started") == 3
    assert [name.split(",")[0] for name in result.stacks] == ["rank 0", "rank 1", "rank 2"]
    for stack in result.stacks.values():
        assert "sleep_in_main_thread" in stack
        assert "sleep_in_helper_thread" in stack
    assert "sleep_in_main_thread" in result.report()
    assert living("sleep_in_main_thread") == []


@pytest.mark.thorough
def test_process_left_behind_by_a_rank_is_ended():
    program = """
import subprocess, sys
null = subprocess.DEVNULL
mark = "import time; time.sleep(600)  # left behind by a rank"
subprocess.Popen([sys.executable, "-c", mark], start_new_session=True, stdout=null, stderr=null)
"""
    mpirun(2, [sys.executable, "-c", program], timeout=30)
    assert living("left behind by a rank") == []


@pytest.mark.thorough
def test_shared_memory_of_killed_ranks_is_removed():
    program = """
import re, time
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 0:
    print(*re.findall(r"/dev/shm/.*", open("/proc/self/maps").read()), sep="\\n", flush=True)
    time.sleep(0.5)  # mpirun passes on what it has read before an abort
    world.Abort(1)
world.Barrier()
"""
    result = mpirun(2, [sys.executable, "-c", program], timeout=4)
    segments = {line for line in result.stdout.splitlines() if line.startswith("/dev/shm/")}
    assert segments
    assert [segment for segment in segments if Path(segment).exists()] == []


@pytest.mark.thorough
def test_hanging_suite_shows_where_every_rank_is(suite):
    result = suite(
        3,
        """
        def wait_in_barrier():
            world.Barrier()

        def wait_for_a_message():
            world.recv(source=0)

        def test_rank_two_goes_another_way():
            print("printed before the hang by", world.rank)
            (wait_for_a_message if world.rank == 2 else wait_in_barrier)()
        """,
        test_timeout=3,
    )
    assert not result.timed_out
    assert result.returncode != 0
    for rank, function in enumerate(["wait_in_barrier", "wait_in_barrier", "wait_for_a_message"]):
        assert "::test_rank_two_goes_another_way ran past its limit of 3 s" in result.outputs[rank]
        assert f"in {function}" in result.outputs[rank]
        assert f"printed before the hang by {rank}" in result.outputs[rank]
        assert f"in {function}" in result.report()


@pytest.mark.thorough
def test_failure_on_one_rank_is_reported_within_seconds(suite):
    result = suite(
        3,
        """
        def test_passes():
            world.Barrier()

        def test_fails_on_rank_one():
            assert world.rank != 1, "only here"
            world.Barrier()
        """,
    )
    assert not result.timed_out
    assert result.returncode != 0
    report = result.report()
    _, failing = report.split("# rank 1 #")
    assert "AssertionError: only here" in failing
    assert "test_sample.py::test_fails_on_rank_one (call)" in failing
    assert report.count("AssertionError: only here") == 1
    assert "test_passes" not in report


def test_serial_pytest_collects_nothing_of_the_mpi_tests():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", MPI_TESTS]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=TESTS.parent)
    assert result.returncode != 0
    assert "::" not in result.stdout
