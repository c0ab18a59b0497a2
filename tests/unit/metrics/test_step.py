"""What a step took and what ranks used, in numbers."""

from dataclasses import fields

import torch
from reports import used

from mntrain.metrics.step import memory_by_role
from mntrain.rank_info import Usage, device_memory
from zero.memory import Memory


def test_memory_has_least_median_and_most_over_ranks_and_what_the_peak_was_expected_to_be():
    measured = [Memory(10, 20, 0, 0, state) for state in (300, 500, 401, 100)]
    expected = [Memory(10, 20, 0, 0, state) for state in (1, 2, 3, 4)]
    report = memory_by_role(measured, expected, [used(1)] * 4)
    state = {"expected": 2, "least": 100, "median": 350, "most": 500, "peak_rank": 1}
    assert report["state"] == state
    assert report["total"] == {key: n + (key != "peak_rank") * 30 for key, n in state.items()}
    assert report["buckets"] == dict.fromkeys(state, 0)


def test_every_role_has_its_own_peak():
    measured = [Memory(1, 2, 3, 4, 5), Memory(5, 4, 3, 2, 1)]
    first = used(7, 1, device_memory=2, reserved_memory=8, peak_reserved_memory=8)
    second = used(6, 2, device_memory=1, reserved_memory=4, peak_reserved_memory=9, pinned_memory=1)
    report = memory_by_role(measured, measured[::-1], [first, second])
    peaks = {role: (sizes["peak_rank"], sizes["most"]) for role, sizes in report.items()}
    assert peaks == {
        "parameters": (1, 5),
        "gradients": (1, 4),
        "buckets": (0, 3),
        "master": (0, 4),
        "state": (0, 5),
        "total": (0, 15),
        "process_peak": (0, 7),
        "device_peak": (1, 2),
        "device_now": (0, 2),
        "reserved_peak": (1, 9),
        "reserved_now": (0, 8),
        "pinned": (1, 1),
    }


def test_of_equal_ranks_the_first_is_named():
    report = memory_by_role([Memory(1, 1, 1, 1, 1)] * 3, [Memory(2, 2, 2, 2, 2)] * 3, [used(9)] * 3)
    assert {sizes["peak_rank"] for sizes in report.values()} == {0}


def test_what_a_process_needs_is_not_predicted():
    report = memory_by_role([Memory(1, 1, 1, 1, 1)], [Memory(1, 1, 1, 1, 1)], [used(9)])
    assert {role for role, sizes in report.items() if "expected" not in sizes} == {
        "process_peak",
        "device_peak",
        "device_now",
        "reserved_peak",
        "reserved_now",
        "pinned",
    }


def test_on_the_cpu_there_is_no_memory_of_a_gpu():
    assert set(device_memory(torch.device("cpu")).values()) == {0}
    assert set(device_memory(torch.device("cpu"))) < {field.name for field in fields(Usage)}
