"""Buffers of a model that follow those of rank 0."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from zero.replicas import persistent_buffers


def test_buffers_in_the_state_dict_are_found_as_they_are_when_asked_for():
    model = nn.Sequential(checkpoint_wrapper(nn.BatchNorm1d(4)), nn.Linear(4, 4))
    model.register_buffer("later", None)
    model.register_buffer("constant", torch.ones(2), persistent=False)
    model[1].register_buffer("tied", model[0].running_mean)
    held = persistent_buffers(model)
    assert len(held()) == 3  # mean, variance, and the count of batches
    model.later = torch.zeros(5)
    model.double()
    found = held()
    assert len(found) == 5  # that makes two of the tied one
    assert any(buffer is model.later for buffer in found)
    assert all(buffer.dtype in (torch.float64, torch.int64) for buffer in found)
