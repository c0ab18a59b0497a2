"""The connections between ranks: messages, strangers, and what the end of one means."""

import contextlib
import hmac
import json
import os
import resource
import select
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from mntrain.watchdog import side_channel, unanswered
from mntrain.watchdog.side_channel import SideChannel, address_towards, allow_files

SECRET = b"s" * 32


def listen():
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    return listener, listener.getsockname()


def ended(rank):
    return rank, {"kind": "disconnected", "error": None}


@pytest.fixture
def monitor():
    listener, address = listen()
    channel = SideChannel(0, SECRET, listener)
    yield channel, address
    channel.close()


def connected(monitor, rank=1, secret=SECRET):
    """A channel of another rank that has connected to the monitor."""
    channel, address = monitor
    other, errors = SideChannel(rank, secret, None), []

    def connect():
        try:
            other.connect(0, address)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    hear_nothing(channel, lambda: not thread.is_alive())
    if errors:
        other.close()
        raise errors[0]
    hear_nothing(channel, lambda: rank in channel.peers)
    return other


def received(channel, count=1):
    """The next messages of a channel."""
    found, end = [], time.monotonic() + 120
    while len(found) < count:
        assert time.monotonic() < end
        found += channel.poll(0.1)
    return found


def hear_nothing(channel, condition=None):
    """Let a channel poll, until a condition holds or for a while, in which no message comes."""
    turns = 0
    while not condition() if condition else turns < 5:
        assert not list(channel.poll(0.05))
        turns += 1


def assert_it_still_hears(monitor, *others):
    """Check that messages of these other ranks arrive, and close their channels."""
    for rank, other in others:
        other.send(0, {"kind": "still here"})
        assert received(monitor[0]) == [(rank, {"kind": "still here"})]
    for _, other in others:
        other.close()


def test_messages_arrive_whole_in_order_and_with_their_rank(monitor):
    other = connected(monitor)
    long = "x" * 300_000
    for text in ("one", long, "two"):
        other.send(0, {"kind": text})
    found = []
    while len(found) < 3:
        found += monitor[0].poll(0.05)
        list(other.poll(0))
    assert found == [(1, {"kind": "one"}), (1, {"kind": long}), (1, {"kind": "two"})]
    monitor[0].send(1, {"kind": "back"})
    assert received(other) == [(0, {"kind": "back"})]
    other.close()


@pytest.mark.parametrize("seconds", [0.001, 1, 60.0, 1e9, float("inf")])
def test_a_stopped_process_acknowledges_and_its_limit_is_the_connection_s(seconds):
    listener, address = listen()
    channel = SideChannel(0, SECRET, listener, lost_after=seconds)
    other = connected((channel, address))
    try:
        channel.send(1, {"kind": "ask"})  # which nobody reads
        end = time.monotonic() + 120
        while not channel.acknowledged(1) and seconds > 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert channel.acknowledged(7)  # of one without a connection, nothing else is known
        own = channel._connections[1].socket
        names = ("USER_TIMEOUT", "KEEPIDLE", "KEEPINTVL", "KEEPCNT")
        got = [own.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in names]
        assert got[0] == max(1, int(1000 * min(seconds, 1e6)))
        assert got[1:] == [5, 5, 11] if seconds == 60 else got[3] >= 1
    finally:
        other.close()
        channel.close()


def test_a_closed_connection_and_a_killed_process_are_told(monitor):
    other = connected(monitor)
    other.close()
    assert received(monitor[0]) == [ended(1)]
    child = os.fork()
    if child == 0:
        own = SideChannel(2, SECRET, None)
        own.connect(0, monitor[1])
        time.sleep(100)
    while 2 not in monitor[0].peers:
        list(monitor[0].poll(0.05))
    os.kill(child, signal.SIGSTOP)
    assert not list(monitor[0].poll(0.3))  # a stopped process is not lost
    os.kill(child, signal.SIGKILL)
    assert received(monitor[0]) == [ended(2)]
    os.waitpid(child, 0)


def test_a_rank_with_another_secret_is_not_let_in(monitor):
    with pytest.raises(OSError, match=r"closed|no monitor of this job"):
        connected(monitor, secret=b"t" * 32)
    assert monitor[0].peers == []


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        b'{"rank": 1, "proof": "00", "challenge": "11"}\n',
        '{"rank": 1, "proof": "\u00e9", "challenge": "\u00e9"}\n'.encode(),
        b'{"rank": 1, "proof": "\\ud800", "challenge": "\\ud800"}\n',
        b'{"rank": true, "proof": [], "challenge": "11"}\n',
        b'{"proof": "11"}\n',
        b"x" * 2000,
    ],
)
def test_a_stranger_gets_no_further_and_disturbs_nobody(monitor, line):
    other = connected(monitor)
    with socket.create_connection(monitor[1], timeout=120) as stranger:
        hear_nothing(monitor[0])
        stranger.sendall(line)
        hear_nothing(monitor[0])
        assert closed_after_a_challenge(stranger)
    assert monitor[0].peers == [1]
    assert_it_still_hears(monitor, (1, other))


