"""The commands of benchmarks/slow_links.py."""

import shlex
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
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # restores what emulated.py adds
    for path in (ROOT / "benchmarks").glob("*.py"):  # tests/gpu is a module gpu, too
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return import_module


def test_commands_of_all_modes_can_be_parsed(bench):
    slow_links = bench("slow_links")
    options = Namespace(steps=1000, batch_size=8, context=64, model="")
    for name, mode in slow_links.MODES.items():
        words = shlex.split(slow_links.command_of(name, 2, options))
        config = parse(words[words.index("mntrain") + 1 :])
        assert (config.run.seed, config.train.steps, config.model.context) == (2, 1000, 64), name
        assert config.sync.warmup == (mode.warmup if config.sync.every else 0), name
        assert (config.sync.every or 1) == mode.every, name
