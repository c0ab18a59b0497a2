"""The pages in docs/results say what benchmarks/ writes about the figures in their JSON files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.thorough
def test_pages_are_rendered_from_their_figures(tmp_path):
    pytest.importorskip("matplotlib")
    committed = ROOT / "docs" / "results"
    (tmp_path / "results").mkdir()
    for path in committed.glob("*.json"):
        shutil.copy(path, tmp_path / "results")
    command = [sys.executable, ROOT / "benchmarks" / "render.py", "--output", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    pages = sorted((tmp_path / "results").glob("*.md"))
    assert len(pages) == len(list(committed.glob("*.json")))
    for page in pages:
        assert page.read_text() == (committed / page.name).read_text(), page.name
