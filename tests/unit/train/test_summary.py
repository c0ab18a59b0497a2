"""The description of a job at its start, and its counters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mntrain.config import Config, TrainConfig, ZeroConfig
from mntrain.train.summary import JobResult, describe_job


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_description_has_model_place_tuning_warnings_and_sharding(device):
    world = SimpleNamespace(
        topology="4 ranks on 2 nodes of 2",
        algorithm="lanes",
        library=SimpleNamespace(name="MPICH 5.0.2", threads="multiple"),
        collectives=SimpleNamespace(no_shared_memory_reason=""),
        gather=lambda value: [value] * 4,
        sharing="ranks share GPUs",
        tuning="lanes: 1.9x flat",
        transport_line="host: by any MPI" if device == "cuda" else "",
        kernels=SimpleNamespace(why="torch: CuPy is absent"),
        device=torch.device(device),
    )
    config = Config(train=TrainConfig(precision="bf16-pure"), zero=ZeroConfig(stage=2))
    of_gpu = [("transport: host: by any MPI", ""), ("kernels: torch: CuPy is absent", "")]
    assert describe_job(world, config, nn.Linear(99, 100)) == [
        ("lm: 0.01 M parameters", "bold"),
        ("4 ranks on 2 nodes of 2, lanes, MPICH 5.0.2 (thread level multiple)", ""),
        ("auto: lanes: 1.9x flat", ""),
        *(of_gpu if device == "cuda" else []),
        ("warning: ranks share GPUs", "yellow"),
        ("zero: stage 2, by element; precision bf16-pure", ""),
    ]


def test_rate_leaves_out_the_first_steps_and_single_slow_ones():
    result = JobResult(flops_per_item=None, skipped_steps=2)
    assert result.items_per_s == 0.0
    result.add(100, 50.0, skipped=True)
    assert result.items_per_s == 2.0
    for seconds in (20.0, 10.0, 1.0, 1.0, 30.0, 1.0):
        result.add(100, seconds, skipped=False)
    assert result.items_per_s == 100.0
    assert (result.items, result.skipped_steps) == (700, 3)
