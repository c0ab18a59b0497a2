"""Communication hooks: what they are called with, chains of collectives, and saved state."""

from types import SimpleNamespace

import pytest
import torch
from first_of_two import STAGES, FirstOfTwo, zero
from torch import nn

from zero import SingleProcessCollectives
from zero.comm_hooks import ChainedWork, CommHook, make_hook, wait_all


def layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def optimizer_of(model, hook, world=FirstOfTwo, **options):
    """An optimizer with a bucket for each layer."""
    options = {"lr": 0.5, "bucket_bytes": 80, "partition": "parameter", **options}
    return zero(model, world=world, comm_hook=hook, **options)


def step(model, optimizer):
    model(torch.ones(2, 4)).square().mean().backward()
    result = optimizer.step()
    optimizer.zero_grad()
    return result


class LoggingHook(CommHook):
    """Reduces as usual, and keeps the buckets."""

    def __init__(self):
        self.buckets = []

    def __call__(self, bucket):
        self.buckets.append(bucket)
        return super().__call__(bucket)


class TwoSteps(CommHook):
    """Two collectives for every bucket, the second of twice what the first has left."""

    def __init__(self):
        self.log = []

    def __call__(self, bucket):
        return ChainedWork(self._steps(bucket))

    def _steps(self, bucket):
        self.log.append(("first", bucket.index))
        yield bucket.collectives.all_reduce(bucket.gradients)
        bucket.gradients.mul_(2)
        self.log.append(("second", bucket.index))
        yield super().__call__(bucket)
        bucket.gradients.div_(2)


@pytest.mark.parametrize("other", ["bf16", CommHook])
def test_what_is_no_hook_is_refused(other):
    with pytest.raises(ValueError, match=f"comm_hook is {other!r}: give an object of a subclass"):
        optimizer_of(layers(), other)
    with pytest.raises(ValueError, match="give one of the two"):
        make_hook(CommHook(), torch.float16)


@STAGES
def test_a_hook_gets_every_bucket_in_order_but_not_on_one_rank(stage):
    hook = LoggingHook()
    model = layers()
    optimizer = optimizer_of(model, hook, stage=stage)
    for _ in range(2):
        step(model, optimizer)
    assert [bucket.index for bucket in hook.buckets] == [0, 1, 2] * 2
    for bucket in hook.buckets:
        assert len(bucket.gradients) == bucket.layout.numel == 20
        assert bucket.sharded == (stage > 0)
        assert len(bucket.shard) == (bucket.layout.bounds[1] if stage else 20)
    hook.buckets.clear()
    step(layers(), optimizer_of(model, hook, SingleProcessCollectives, stage=stage))
    assert not hook.buckets


def test_a_chain_starts_its_second_collective_when_the_next_bucket_is_launched():
    hook = TwoSteps()
    model = layers()
    step(model, optimizer_of(model, hook))
    first, second = ([(turn, index) for index in range(3)] for turn in ("first", "second"))
    assert hook.log == [first[0], first[1], second[0], first[2], second[1], second[2]]


def test_at_stage_2_a_chain_ends_before_another_bucket_needs_its_memory():
    hook = TwoSteps()
    model = layers()
    optimizer = optimizer_of(model, hook, stage=2)
    buckets = optimizer.memory().buckets
    step(model, optimizer)
    assert [index for turn, index in hook.log if turn == "first"] == [0, 1, 2]
    assert hook.log.index(("second", 0)) < hook.log.index(("first", 2))
    assert optimizer.memory().buckets == buckets


def test_a_finished_chain_may_be_waited_for_again():
    log = []

    def steps():
        yield SimpleNamespace(wait=lambda: log.append("waited"))
        log.append("decoded")

    work = ChainedWork(steps())
    assert log == []
    wait_all([work])
    work.wait()
    assert log == ["waited", "decoded"]
