"""Every stage reproduces the committed losses: to the bit where the processor is the same."""

import json
from itertools import product

import pytest
from golden import FILE, RUNS, STAGES, machine, measure

GOLDEN = json.loads(FILE.read_text())

QUICK = ("4 ranks on 2 nodes", 2)
CASES = [
    pytest.param(*case, marks=[] if case == QUICK else pytest.mark.thorough)
    for case in product(RUNS, STAGES)
]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_losses_are_those_of_the_reference_run(name, stage, tmp_path):
    found, expected = measure(name, stage, tmp_path), GOLDEN[name][str(stage)]
    if machine() == GOLDEN["machine"]:
        assert found == expected
    else:
        assert found == pytest.approx(expected, rel=1e-4)
