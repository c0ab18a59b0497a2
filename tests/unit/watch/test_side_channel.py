"""The connections between ranks: messages, strangers, and what the end of one means."""

import hmac
import json
import os
import signal
import socket
import threading
import time

import pytest

from mntrain.watch import side_channel
from mntrain.watch.side_channel import Closed, SideChannel, listen, places

SECRET = b"s" * 32


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
            other.connect(0, ("127.0.0.1", address.port))
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    while thread.is_alive():
        assert not list(channel.poll(0.05))
    if errors:
        other.close()
        raise errors[0]
    while rank not in channel.peers:
        assert not list(channel.poll(0.05))
    return other


def received(channel, count=1):
    """The next messages of a channel."""
    found, end = [], time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < end
        found += channel.poll(0.1)
    return found


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


def test_a_closed_connection_and_a_killed_process_are_told(monitor):
    other = connected(monitor)
    other.close()
    assert received(monitor[0]) == [(1, Closed(None))]
    child = os.fork()
    if child == 0:
        own = SideChannel(2, SECRET, None)
        own.connect(0, ("127.0.0.1", monitor[1].port))
        time.sleep(100)
    while 2 not in monitor[0].peers:
        list(monitor[0].poll(0.05))
    os.kill(child, signal.SIGSTOP)
    assert not list(monitor[0].poll(0.3))  # a stopped process is not lost
    os.kill(child, signal.SIGKILL)
    assert received(monitor[0]) == [(2, Closed(None))]
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
        b"x" * 2000,
    ],
)
def test_a_stranger_gets_no_further_and_disturbs_nobody(monitor, line):
    other = connected(monitor)
    with socket.create_connection(("127.0.0.1", monitor[1].port)) as stranger:
        for _ in range(5):
            list(monitor[0].poll(0.05))
        challenge = json.loads(stranger.recv(1000))
        assert challenge.keys() == {"challenge"}
        stranger.sendall(line)
        for _ in range(5):
            assert not list(monitor[0].poll(0.05))
    assert monitor[0].peers == [1]
    other.send(0, {"kind": "still here"})
    assert received(monitor[0]) == [(1, {"kind": "still here"})]
    other.close()


def half_greeted(monitor, rank):
    """A socket on which a rank has proved that it knows the secret, and has not joined."""
    stranger = socket.create_connection(("127.0.0.1", monitor[1].port))
    while not monitor[0]._strangers:
        list(monitor[0].poll(0.05))
    challenge = json.loads(stranger.recv(1000))["challenge"]
    proof = hmac.new(SECRET, f"rank {rank} {challenge}".encode(), "sha256").hexdigest()
    hello = {"rank": rank, "proof": proof, "challenge": "11"}
    stranger.sendall(json.dumps(hello).encode() + b"\n")
    assert not list(monitor[0].poll(5))
    assert json.loads(stranger.recv(1000)).keys() == {"proof"}
    return stranger


def test_a_rank_that_gives_up_its_greeting_is_not_lost_and_can_try_again(monitor):
    half_greeted(monitor, 1).close()
    for _ in range(5):
        assert not list(monitor[0].poll(0.05))
    assert monitor[0].peers == []
    other = connected(monitor)
    assert monitor[0].peers == [1]
    other.close()


def test_a_rank_that_is_about_to_join_hears_what_all_hear(monitor):
    """Such as that the monitor leaves: else it would take the monitor for lost."""
    other, address = SideChannel(1, SECRET, None), ("127.0.0.1", monitor[1].port)
    thread = threading.Thread(target=other.connect, args=(0, address))
    thread.start()
    while not any(stranger.proven for stranger in monitor[0]._strangers):
        assert not list(monitor[0].poll(0.001))
    monitor[0].send_to_all({"kind": "left"})
    monitor[0].close()
    thread.join()
    assert received(other, 2) == [(0, {"kind": "left"}), (0, Closed(None))]
    other.close()


def test_the_newest_connection_of_a_rank_replaces_the_earlier_one(monitor):
    earlier, newer = connected(monitor), connected(monitor)
    newer.send(0, {"kind": "new"})
    assert received(monitor[0]) == [(1, {"kind": "new"})]
    earlier.close()
    for _ in range(5):
        assert not list(monitor[0].poll(0.05))
    newer.send(0, {"kind": "still here"})
    assert received(monitor[0]) == [(1, {"kind": "still here"})]
    newer.close()


def test_a_stranger_that_says_nothing_is_dropped(monitor, monkeypatch):
    monkeypatch.setattr(side_channel, "_GREETING_S", 0.2)
    with socket.create_connection(("127.0.0.1", monitor[1].port)) as stranger:
        for _ in range(10):
            list(monitor[0].poll(0.1))
        stranger.settimeout(20)
        assert json.loads(stranger.recv(1000)).keys() == {"challenge"}
        assert stranger.recv(1000) == b""


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


def test_an_address_where_nobody_listens_is_an_error():
    listener, address = listen()
    listener.close()
    channel = SideChannel(1, SECRET, None)
    with pytest.raises(ConnectionRefusedError):
        channel.connect(0, places(address)[0])
    channel.close()


def test_a_signal_and_a_call_of_another_thread_end_a_wait():
    channel = SideChannel(0, SECRET, None)
    previous = signal.set_wakeup_fd(channel.wake_descriptor, warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert list(channel.poll(20)) == [(0, {"kind": "signal", "number": signal.SIGUSR1})]
        threading.Timer(0.1, channel.wake).start()
        start = time.monotonic()
        assert list(channel.poll(20)) == []
        assert time.monotonic() - start < 10
    finally:
        signal.set_wakeup_fd(previous)
        signal.signal(signal.SIGUSR1, handler)
        channel.close()
