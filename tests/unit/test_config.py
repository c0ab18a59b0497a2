"""Refusals of the options on construction."""

import math

import pytest

from mntrain import compression
from mntrain.config import (
    CommConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
)
from zero.comm_hooks.between_nodes import BetweenNodesHook


@pytest.mark.parametrize(
    ("section", "name", "bad"),
    [
        *((OptimConfig, "lr", bad) for bad in (math.nan, -math.inf, 10**400, "1", None, True, 0)),
        *((ZeroConfig, "stage", bad) for bad in (3, "2", True)),
        (DataConfig, "valid_fraction", -0.1),
        (DataConfig, "worker_start", "thread"),
        (ModelConfig, "layers", 0),
        (OptimConfig, "min_lr_fraction", 1.1),
        (TrainConfig, "compile", "no"),
        (TrainConfig, "batchsize", 1),
        (CommConfig, "algorithm", "no such"),
        (ZeroConfig, "shard_by", "disk"),
        (RunConfig, "dir", 3),
        (RunConfig, "seed", 2**32),
        (Config, "task", ""),
        (Config, "device", "tpu"),
        (Config, "train", {"steps": 5}),
    ],
)
def test_bad_value_is_refused_on_construction(section, name, bad):
    with pytest.raises(ValueError, match=f"for {section.__name__}\n{name}\n"):
        section(**{name: bad})


def test_a_file_in_the_package_is_a_compression(monkeypatch, tmp_path):
    assert "int8" in compression.names()
    for name in compression.names():
        assert CommConfig(compress=name).compress == name
        assert isinstance(compression.select_hook(name, None), BetweenNodesHook)
    (tmp_path / "zz5.py").write_text("make = lambda: 'a hook'")
    monkeypatch.setattr(compression, "__path__", [str(tmp_path), *compression.__path__])
    assert {*compression.names.__wrapped__()} == {*compression.names(), "zz5"}
    assert compression.select_hook("zz5", None) == "a hook"
    with pytest.raises(ValueError, match="compress zz5 and a comm_hook both say"):
        compression.select_hook("zz5", BetweenNodesHook())
