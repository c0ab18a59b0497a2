"""Every stage reproduces the committed losses: to the bit where the processor is the same."""

import json
from itertools import product

import pytest
from golden import FILE, RUNS, STAGES, machine, measure

GOLDEN = json.loads(FILE.read_text())

QUICK = ("4 ranks on 2 nodes", 2)


def marks_of(case):
    """The rest of the tests has stage 0 of each run; bits across stages have tests of their own."""
    if case == QUICK:
        return []
    return [pytest.mark.exhaustive if case[1] else pytest.mark.thorough]


CASES = [pytest.param(*case, marks=marks_of(case)) for case in product(RUNS, STAGES)]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_losses_are_those_of_the_reference_run(name, stage, tmp_path):
    found, expected = measure(name, stage, tmp_path), GOLDEN[name][str(stage)]
    if machine() == GOLDEN["machine"]:
        assert found == expected
    else:
        assert found == pytest.approx(expected, rel=1e-4)
