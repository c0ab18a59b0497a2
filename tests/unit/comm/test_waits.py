"""A rank's own time, by clocks that are stood in for."""

import gc
import weakref
from types import SimpleNamespace

import pytest
from sharding import Clock

from mntrain.comm import clock
from mntrain.comm.waits import OwnClock


class DeviceEvent:
    """A point in the work of a device that has done so much by then, in ms."""

    def __init__(self, at):
        self.at = at
        self.awaited = False

    def synchronize(self):
        self.awaited = True

    def elapsed_time(self, end):
        return end.at - self.at


class Device:
    """A copier, whose device has come to `now` ms; counts the events that it has recorded."""

    def __init__(self):
        self.now, self.recorded = 0.0, 0

    def record_time(self):
        self.recorded += 1
        return DeviceEvent(self.now)


@pytest.fixture
def engine():
    """An engine that counts no waits."""
    return SimpleNamespace(waited_s=0.0, gathered_s=0.0, device_waits=None)


@pytest.fixture
def host(monkeypatch):
    """The clock of the host, in seconds."""
    host = Clock()
    monkeypatch.setattr(clock, "now", host.perf_counter)
    return host


def test_own_time_of_a_host_is_that_outside_of_waits(host, engine):
    waits = OwnClock(engine)
    start = waits.mark()
    host.now += 11.0
    engine.waited_s, engine.gathered_s = 5.0, 3.0
    end = waits.mark()
    assert waits.own_s(start, end) == 3.0
    assert engine.device_waits is None


def test_own_time_of_a_device_is_that_outside_of_its_waits(host, engine):
    """The host has queued everything long before, and its own clock says nothing."""
    device = Device()
    waits = OwnClock(engine, device)
    with waits.waiting():
        device.now += 100.0
    assert engine.device_waits is None
    before = waits.mark()
    assert engine.device_waits == waits.waiting
    device.now += 50.0
    with waits.waiting():
        device.now += 100.0
    start = waits.mark()
    for _ in range(2):
        device.now += 10.0
        with waits.waiting():
            device.now += 30.0
            host.now += 5.0
    device.now += 2.0
    end = waits.mark()
    with waits.waiting():
        device.now += 100.0
    assert waits.own_s(start, end) == pytest.approx(0.022)
    assert waits.own_s(before, end) == pytest.approx(0.072)
    assert end.at.awaited


def test_a_wait_that_raises_and_one_inside_of_another_are_counted_once(engine):
    device = Device()
    waits = OwnClock(engine, device)
    start = waits.mark()

    def fail():
        with waits.waiting(), waits.waiting():
            device.now += 10.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    device.now += 4.0
    assert waits.own_s(start, waits.mark()) == pytest.approx(0.004)


def test_waits_before_all_marks_are_forgotten(engine):
    waits = OwnClock(engine, Device())
    mark = waits.mark()
    with waits.waiting():
        pass
    first = weakref.ref(mark.following[0].at)
    with waits.waiting():
        pass
    assert first() is not None
    mark = waits.mark()
    gc.collect()
    assert first() is None
