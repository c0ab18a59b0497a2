"""The figures that benchmarks/slow_links.py derives from its measurements, and its commands."""

import shlex
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from mntrain.cli import parse

ROOT = Path(__file__).parents[3]
RARE, FP32, PEER = "streaming, every 20", "every step, fp32", "PostLocalSGD, every 20"
VARIANTS = {FP32: "mntrain stage 0", RARE: "mntrain stage 0, streaming every 20"}


@pytest.fixture
def bench(monkeypatch):
    """Return a module of benchmarks/ by name."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # restores what emulated.py adds
    return import_module


def run_of(*losses):
    return {"command": "train", "evaluations": [[100 * i, loss] for i, loss in enumerate(losses)]}


def job(ratio, sent=0.0):
    return {"step_s": [2 * ratio, 3 * ratio, 4 * ratio], "alone_s": [2, 3, 4], "sent_bytes": sent}


def page(**changes):
    """Return a page of two modes and a peer, of 1,000 steps."""
    timed = {VARIANTS[FP32]: job(5.0), VARIANTS[RARE]: job(1.25)}
    return {
        "steps": 1000,
        "runs": {
            FP32: {"0": run_of(5, 3.0, 2.0), "1": run_of(5, 3.0, 1.0), "2": run_of(5, 4.0, 3.0)},
            RARE: {"0": run_of(5, 3.5, 2.2), "1": run_of(5, 3.5, 1.1)},
            PEER: {"0": run_of(5, 3.5, 2.1)},
        },
        "bytes": {FP32: 1000.0, RARE: 4.0},
        "links": {"1gbit": timed | {"PostLocalSGD every 20": job(1.5, sent=25.0)}},
        **changes,
    }


def test_a_curve_is_the_mean_over_seeds_at_the_steps_that_all_have(bench):
    slow_page, value_at = bench("slow_page"), bench("figures").value_at
    runs = {"0": run_of(5, 3.0, 2.0, 1.0), "1": run_of(5, 4.0, 4.0)}
    assert slow_page.curve(runs) == [(100, 3.5), (200, 3.0)]  # not that of step 0
    for x, expected in [(0, 4), (5, 3), (15, 1.5), (20, 1), (21, None)]:
        assert value_at([(0, 4), (10, 2), (20, 1)], x) == expected
    cost = {FP32: 10.0, RARE: 1.0}  # steps of the warm-up, of 100, cost what synchronous ones do
    assert slow_page.spent(RARE, 60, cost) == 600
    assert slow_page.spent(RARE, 150, cost) == 1050
    assert slow_page.spent(FP32, 150, cost) == 1500


def test_losses_are_compared_on_the_same_seeds(bench):
    rows = bench("slow_page").loss_table(page())[2:]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    assert cells[0][:7] == [FP32, "3", "2.0000", "1.0000 - 3.0000", "", "1.0", "1.0"]
    # 1.65 beside 1.5 of seeds 0 and 1; 100 of 1,000 steps bound the factor with the warm-up by 10
    assert cells[1] == [RARE, "2", "1.6500", "1.1000 - 2.2000", "+10.0%", "0.0", "250", "9.7"]
    assert cells[2] == [PEER, "1", "2.1000", "2.1000 - 2.1000", "+5.0%", "0.1", "20", "6.9"]


def test_times_are_multiples_of_computing_alone(bench):
    slow_page = bench("slow_page")
    assert slow_page.step_seconds(page(), "1gbit", FP32) == pytest.approx(5 * 3)
    assert slow_page.step_seconds(page(links={"1gbit": {}}), "1gbit", FP32) is None
    rows = slow_page.time_table(page(), "1gbit", "slow-links")
    row = next(row for row in rows if row.startswith(f"| {RARE}"))
    minutes = (100 * 15 + 900 * 3.75) / 60
    assert f"| 1.250 | 1.25 - 1.25 | {minutes:.2f} |" in row


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