def hello(stranger, rank=1):
    """The answer of a rank to the challenge that a stranger has got."""
    challenge = json.loads(stranger.recv(1000))["challenge"]
    proof = hmac.new(SECRET, f"rank {rank} {challenge}".encode(), "sha256").hexdigest()
    return json.dumps({"rank": rank, "proof": proof, "challenge": "11"}).encode() + b"\n"


def test_a_proof_that_was_overheard_is_worth_nothing_on_another_connection(monitor):
    channel, address = monitor
    with socket.create_connection(address, timeout=120) as rank:
        hear_nothing(channel)
        said = hello(rank)
        with socket.create_connection(address, timeout=120) as stranger:
            hear_nothing(channel)
            stranger.sendall(said)
            hear_nothing(channel)
            assert closed_after_a_challenge(stranger)
        assert channel.peers == []
        rank.sendall(said)
        hear_nothing(channel, lambda: channel.peers == [1])
        proof = hmac.new(SECRET, b"monitor 0 11", "sha256").hexdigest()
        assert json.loads(rank.recv(1000)) == {"proof": proof}


def test_a_rank_that_has_just_joined_hears_what_all_hear(monitor):
    """Such as that the monitor leaves: else it would take the monitor for lost."""
    other, address = SideChannel(1, SECRET, None), monitor[1]
    thread = threading.Thread(target=other.connect, args=(0, address))
    thread.start()
    while not monitor[0].peers:
        assert not list(monitor[0].poll(0.001))
    monitor[0].send_to_all({"kind": "left"})
    monitor[0].close()
    thread.join()
    assert received(other, 2) == [(0, {"kind": "left"}), ended(0)]
    other.close()


def test_the_newest_connection_of_a_rank_replaces_the_earlier_one(monitor):
    earlier, newer = connected(monitor), connected(monitor)
    newer.send(0, {"kind": "new"})
    assert received(monitor[0]) == [(1, {"kind": "new"})]
    earlier.close()
    hear_nothing(monitor[0])
    assert_it_still_hears(monitor, (1, newer))


def closed_after_a_challenge(stranger):
    """Return whether the connection is closed, and nothing but a challenge was said."""
    said = b""
    with contextlib.suppress(ConnectionResetError):  # there was something left to read
        while data := stranger.recv(1000):
            said += data
    return not said or json.loads(said).keys() == {"challenge"}


def test_a_stranger_that_says_nothing_is_dropped(monitor, monkeypatch):
    monkeypatch.setattr(side_channel, "_GREETING_S", 0.2)
    with socket.create_connection(monitor[1], timeout=120) as stranger:
        for _ in range(10):
            list(monitor[0].poll(0.1))
        assert closed_after_a_challenge(stranger)


