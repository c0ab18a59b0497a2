"""The ways of messages between ranks of several hosts, over real connections."""

import contextlib
import socket
import threading

import pytest
from waiting import until

from mntrain.watchdog.relays import MONITORS, RelayedChannel, Routes
from mntrain.watchdog.side_channel import SideChannel

SECRET = b"s" * 32
LAYOUTS = [
    [0, 0, 0, 0],
    [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8],
    [0, 1, 0, 1, 0, 1, 0, 1],
    [0, 1, 2, 3],
    [0, 1, 1, 1, 1, 5],
    [0, 0, 0, 3, 4, 4],
    [0],
    [0, 1],
]


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_two_ranks_of_a_host_are_connected_to_monitors_and_each_rank_to_both(hosts):
    routes, ranks = Routes(hosts), range(len(hosts))
    for rank in ranks:
        host = [other for other in ranks if hosts[other] == hosts[rank]]
        assert routes.relays(rank) == host[:2]
        assert all(other < rank or rank in host[:2] for other in routes.above(rank))
        assert {other for other in ranks if rank in routes.above(other)} == routes.below(rank)
        others = set(host[:2]) - {rank}
        assert others <= {*routes.above(rank), *routes.below(rank)}
        if rank > 1 and rank not in host[:2]:
            assert set(routes.above(rank)) == set(host[:2])
    elsewhere = {rank for rank in routes.below(0) if hosts[rank] != hosts[0]}
    firsts = {routes.relays(rank)[0] for rank in ranks} - {0}
    # Where rank 1 is the first of its host, the second does what it cannot do for itself.
    assert firsts <= elsewhere | {1}
    assert elsewhere - firsts <= {1, *(routes.relays(1)[1:] if 1 in firsts else ())}


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
@pytest.mark.parametrize("lost", [None, *range(12)])
def test_a_message_reaches_each_rank_while_one_other_passes_nothing_on(hosts, lost):
    routes, ranks = Routes(hosts), range(len(hosts))
    neighbours = {rank: {*routes.above(rank), *routes.below(rank)} for rank in ranks}
    for monitor in set(MONITORS) & {*ranks} - {lost}:
        for rank in {*ranks} - {monitor, lost}:
            for source, target in ((monitor, rank), (rank, monitor)):
                reached, new = {source}, [source]
                while new:
                    at = new.pop()
                    near = neighbours[at]
                    ways = {target} if target in near else routes.ways(at, target) & near
                    assert at not in ways
                    new += ways - reached - {lost}
                    reached |= ways - {lost}
                assert target in reached


class ChannelsOfRanks:
    """The channels of ranks on hosts, which all poll in a thread of their own."""

    def __init__(self, hosts):
        routes = Routes(hosts)
        listeners = {
            rank: socket.create_server(("127.0.0.1", 0))
            for rank in range(len(hosts))
            if routes.below(rank)
        }
        addresses = {rank: own.getsockname() for rank, own in listeners.items()}
        self.direct = [SideChannel(rank, SECRET, listeners.get(rank)) for rank in range(len(hosts))]
        self.ranks = [RelayedChannel(one, rank, routes) for rank, one in enumerate(self.direct)]
        self.heard = {rank: [] for rank in range(len(hosts))}
        self.stopped, self.closed = set(), set()
        self.orders = {rank: [] for rank in range(len(hosts))}
        self.ended = False
        self.threads = [
            threading.Thread(target=self.watch, args=(rank, addresses))
            for rank in range(len(hosts))
        ]
        for thread in self.threads:
            thread.start()

    def watch(self, rank, addresses):
        """Connect, and poll; do what is ordered."""
        channel = self.ranks[rank]
        while not self.ended and rank not in self.closed:
            for missing in channel.missing(directly=False):
                with contextlib.suppress(OSError):
                    channel.connect(missing, addresses[missing])
            if rank not in self.stopped:
                self.heard[rank] += channel.poll(0.02)
                while self.orders[rank]:
                    self.orders[rank].pop(0)()
        if rank not in self.closed:
            channel.close()

    def close(self):
        """End all."""
        self.ended = True
        for thread in self.threads:
            thread.join()

    def send(self, source, target, text):
        """Let a rank send."""
        self.orders[source].append(lambda: self.ranks[source].send(target, {"kind": text}))

    def end(self, rank, *, word):
        """Let a rank end, with or without a word."""

        def act():
            self.closed.add(rank)
            (self.ranks[rank] if word else self.direct[rank]).close()

        self.orders[rank].append(act)

    def texts(self, rank, source):
        """Return what a rank has heard of another one."""
        return [m["kind"] for peer, m in self.heard[rank] if peer == source]

    def connected(self):
        """Return whether all ranks reach whom they should."""
        everyone = {*range(len(self.ranks))}
        return all(
            {*one.peers} == (everyone if rank in MONITORS else {*MONITORS}) - {rank}
            for rank, one in enumerate(self.ranks)
        )


