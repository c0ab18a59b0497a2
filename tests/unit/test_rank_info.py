"""Facts about a rank's memory."""

import math

import pytest
import torch

from mntrain.rank_info import memory_room


@pytest.mark.parametrize(
    ("reserved", "peak", "ranks", "fraction", "room"),
    [
        (20, 10, 1, 1.0, 0.9 * 80 / 20),  # what is reserved may have been needed
        (20, 30, 1, 1.0, 0.9 * 80 / 30),
        (20, 20, 3, 1.0, 0.9 * 40 / 20),  # three ranks share the GPU
        (20, 20, 1, 0.5, 0.9 * 50 / 20),  # of 100 bytes
        (20, 20, 1, None, 0.9 * 80 / 20),
        (0, 0, 1, 1.0, math.inf),
    ],
)
def test_the_room_of_a_gpu(monkeypatch, reserved, peak, ranks, *, fraction, room):
    values = {"mem_get_info": (60, 100), "memory_reserved": reserved, "max_memory_allocated": peak}
    values["get_per_process_memory_fraction"] = fraction
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    if fraction is None:  # an old version of torch
        monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert memory_room(torch.device("cuda"), ranks) == pytest.approx(room)
    assert memory_room(torch.device("cpu"), ranks) == math.inf
