"""The bandwidth that is measured over links of high latency, where TCP's window opens slowly."""

from types import SimpleNamespace

import numpy as np
import pytest

from mntrain.comm import links
from mntrain.comm.links import LinkSpeed, best_of, measure

SEGMENT = 1460


class SlowStart:
    """The communicator of rank 0 of two, whose peer answers, and a clock that bytes move on.

    A direction's window starts at 10 segments and grows by what was acknowledged, once in a round
    trip, as in TCP's slow start (RFC 5681, RFC 6928).
    """

    rank = 0

    def __init__(self, trip_s, bytes_per_s):
        self.now, self.trip_s, self.bytes_per_s = 0.0, trip_s, bytes_per_s
        self.windows = {"there": 10 * SEGMENT, "back": 10 * SEGMENT}
        self.order = None

    def gather(self, value):
        return [value, []]

    def transfer(self, way, nbytes):
        """Let the time of a message pass."""
        while nbytes > 0:
            window = self.windows[way]
            if window >= self.bytes_per_s * self.trip_s:
                self.now += nbytes / self.bytes_per_s
                break
            sent = min(nbytes, window)
            nbytes -= sent
            self.windows[way] += sent
            self.now += self.trip_s if nbytes else sent / self.bytes_per_s
        self.now += self.trip_s / 2

    def send(self, peer, data, counted):
        if self.order is None:  # the numbers of bytes there and back
            self.order = data.view(np.int64).tolist()
        else:
            self.transfer("there", len(data))
        return SimpleNamespace(wait=lambda: None)

    def receive(self, peer, data):
        there, _ = self.order
        self.now += self.trip_s / 2 if there <= 0 else 0
        data[:] = 0
        self.transfer("back", len(data))
        self.order = None
        return SimpleNamespace(wait=lambda: None)


# One connection of TCP holds some MB in flight, so a longer way is not 10 Gbit/s fast.
@pytest.mark.parametrize(
    ("trip_s", "gbit"),
    [(trip, gbit) for trip in (1e-4, 2e-3, 25e-3) for gbit in (0.1, 1, 10)] + [(0.1, 0.1)],
)
def test_the_rate_of_a_link_does_not_depend_on_its_latency(monkeypatch, trip_s, gbit):
    comm = SlowStart(trip_s, gbit * 125e6)
    monkeypatch.setattr(links.clock, "now", lambda: comm.now)
    (link,) = measure(comm, [0, 1], 2.0, most_bytes=32 << 20)
    assert link.latency_us == pytest.approx(1e6 * trip_s / 2, rel=0.01, abs=1)
    assert link.mb_per_s_there == pytest.approx(gbit * 125, rel=0.3)
    assert link.mb_per_s_back == pytest.approx(gbit * 125, rel=0.3)
    # As before on near ones; about 20 round trips more in each direction, and for the latency 2 s.
    assert comm.now < 2.5 + 60 * trip_s + 3 * (32 << 20) / comm.bytes_per_s


def test_of_two_measurements_the_better_counts_in_each_direction():
    first = LinkSpeed(0, 1, 90.0, 100.0, 20.0, 600, 9)
    again = LinkSpeed(0, 1, 50.0, 30.0, 110.0, 500, 1)
    assert best_of([first], [again]) == [LinkSpeed(0, 1, 50.0, 100.0, 110.0, 500, 1)]