def open_sockets():
    """Count them: other threads of the process may open files meanwhile."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += os.readlink(descriptor).startswith("socket:")
    return found


@pytest.mark.thorough
def test_strangers_are_few_and_no_rank_gives_way_to_them(monitor):
    """Neither one that is connected nor one that comes when strangers hold all places."""
    channel, address = monitor
    earlier, open_files = connected(monitor, 1), open_sockets()
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(socket.create_connection(address)) for _ in range(300)]
        most, accepted = open_files + len(flood) + side_channel.STRANGERS, 0
        end = time.monotonic() + 120
        while accepted < len(flood):  # each has had its place, and the last ones still have
            assert time.monotonic() < end
            assert not list(channel.poll(0.05))
            assert open_sockets() <= most
            assert len(channel._strangers) <= side_channel.STRANGERS
            accepted = sum(bool(select.select([own], [], [], 0)[0]) for own in flood)
        newcomer = connected(monitor, 2)
        assert channel.peers == [1, 2]
        assert_it_still_hears(monitor, (1, earlier), (2, newcomer))


def test_many_ranks_that_come_at_once_are_all_let_in(monitor):
    channel, address = monitor
    others = [SideChannel(rank, SECRET, None) for rank in range(1, 101)]
    threads = [threading.Thread(target=other.connect, args=(0, address)) for other in others]
    for thread in threads:
        thread.start()
    hear_nothing(channel, lambda: not any(thread.is_alive() for thread in threads))
    hear_nothing(channel, lambda: len(channel.peers) == len(others))
    for other in others:
        other.close()


def test_a_port_that_is_needed_no_more_is_closed_with_all_that_it_cost(monitor):
    channel, address = monitor
    other = connected(monitor)
    with socket.create_connection(address, timeout=120) as stranger:
        hear_nothing(channel, lambda: channel._strangers)
        before = open_sockets()
        channel.stop_listening()
        channel.stop_listening()  # does nothing
        assert open_sockets() == before - 2
        assert closed_after_a_challenge(stranger)
    with pytest.raises(ConnectionRefusedError):
        connected(monitor, 2)
    assert_it_still_hears(monitor, (1, other))


@pytest.mark.parametrize(
    ("others", "environment", "expected"),
    [
        ([], {}, "127.0.0.1"),
        ([{"eth0": "10.0.0.2", "ib0": "10.1.0.2"}], {}, "10.0.0.1"),
        ([{"ib0": "10.1.0.2"}, {"eth0": "10.0.0.3", "ib0": "10.1.0.3"}], {}, "10.1.0.1"),
        ([{"docker0": "172.17.0.1", "ib0": "10.1.0.2"}], {}, "10.1.0.1"),  # a bridge of each host
        ([{"eth0": "10.0.0.2"}], {"UCX_NET_DEVICES": "mlx5_0:1,ib0"}, "10.1.0.1"),
        ([{"eth0": "10.0.0.2"}], {"UCX_NET_DEVICES": "all"}, "10.0.0.1"),
        ([{"eth0": "192.0.2.1"}], {}, "10.0.0.1"),  # is reached by no interface
        ([{}], {}, "10.0.0.1"),
    ],
)
def test_the_interface_is_the_one_that_leads_to_other_hosts(
    others, environment, expected, monkeypatch
):
    own = {"docker0": "172.17.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    if expected == "10.0.0.1":
        own = {"eth0": "10.0.0.1", "docker0": "172.17.0.1", "ib0": "10.1.0.1"}
    routes = {address.rpartition(".")[0]: address for address in own.values()}
    monkeypatch.setattr(side_channel, "own_addresses", lambda: own)
    monkeypatch.setattr(
        side_channel, "_source", lambda address: routes.get(address.rpartition(".")[0], "")
    )
    assert address_towards(others, environment) == expected


def test_where_there_is_no_ipv4_the_side_channel_takes_ipv6(monkeypatch):
    table = (
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"  # of the link alone
        "fd000000000000000000000000000001 02 40 00 80     eth0\n"
        "fd0000000000000000000000000000ff 02 40 00 01     eth0\n"  # a temporary one
    )
    monkeypatch.setattr(unanswered.Path, "read_text", lambda path: table)
    assert unanswered.ipv6_addresses() == {"eth0": "fd00::1"}
    monkeypatch.setattr(side_channel, "interfaces", lambda: {"lo": ("127.0.0.1", 65536)})
    assert side_channel.own_addresses() == {"eth0": "fd00::1"}
    monkeypatch.setattr(
        side_channel, "_source", lambda address: "fd00::1" if ":" in address else ""
    )
    assert address_towards([{"eth0": "fd00::2"}], {}) == "fd00::1"
    monkeypatch.setattr(side_channel, "interfaces", lambda: {"eth0": ("10.0.0.1", 1500)})
    assert side_channel.own_addresses() == {"eth0": "10.0.0.1"}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_monitor_listens_in_its_range_of_ports(address):
    try:
        free = side_channel.listen(address)
    except OSError:
        pytest.skip(f"this host has no {address}")
    port = free.getsockname()[1]
    said = f"no port of --comm.port-range {port}-{port} is free"
    with free, pytest.raises(ValueError, match=said):
        side_channel.listen(address, range(port, port + 1))
    with side_channel.listen(address, range(port, port + 1)) as own:
        channel = SideChannel(0, SECRET, own)
        peer = SideChannel(1, SECRET, None)
        assert channel.port == port
        thread = threading.Thread(target=peer.connect, args=(0, own.getsockname()[:2]))
        thread.start()
        while not channel.peers:
            list(channel.poll(0.05))
        thread.join()
        channel.stop_listening()
        assert channel.port == 0
        peer.close()
        channel.close()


def test_a_forked_child_says_nothing(monitor):
    other = connected(monitor)
    message = {"kind": "one", "text": "x" * 900_000}  # more than the kernel takes at once
    other.send(0, message)
    child = os.fork()
    if child == 0:
        other.close(in_child=True)
        os._exit(0)
    os.waitpid(child, 0)
    found = []
    while not found:
        list(other.poll(0))
        found += monitor[0].poll(0.05)
    assert found == [(1, message)]
    other.close()


def test_a_peer_that_answers_byte_by_byte_is_given_up(monkeypatch):
    monkeypatch.setattr(side_channel, "_GREETING_S", 0.5)
    listener, address = listen()

    def drip():
        with listener, listener.accept()[0] as own, contextlib.suppress(OSError):
            while True:
                own.send(b" ")
                time.sleep(0.05)

    thread = threading.Thread(target=drip)
    thread.start()
    channel = SideChannel(1, SECRET, None)
    with pytest.raises(TimeoutError):
        channel.connect(0, address)
    thread.join()
    channel.close()


def test_a_signal_and_a_call_of_another_thread_end_a_wait():
    channel = SideChannel(0, SECRET, None)
    previous = signal.set_wakeup_fd(channel.wake_descriptor, warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert list(channel.poll(20)) == [(0, {"kind": "signal", "number": signal.SIGUSR1})]
        threading.Timer(0.1, channel.wake).start()
        assert list(channel.poll(600)) == []
    finally:
        signal.set_wakeup_fd(previous)
        signal.signal(signal.SIGUSR1, handler)
        channel.close()


def test_a_monitor_may_open_a_file_for_every_rank_as_far_as_the_hard_limit_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        allow_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, before[1])
        allow_files(1 << 40)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
