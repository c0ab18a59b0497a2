"""Descriptions of exchanges between nodes, and the options that make them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mntrain.options.command_line import parse
from mntrain.options.config import CommConfig, Config, TrainConfig
from mntrain.sync import DiLoCo, LocalSGD, SparseLoCo, SyncConfig
from mntrain.train.job import choose_sync


def description(*words):
    return parse(["--sync.mode", *words]).sync.description


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("every-step", SyncConfig().description),
        ("local-sgd --sync.every 20 --sync.warmup 100", LocalSGD(20, 100)),
        ("diloco --sync.every 50", DiLoCo(50, 0, 0.7, 0.9)),
        (
            "diloco --sync.every 5 --sync.outer-lr 1 --sync.outer-momentum 0",
            DiLoCo(5, 0, 1.0, 0.0),
        ),
        ("diloco --sync.every 5 --sync.max-staleness 2", DiLoCo(5, max_staleness=2)),
        ("sparseloco --sync.every 5 --sync.max-staleness 3", SparseLoCo(5, max_staleness=3)),
        (
            "sparseloco --sync.every 30 --sync.warmup 7 --sync.density 0.1 --sync.outer-lr 0.8",
            SparseLoCo(30, 7, 0.8, 0.1),
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
        ("local-sgd", "mode local-sgd: needs the steps between exchanges; give --sync.every"),
        ("sparseloco --sync.every 5 --sync.outer-lr nan", "outer-lr"),
        (
            "sparseloco --sync.every 5 --sync.density 2",
            "density: Input should be less than or equal",
        ),
        *(
            (
                f"{mode}{' --sync.every 5' * (mode != 'every-step')} --sync.{option}",
                f"{option}: has no effect in --sync.mode {mode}; give --sync.mode {modes}",
            )
            for mode, option, modes in [
                ("every-step", "every 5", "local-sgd, diloco or sparseloco, or leave"),
                ("local-sgd", "outer-lr 0.5", "diloco"),
                ("sparseloco", "outer-momentum 0.5", "diloco, or"),
                ("diloco", "density 0.1", "sparselo"),
                ("every-step", "max-staleness 2", "local-sgd, diloco or sparseloco, or leave it"),
            ]
        ),
    ],
)
def test_options_without_sense_or_effect_are_refused(words, error, capsys):
    with pytest.raises(SystemExit):
        description(*words.split())
    [line] = [line for line in capsys.readouterr().err.splitlines() if "--sync" in line]
    assert f"--sync.{error}" in line


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        (LocalSGD, {"every": 0}, "greater than or equal to 1"),
        (LocalSGD, {"every": 2.5}, "a valid integer"),
        (DiLoCo, {"warmup": -1}, "greater than or equal to 0"),
        (DiLoCo, {"max_staleness": -1}, "greater than or equal to 0"),
        (LocalSGD, {"weighted": 1}, "a valid boolean"),
        (DiLoCo, {"outer_momentum": 1.0}, "less than 1"),
    ],
)
def test_wrong_arguments_of_a_description_are_refused(kind, options, error):
    (name,) = options
    with pytest.raises(
        ValueError, match=f"for {kind.__name__}\n{name}\n  Input should be {error} "
    ):
        kind(**{"every": 5, **options})


def test_descriptions_need_no_torch_and_are_an_attribute_of_the_package():
    code = "import sys, mntrain; mntrain.sync.DiLoCo(every=50); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("batch_size", "nodes", "fits"),
    [
        (2, ((0, 1), (2, 3)), True),  # samples of ranks 1 and 3
        (2, ((0, 2), (1, 3)), False),
        (1, ((0, 1), (2, 3)), False),
        (3, ((0, 2), (1, 3)), True),
    ],
)
def test_each_node_needs_a_sample_of_a_batch(batch_size, nodes, fits):
    world = SimpleNamespace(size=4, topology=SimpleNamespace(nodes=nodes))
    config = Config(
        train=TrainConfig(batch_size=batch_size), sync=SyncConfig(mode="local-sgd", every=5)
    )
    if fits:
        assert choose_sync(world, config) == LocalSGD(5)
    else:
        with pytest.raises(ValueError, match="each of the 2 nodes needs a sample in each step"):
            choose_sync(world, config)


def test_compressed_gradients_and_rare_exchanges_are_two_ways():
    world = SimpleNamespace(size=2, topology=SimpleNamespace(nodes=((0,), (1,))))
    config = Config(comm=CommConfig(compress="int8"), sync=SyncConfig(mode="diloco", every=5))
    with pytest.raises(ValueError, match=r"--comm\.compress int8 .* --sync\.mode diloco exchanges"):
        choose_sync(world, config)
