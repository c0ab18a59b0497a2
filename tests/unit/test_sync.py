"""Descriptions of exchanges between nodes, and the options that make them."""

import re
import subprocess
import sys

import pytest

from mntrain.cli import parse
from mntrain.sync import DiLoCo, LocalSGD, SyncConfig


def description(*words):
    return parse(["--sync.mode", *words]).sync.description


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("every-step", None),
        ("local-sgd --sync.every 20 --sync.warmup 100", LocalSGD(20, 100)),
        ("diloco --sync.every 50", DiLoCo(50, 0, 0.7, 0.9)),
        (
            "diloco --sync.every 5 --sync.outer-lr 1 --sync.outer-momentum 0",
            DiLoCo(5, 0, 1.0, 0.0),
        ),
    ],
)
def test_options_describe_the_exchange(words, expected):
    made = description(*words.split())
    assert type(made) is type(expected)
    assert made == expected


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("local-sgd", "--sync.mode local-sgd: needs the steps between exchanges; give --sync.ev"),
        ("diloco --sync.every 0", "--sync.every: Input should be greater than or equal to 1"),
        (
            "every-step --sync.every 5",
            "--sync.every 5: has no effect in --sync.mode every-step; give --sync.mode local-sgd or"
            " diloco",
        ),
        ("every-step --sync.warmup 5", "--sync.warmup 5: has no effect in --sync.mode every-step"),
        (
            "local-sgd --sync.every 5 --sync.outer-lr 0.5",
            "--sync.outer-lr 0.5: has no effect in --sync.mode local-sgd; give --sync.mode diloco",
        ),
        (
            "local-sgd --sync.every 5 --sync.outer-momentum 0",
            "--sync.outer-momentum 0.0: has no effect in --sync.mode local-sgd",
        ),
        ("diloco --sync.every 5 --sync.outer-momentum 1", "--sync.outer-momentum: Input should be"),
    ],
)
def test_options_without_effect_or_sense_are_refused(words, error, capsys):
    with pytest.raises(SystemExit):
        description(*words.split())
    lines = [line for line in capsys.readouterr().err.splitlines() if "--sync" in line]
    assert len(lines) == 1
    assert error in lines[0]


def test_by_default_every_step_is_synchronous():
    assert SyncConfig().description is None


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: LocalSGD(0), "every is 0: give a number of steps, at least 1"),
        (lambda: LocalSGD(2.5), "every is 2.5: give a number of steps"),
        (lambda: DiLoCo(5, -1), "warmup is -1: give a number of steps, at least 0"),
        (lambda: DiLoCo(5, outer_lr=0), "outer_lr is 0: give a number above 0"),
        (lambda: DiLoCo(5, outer_momentum=1.0), "outer_momentum is 1.0: give a number from 0"),
    ],
)
def test_wrong_arguments_of_a_description_are_refused(make, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        make()


def test_descriptions_need_no_torch_and_are_an_attribute_of_the_package():
    code = "import sys, mntrain; mntrain.sync.DiLoCo(every=50); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
