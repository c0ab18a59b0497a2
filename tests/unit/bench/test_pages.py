"""The commands of benchmarks/slow_links.py, and what benchmarks/ writes about figures."""

import shlex
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
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


def test_formulas_of_collectives_are_those_of_their_rounds(bench):
    model = bench("scale_model")
    call = model.Call(nodes=4, per_node=2, nbytes=8000, latency_s=1.0, rate=1000.0)
    verbs = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    assert [call.bound_s(verb) for verb in verbs] == [2 + 12, 2 + 6, 2 + 6, 2 + 8]
    # Seven steps of a latency and an eighth of the tensor; a broadcast is scattered before.
    assert [call.ring_s(verb) for verb in verbs] == [28, 14, 14, 8 + 14]
    # Two ranks of a node send to other nodes, but in an all-reduce and a scatter.
    assert [call.halving_s(verb) for verb in verbs] == [16, 14, 14, 8 + 14]
    assert [call.mpich_s(verb) for verb in verbs] == [16, 14, 14, 2 + 2 * 8]
    small, large = replace(call, nbytes=2000), replace(call, nbytes=1 << 20, rate=1 << 20)
    assert small.mpich_s("all_reduce") == 2 + 2 * 2 * 2
    assert large.mpich_s("reduce_scatter") == 7 + 2 * 0.75
    assert large.mpich_s("all_gather") == large.ring_s("all_gather") == 7 + 7 / 8


def test_a_step_exposes_what_backward_and_forward_do_not_cover(bench):
    step = bench("scale_model").Step(forward_s=4.0, backward_s=8.0, buckets=4)
    assert step.reduced_s(1.0) == 1.0  # of the last bucket
    assert step.reduced_s(3.0) == 2 + 4 * 3 - 8
    assert step.exposed_s(1.0, 0.5) == 1.0 + 4 * 0.5
    assert step.exposed_s(1.0, 0.5, overlap_forward=True) == 1.0 + 0.5  # of the first one
    assert step.exposed_s(1.0, 2.0, overlap_forward=True) == 1.0 + 4 * 2 + 1 - 4
    assert step.share(4.0) == 0.25


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
