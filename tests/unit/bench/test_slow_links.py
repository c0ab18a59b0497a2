"""The commands of benchmarks/slow_links.py."""

import shlex
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from mntrain.cli import parse

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(monkeypatch):
    """Return a module of benchmarks/ by name."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # restores what emulated.py adds
    return import_module


def test_commands_of_all_modes_can_be_parsed(bench):
    modes, slow_links = bench("slow_modes").MODES, bench("slow_links")
    options = Namespace(steps=1000, batch_size=8, context=64, model="")
    for name, mode in modes.items():
        words = shlex.split(slow_links.command_of(name, 2, options))
        if mode.peer:
            assert words[4].endswith("peer_losses.py"), name
            assert words[words.index("--seed") + 1] == "2", name
            continue
        config = parse(words[words.index("mntrain") + 1 :])
        assert (config.run.seed, config.train.steps, config.model.context) == (2, 1000, 64), name
        assert config.sync.warmup == (mode.warmup if config.sync.every else 0), name
        assert (config.sync.every or 1) == mode.every, name
