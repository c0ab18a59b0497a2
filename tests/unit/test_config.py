"""The options themselves: what they refuse on construction."""

import dataclasses
import math

import pytest

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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1", None, True])
def test_number_is_finite_and_no_other_type(value):
    with pytest.raises(ValueError, match=r"\nlr\n.* should be a (valid|finite) number"):
        OptimConfig(lr=value)


@pytest.mark.parametrize(
    ("section", "name", "bad"),
    [
        (DataConfig, "valid_fraction", -0.1),
        (DataConfig, "worker_start", "thread"),
        (ModelConfig, "layers", 0),
        (OptimConfig, "lr", 0),
        (OptimConfig, "max_grad_norm", -1.0),
        (OptimConfig, "min_lr_fraction", 1.1),
        (TrainConfig, "precision", "fp8"),
        (TrainConfig, "compile", "no"),
        (CommConfig, "algorithm", "no such"),
        (CommConfig, "bucket_mb", 0.0),
        (ZeroConfig, "stage", 3),
        (ZeroConfig, "stage", "2"),
        (ZeroConfig, "stage", True),
        (ZeroConfig, "shard_by", "disk"),
        (RunConfig, "dir", 3),
        (RunConfig, "seed", 2**32),
        (Config, "task", ""),
        (Config, "device", "tpu"),
    ],
)
def test_bad_value_is_refused_on_construction(section, name, bad):
    with pytest.raises(ValueError, match=f"for {section.__name__}\n{name}\n"):
        section(**{name: bad})


def test_shards_by_memory_need_a_stage_with_shards():
    with pytest.raises(ValueError, match=r"no effect at --zero.stage 0; give --zero.stage 1 or 2"):
        ZeroConfig(shard_by="memory")


def test_section_of_another_type_is_refused():
    with pytest.raises(ValueError, match="train"):
        Config(train={"steps": 5})


def test_unknown_option_is_refused_on_construction():
    with pytest.raises(ValueError, match="batchsize"):
        TrainConfig(batchsize=1)


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.steps = 5
