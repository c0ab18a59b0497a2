"""A rank's own time in a job, by a clock that tests set."""

from types import SimpleNamespace

import pytest
import torch

from mntrain.balance import own_pace
from mntrain.train.balancing import Balancing

PHASES = {"data": 0.5, "forward": 0.1, "backward": 0.2, "reduce_wait": 0.0}


class Clock:
    """The time of all, in seconds, and what of it this rank has waited."""

    now = waited = 0.0

    def mark(self):
        return self.now - self.waited

    def own_s(self, start, end):
        return end - start

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize(
    ("device", "phases"),
    [
        ("cpu", {"data": 4.5, "forward": 9 * 1.3, "backward": 1.8}),
        ("cuda", {"data": 4.5, "forward and backward": 9 * 1.5}),
    ],
)
def test_own_time_is_that_of_a_step_without_waits(monkeypatch, device, phases):
    clock, sent = Clock(), []
    monkeypatch.setattr(own_pace, "time", clock)
    world = SimpleNamespace(
        size=2,
        device=torch.device(device),
        waits=clock,
        gather=lambda own: sent.append(own) or [own, own],
    )
    data = SimpleNamespace(shares=None, cadence=None, own_samples=lambda step: 4)
    balancing = Balancing(world, data, None, range(1, 101))
    timer = SimpleNamespace(times=lambda: PHASES)
    for step in range(1, 11):
        with balancing.computing(step, timer):
            clock.now += 100.0 if step == 1 else 2.0  # the first step compiles
            clock.now += 7.0  # waiting for other ranks
            clock.waited += 7.0
        clock.now += 0.5  # the rest of the step
        balancing.after_reduction(step)
        clock.now += 5.0  # an evaluation
    [pace] = sent
    assert (pace.samples, pace.seconds) == (9 * 4, pytest.approx(9 * 2.0))
    assert pace.waits == pytest.approx([7.5] * 9)
    assert pace.phases == pytest.approx(phases)
    assert balancing.by_rank()[0] == {"samples": 40, "own_s": pytest.approx(118.0)}
