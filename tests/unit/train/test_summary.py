"""The description of a job at its start, its counters, and what its summary adds up."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from reports import used

from mntrain.rank_info import Usage, device_memory
from mntrain.run.job_resources import memory_by_role
from mntrain.train.description import transport_lines
from mntrain.train.ending import JobResult, peak_flops
from zero.memory import Memory


def test_a_result_counts_items_and_its_rate_leaves_out_single_slow_steps():
    result = JobResult(flops_per_item=None, skipped_steps=2)
    assert result.items_per_s == 0.0
    result.add(100, 50.0, skipped=True)
    assert result.items_per_s == 2.0
    for seconds in (20.0, 1.0, 1.0, 1.0):
        result.add(100, seconds, skipped=False)
    assert result.items_per_s == 100.0
    assert (result.items, result.skipped_steps) == (500, 3)


@pytest.mark.parametrize("transport", ["host", "nccl"])
def test_kernels_of_the_gpu_are_named_where_sums_are_made_there(transport):
    kernels = SimpleNamespace(why="CuPy's kernel for sums")
    facts = {"transport": transport, "transport_line": f"{transport}; why", "kernels": kernels}
    lines = transport_lines(SimpleNamespace(device=torch.device("cuda", 0), **facts))
    expected = [f"transport: {transport}; why", "kernels: CuPy's kernel for sums"]
    assert lines == expected[: 1 if transport == "host" else 2]


def test_every_role_has_its_own_peak_and_of_equal_ranks_the_first_is_named():
    measured = [Memory(1, 2, 3, 4, 5), Memory(5, 4, 3, 2, 1)]
    first = used(7, 1, device_memory=2, reserved_memory=8, peak_reserved_memory=8)
    second = used(6, 2, device_memory=1, reserved_memory=4, peak_reserved_memory=9, pinned_memory=1)
    report = memory_by_role(measured, [first, second])
    peaks = {role: (sizes["peak_rank"], sizes["most"]) for role, sizes in report.items()}
    of_optimizer = {
        "parameters": (1, 5),
        "gradients": (1, 4),
        "buckets": (0, 3),
        "master": (0, 4),
        "state": (0, 5),
        "hook": (0, 0),
        "exchange": (0, 0),
        "total": (0, 15),
    }
    assert peaks == of_optimizer | {
        "communication": (0, 0),
        "process_peak": (0, 7),
        "device_peak": (1, 2),
        "device_now": (0, 2),
        "reserved_peak": (1, 9),
        "reserved_now": (0, 8),
        "pinned": (1, 1),
    }
    memory = device_memory(torch.device("cpu"))
    assert set(memory.values()) == {0}
    assert set(memory) < {field.name for field in fields(Usage)}


@pytest.mark.parametrize(
    ("model", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),  # a seventh of one
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),  # another chip
        ("", "fp32", None),
    ],
)
def test_a_gpu_has_the_peak_of_its_data_sheet_and_a_shared_one_counts_once(model, dtype, tera):
    one = peak_flops([("a", model)], dtype)
    assert one == (tera and pytest.approx(tera * 1e12))
    assert peak_flops([("a", model), ("a", model)], dtype) == one
    assert peak_flops([("a", model), ("b", model)], dtype) == (tera and 2 * one)
    assert peak_flops([("a", model), ("", "")], dtype) is None
