"""docs/own-loop.md, as it stands: its scripts run, and its table names scripts and tests."""

import json
import re
import sys
from pathlib import Path

import pytest
from launch import mpirun

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "own-loop.md").read_text()
WHOLE = PAGE.partition("## Calls of a world")[0]  # whose scripts are whole
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", WHOLE, re.MULTILINE | re.DOTALL)
ROWS = re.findall(
    r"^\| (?!\| stage).+ \|$", WHOLE.partition("## What works as under DDP")[2], re.MULTILINE
)
RUN_EACH = "import runpy, sys; [runpy.run_path(p, run_name='__main__') for p in sys.argv[1:]]"


@pytest.mark.thorough
def test_the_scripts_of_the_page_run(tmp_path):
    paths = [tmp_path / f"script_{number}.py" for number in range(len(SCRIPTS))]
    for path, text in zip(paths, SCRIPTS, strict=True):
        path.write_text(text)
    again = paths[-1]  # the one with checkpoints, which has nothing left to do
    command = [sys.executable, "-W", "error", "-c", RUN_EACH, *paths, again]
    result = mpirun(2, command, timeout=250, cwd=tmp_path)
    assert result.returncode == 0, result.report()
    losses = re.findall(r"epoch \d: validation loss (\S+)\n", result.stdout)
    assert len(losses) == 3
    assert float(losses[2]) < float(losses[0])
    assert re.findall(r"batch (\d+): gradient norm \d", result.stdout) == ["4", "8", "12", "13"]
    log = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == list(range(1, 41))
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 40)


def test_each_row_of_the_table_names_scripts_or_tests_that_exist():
    assert len(ROWS) > 20
    for row in ROWS:
        named = re.findall(r"\[(\w+)\]\((\.\./tests/\S+\.py)\)", row.split(" | ")[-1])
        assert named, row
        for name, place in named:
            text = (DOCS / place).read_text()
            assert name == Path(place).stem or f"\ndef {name}(kit):" in text, (name, place)
