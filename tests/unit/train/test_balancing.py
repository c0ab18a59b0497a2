"""A rank's own time, on a GPU whose events are stood in for."""

from types import SimpleNamespace

import pytest
import torch

from mntrain.train import own_time
from mntrain.train.balancing import Balancing

PHASES = {"data": 0.5, "forward": 0.1, "backward": 0.2, "reduce_wait": 0.0}


class Event:
    """An event of a device whose clock a test sets, in seconds."""

    now = 0.0

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def make(device, samples=4):
    """Balancing of two ranks, the call that follows backward, and the paces it has sent."""
    calls, sent = [], []
    world = SimpleNamespace(
        size=2,
        device=torch.device(device),
        collectives=SimpleNamespace(waited_s=0.0),
        gather=lambda own: sent.append(own) or [own, own],
    )
    optimizer = SimpleNamespace(call_after_backward=calls.append)
    data = SimpleNamespace(
        shares=None, cadence=None, own_samples=lambda step: samples, unbalanced=None
    )
    return Balancing(world, optimizer, data, None, range(1, 101)), calls[0], sent


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let the clock of the host be that of the device."""
    monkeypatch.setattr(own_time, "time", SimpleNamespace(perf_counter=lambda: Event.now))


def test_a_step_on_a_gpu_takes_the_devices_time_until_backward_ends(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    balancing, after_backward, sent = make("cuda")
    timer = SimpleNamespace(times=lambda: PHASES)
    for step in range(1, 11):
        with balancing.computing(step, timer):
            Event.now += 100.0 if step == 1 else 2.0  # the first step compiles
            after_backward()
            Event.now += 7.0  # waiting for other ranks
        balancing.after_reduction(step)
    [(pace, phases)] = sent
    assert pace.samples == 9 * 4
    assert pace.waits == pytest.approx([7.0] * 9)
    assert pace.seconds == pytest.approx(9 * 2.5)
    assert phases == pytest.approx({"data": 4.5, "forward and backward": 18.0})
    assert balancing.by_rank()[0] == {"samples": 40, "own_s": pytest.approx(10 * 0.5 + 118.0)}


def test_a_step_on_a_cpu_takes_the_phases_without_waits():
    balancing, _, sent = make("cpu")
    timer = SimpleNamespace(times=lambda: PHASES)
    for step in range(1, 11):
        with balancing.computing(step, timer):
            balancing._world.collectives.waited_s += 0.04  # for parameters, in forward
        Event.now += 0.3 + 0.5  # forward, backward and the rest of the step
        balancing.after_reduction(step)
        Event.now += 5.0  # an evaluation
    [(pace, phases)] = sent
    assert pace.waits == pytest.approx([0.54] * 9)
    assert pace.seconds == pytest.approx(9 * 0.76)
    assert phases == pytest.approx({"data": 4.5, "forward": 0.54, "backward": 1.8})
