"""The commands of benchmarks/slow_links.py, and what benchmarks/ writes about figures."""

import shlex
import shutil
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from mntrain.options.command_line import parse

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(monkeypatch):
    """Return a module of benchmarks/ by name."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # restores what emulated.py adds
    for path in (ROOT / "benchmarks").glob("*.py"):  # tests/gpu is a module gpu, too
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    with matplotlib.rc_context():
        yield import_module


def test_commands_of_all_modes_can_be_parsed(bench):
    slow_links = bench("slow_links")
    options = Namespace(steps=1000, batch_size=8, context=64, model="")
    for name, mode in slow_links.MODES.items():
        words = shlex.split(slow_links.command_of(name, 2, options))
        config = parse(words[words.index("mntrain") + 1 :])
        assert (config.run.seed, config.train.steps, config.model.context) == (2, 1000, 64), name
        assert config.sync.warmup == (mode.warmup if config.sync.every else 0), name
        assert (config.sync.every or 1) == mode.every, name


@pytest.mark.thorough
def test_pages_in_docs_say_what_is_written_about_their_figures(bench, tmp_path, monkeypatch):
    committed, made = ROOT / "docs" / "results", tmp_path / "results"
    made.mkdir()
    for path in committed.glob("*.json"):
        shutil.copy(path, made)
    monkeypatch.setattr(sys, "argv", ["render.py", "--output", str(tmp_path)])
    # To draw takes three times as long as to write, and pictures are not compared.
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    assert bench("render").main() == 0
    pages = sorted(made.glob("*.md"))
    assert len(pages) == len(list(committed.glob("*.json")))
    for page in pages:
        assert page.read_text() == (committed / page.name).read_text(), page.name
