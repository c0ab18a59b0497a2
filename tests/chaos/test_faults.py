"""Faults of one rank end the job with one report, which names the rank and the place."""

import re

import pytest

from chaos.injection import Fault, inject
from chaos.kinds import KINDS

QUICK = {("killed", 1), ("continues", 0), ("hang", 1)}
RARE = {"raises"}  # with --all alone: test_failures.py has it, and simulated ranks
THREE = {"hang", "raises"}  # on three ranks, of which two wait; the others on two
TIMEOUT_S = 15.0  # also for a rank that a busy machine delays


def run(*fault, **options):
    outcome = inject(Fault(*fault, **options), TIMEOUT_S)
    assert outcome.ended, outcome.result.report()
    assert outcome.result.left == [], outcome.result.report()
    assert outcome.right, outcome.result.report()
    return outcome


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "rank", "stage"),
    [
        pytest.param(
            kind,
            rank,
            number % 3,
            marks=[
                *([] if (kind, rank) in QUICK else [pytest.mark.thorough]),
                *([pytest.mark.exhaustive] if kind in RARE else []),
                *([pytest.mark.xdist_group("cluster")] if KINDS[kind].nodes else []),
            ],
        )
        for number, kind in enumerate(KINDS, 1)
        for rank in [r for k, r in QUICK if k == kind] or [number % 2]
    ],
)
def test_a_fault_is_reported_once_with_its_rank(kind, rank, stage):
    expected = KINDS[kind]
    outcome = run(kind, rank, 3 if kind in THREE else 2, stage)
    result = outcome.result
    reports = result.stderr.count("mntrain: error: ") + result.stderr.count(" failed:\n")
    assert reports <= (0 if expected.completes else 1), result.report()
    own = re.sub(r"^mntrain: warning: \d ranks share the .*\n", "", result.stderr)  # few cores
    assert own.count("warning: ") <= 1, result.report()
    if kind == "hang":
        expect_stacks(result)
    elif kind == "raises":
        assert result.stderr.count("KeyError: 'a bug of one rank'") == 1, result.report()
        for other in {0, 1, 2} - {rank}:
            learned = f"rank {other} learns of rank {rank}: KeyError: 'a bug of one rank'"
            assert learned in result.stdout, result.report()
    if expected.nodes and not expected.completes:
        assert outcome.seconds < 10 * TIMEOUT_S  # after which ranks would not wait


def expect_stacks(result):
    """The report has the stacks of the ranks that wait for rank 1, and of the cause."""
    report = result.stderr[result.stderr.index("mntrain: error: ") :]
    assert re.search(r"ranks 0, 2 on \S+ have waited \d+ s for rank 1 on", report), result.report()
    called = r"in gradient bucket 0: reduce_scatter of 2632 float32 \(collective \d+ of optimizer 1"
    assert re.search(called, report), result.report()
    waiting = report[report.index("stack of ranks 0, 2") :]
    assert re.search(r'fault.py", line \d+, in train\n    loss.backward\(\)', waiting)
    assert "time.sleep(1000)" in report


@pytest.mark.thorough
def test_a_fault_while_nodes_wait_in_an_exchange_is_reported_with_its_rank():
    run("killed", 1, 2, rarely=True)
