"""What goes wrong on one rank ends the job with one report, which names the rank and the place."""

import re
import sys
from pathlib import Path

import pytest
from launch import is_open_mpi, mpirun

from chaos.kinds import KINDS

FAULT = Path(__file__).parent / "fault.py"
QUICK = {("stopped", 0), ("killed", 1), ("continues", 0)}


def run(kind, rank, *, timeout, ranks=3, stage=0):
    command = [sys.executable, FAULT, kind, rank, "--timeout", timeout, "--stage", stage]
    result = mpirun(ranks, command, timeout=110, outlived=KINDS[kind].dies, patience_s=10)
    assert not result.timed_out, result.report()
    assert result.left == [], result.report()
    return result


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        pytest.param(kind, rank, marks=[] if (kind, rank) in QUICK else pytest.mark.thorough)
        for number, kind in enumerate(KINDS)
        for rank in sorted({number % 3} | {r for k, r in QUICK if k == kind})
    ],
)
def test_a_fault_is_reported_once_with_its_rank(kind, rank):
    expected = KINDS[kind]
    result = run(kind, rank, timeout=6 if expected.waits else 60, stage=rank)
    found = re.search(expected.report.format(rank=rank), result.stderr)
    assert found, result.report()
    reports = result.stderr.count("mntrain: error: ") + result.stderr.count(" failed:\n")
    if expected.completes:
        assert result.returncode == 0, result.report()
        assert "completed" in result.stdout
        assert reports == 0, result.report()
    else:
        assert result.returncode == expected.code or is_open_mpi(), result.report()
        assert reports <= 1, result.report()
    own = re.sub(r"^mntrain: warning: \d ranks share the .*\n", "", result.stderr)  # few cores
    assert own.count("warning: ") <= 1, result.report()
    if kind == "none":
        assert own == ""


def test_a_hang_is_reported_with_the_stacks_of_those_that_wait_and_of_the_cause():
    result = run("hang", 1, timeout=6)
    report = result.stderr[result.stderr.index("mntrain: error: ") :]
    assert re.search(r"ranks 0, 2 on \S+ have waited \d+ s for rank 1 on", report), result.report()
    called = r"in gradient bucket 0: all_reduce of 2632 float32 \(collective \d+ of optimizer 1"
    assert re.search(called, report), result.report()
    waiting = report[report.index("stack of ranks 0, 2") :]
    assert re.search(r'fault.py", line \d+, in train\n    loss.backward\(\)', waiting)
    assert "time.sleep(1000)" in report


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_the_exception_of_a_rank_is_raised_by_the_others(rank):
    result = run("raises", rank, timeout=60)
    assert result.stderr.count("KeyError: 'a bug of one rank'") == 1, result.report()
    for other in {0, 1, 2} - {rank}:
        learned = f"rank {other} learns of rank {rank}: KeyError: 'a bug of one rank'"
        assert learned in result.stdout, result.report()