@pytest.fixture
def job():
    made = ChannelsOfRanks([0, 0, 2, 2, 2, 5])
    until(made.connected)
    yield made
    made.close()


def test_messages_arrive_once_in_order_at_one_rank_in_either_direction(job):
    for number in range(20):
        job.send(4, 0, f"{number}")
        job.send(1, 4, f"{number}")
    expected = [f"{number}" for number in range(20)]
    until(lambda: job.texts(0, 4) == expected and job.texts(4, 1) == expected)
    assert job.texts(1, 4) == job.texts(2, 1) == job.texts(3, 4) == []
    assert job.direct[0].peers == [1, 2, 5]
    assert job.direct[1].peers == [0, 3, 5]
    assert job.direct[4].peers == [2, 3]


@pytest.mark.parametrize("stopped", [2, 3])
def test_messages_arrive_while_one_that_passes_them_on_is_stopped(job, stopped):
    job.stopped.add(stopped)
    job.send(4, 0, "up")
    job.send(0, 4, "down")
    job.send(1, 4, "down too")
    until(lambda: job.texts(0, 4) == ["up"])
    until(lambda: job.texts(4, 0) == ["down"] and job.texts(4, 1) == ["down too"])
    assert job.ranks[0].relays(4) == {2, 3}
    assert job.ranks[0].relays(3) == {1, 2}
    assert job.ranks[0].relays(2) == set()
    job.stopped.clear()
    job.send(4, 0, "after")
    until(lambda: job.texts(0, 4) == ["up", "after"])


@pytest.mark.parametrize("stopped", [None, 2, 3])
def test_monitors_are_told_once_of_the_end_of_each_rank(job, stopped):
    job.stopped.add(stopped)
    job.end(4, word=False)
    until(lambda: job.texts(0, 4) == job.texts(1, 4) == ["disconnected"])
    assert (4, {"kind": "disconnected", "error": None}) in job.heard[0]
    until(lambda: 4 not in job.ranks[0].peers + job.ranks[1].peers)


def test_a_rank_has_lost_the_monitors_once_no_way_leads_to_them(job):
    job.end(0, word=False)
    until(lambda: job.ranks[4].peers == job.ranks[2].peers == [1])
    job.end(1, word=False)
    until(lambda: job.ranks[4].peers == job.ranks[2].peers == [])
    for rank in (2, 3, 4, 5):
        until(lambda rank=rank: {0, 1} <= {peer for peer, _ in job.heard[rank]})
        assert job.texts(rank, 0) == job.texts(rank, 1) == ["disconnected"]


def test_who_passes_messages_on_and_leaves_on_purpose_ends_nobody(job):
    for rank in (2, 3):
        job.end(rank, word=True)
    until(lambda: job.ranks[4].peers == [])
    assert job.heard[4] == []
    until(lambda: job.texts(0, 2) == job.texts(1, 3) == ["disconnected"])
    until(lambda: 4 not in job.ranks[0].peers)
    assert job.texts(0, 4) == []
