"""A batch on its way to the device."""

from collections import namedtuple

import torch

from mntrain.device import move

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


def test_a_batch_keeps_its_structure_and_its_values():
    batch = {"pair": Pair(torch.arange(3), [torch.ones(2)]), "name": "b", "more": (1, None)}
    moved = move(batch, CPU)
    assert moved["pair"].x.tolist() == [0, 1, 2]
    assert moved["pair"].y[0].dtype == torch.float32
    assert (moved["name"], moved["more"]) == ("b", (1, None))


def test_floats_are_cast_and_nothing_else():
    moved = move([torch.ones(2), torch.tensor([7]), torch.tensor([True])], CPU, torch.bfloat16)
    assert [tensor.dtype for tensor in moved] == [torch.bfloat16, torch.int64, torch.bool]


def test_what_can_move_itself_does():
    class Graph:
        def to(self, device, non_blocking):
            return "moved", device, non_blocking

    assert move(Graph(), CPU, torch.bfloat16) == ("moved", CPU, True)
