"""Connections that nobody answers: in the kernel's tables, and in the words of the watch."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from mntrain.watchdog import start_timer, unanswered
from mntrain.watchdog.start_timer import limited_start, network_watched
from mntrain.watchdog.unanswered import (
    Connection,
    Unanswered,
    describe,
    describe_refused,
    read_table,
    refused_connections,
)

HEADER = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout\n"
)
# Lines of Linux 6 on a little-endian machine.
LINES = {
    "a packet filter drops SYNs": "0172B90A:90CF 0272B90A:9661 02 00000001:00000000 01:0000015C "
    "00000003 0 0 111 2 0",
    "the first SYN": "0172B90A:90CF 0272B90A:9661 02 00000001:00000000 01:0000005C "
    "00000000 0 0 111",
    "idle": "0172B90A:A122 FE72B90A:9E1F 01 00000000:00000000 00:00000000 00000000 0 0 112 2 0",
    "large packets are lost": "0276B90A:D609 0176B90A:CC53 01 00001011:00000000 01:0000000F "
    "00000004 0 0 113 2 0",
    "one packet was lost": "0276B90A:D609 0176B90A:CC53 01 00001011:00000000 01:0000000F "
    "00000001 0 0 113 2 0",
    "probes without an answer": "0276B90A:D609 0176B90A:CC53 01 00001011:00000000 04:0000000F "
    "00000000 0 15 113 2 0",
    "the receiver is stopped": "0276B90A:D609 0176B90A:CC53 01 00001011:00000000 04:0000000F "
    "00000000 0 0 113 2 0",
    "keep-alive": "0276B90A:D609 0176B90A:CC53 01 00000000:00000000 02:0000000F 00000000 0 0 113",
    "within the host": "0172B90A:E599 0172B90A:E523 02 00000001:00000000 01:0000015C "
    "00000003 0 0 1",
    "listening": "00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 114",
}


def table(*names):
    return HEADER + "".join(f"   {i}: {LINES[name]}\n" for i, name in enumerate(names))


@pytest.mark.skipif(sys.byteorder != "little", reason="the lines are of a little-endian machine")
def test_what_the_kernel_sends_again_in_vain_is_unanswered():
    for name, expected in (
        ("a packet filter drops SYNs", True),
        ("the first SYN", False),
        ("idle", False),
        ("large packets are lost", True),
        ("one packet was lost", False),
        ("probes without an answer", True),
        ("the receiver is stopped", False),
        ("keep-alive", False),
    ):
        ((_, _, unanswered),) = read_table(table(name))
        assert unanswered == expected, name


@pytest.mark.skipif(sys.byteorder != "little", reason="the lines are of a little-endian machine")
def test_addresses_are_read_and_connections_of_one_host_left_out():
    (found,) = read_table(table("within the host", "listening", "a packet filter drops SYNs"))
    connection = Connection("10.185.114.1", 0x90CF, "10.185.114.2", 0x9661, opened=False)
    assert found == (connection, "111", True)
    mapped = "0000000000000000FFFF00000{}0200C0:{} "
    six = mapped.format(1, "0400") + mapped.format(2, "8827") + "01 0:0 00:0 0"
    ((found, _, _),) = read_table(f"{HEADER} 0: {six} 0 0 7 1\n")
    assert (found.local, found.remote) == ("192.0.2.1", "192.0.2.2")


def stuck_pair(stack):
    """Return a socket that connects in vain: the queue of the one that listens is full."""
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.2", 0))
    listener.listen(0)
    made = []
    for _ in range(3):
        made.append(stack.enter_context(socket.socket()))
        made[-1].bind(("127.0.0.1", 0))
        made[-1].setblocking(False)
        made[-1].connect_ex(listener.getsockname())
    return listener.getsockname()[1]


# A rank that connects to a node which does not answer, then waits: 127.0.0.2 with a full queue.
RANK = """
import socket, sys, time
from contextlib import ExitStack
sys.path.insert(0, sys.argv[1])
from test_unanswered import stuck_pair
with ExitStack() as stack:
    if sys.argv[2] != "waits":
        stuck_pair(stack)
    print("ready", flush=True)
    time.sleep(250)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_rank_whose_connection_nobody_answers_is_told_of_and_ended(tmp_path):
    """Within 6 s: a second SYN follows after 1 s, and it must stay unanswered for 2.5 s, looked at
    every second. Beside it, one that waits, one of a job, which is warned first, one that MPI ends,
    and this process."""
    folder = os.path.dirname(__file__)
    (tmp_path / "hydra_pmi_proxy").symlink_to("/bin/sh")
    with ExitStack() as stack:
        ranks, watches = {}, {}
        for kind, *limits in (
            ("stuck", "6", "inf"),
            ("waits", "6", "inf"),
            ("lost", "inf", "6"),
            ("ends", "inf", "inf"),
        ):
            words = [sys.executable, "-c", RANK, folder, kind]
            # A shell of its own, as the ranks' launcher: watches look at all processes of it.
            shell = tmp_path / "hydra_pmi_proxy" if kind == "ends" else "sh"
            rank = subprocess.Popen(
                [
                    shell,
                    "-c",
                    '"$@" & echo $!; wait $!; echo $?; [ "$0" != ends ] || read line',
                    kind,
                    *words,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(rank.stdout.close)
            stack.callback(rank.stdin.close)
            stack.callback(rank.wait)
            pid = int(rank.stdout.readline())
            assert rank.stdout.readline() == "ready\n"
            watches[kind] = subprocess.Popen(
                [sys.executable, "-I", "-S", unanswered.__file__, str(pid), "0", "3", *limits],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ranks[kind] = rank
        count_a_lasting_one()
        watches["ends"].stdin.close()
        os.kill(pid, signal.SIGKILL)
        said = {}
        for kind, watch in watches.items():
            said[kind] = watch.stderr.read()
            watch.stdin.close()
            watch.stderr.close()
            assert watch.wait(120) == 0
            ended = ranks[kind].stdout.read()
            if kind == "ends":  # MPICH's launcher ends the other nodes if its daemon here is lost
                assert ranks[kind].wait(120) == -9
            else:
                assert int(ended.split()[-1]) == 128 + 9
    here = socket.gethostname()
    warning, error = said["lost"].splitlines()
    assert warning.startswith(f"mntrain: warning: {here} cannot connect to ")
    assert error.startswith(f"mntrain: error: {here} has had no answer from 127.0.0.2 for 6 s")
    for kind in ("stuck", "ends"):
        (line,) = said[kind].splitlines()
        assert line.startswith(f"mntrain: error: {here} cannot connect to ")
        assert "127.0.0.2" in line
        assert "firewall" in line
        assert "UCX_NET_DEVICES" in line
    (line,) = said["waits"].splitlines()
    assert line.startswith(f"mntrain: error: rank 0 on {here} has waited ")
    assert "of which 3 run on other nodes" in line


def count_a_lasting_one():
    with ExitStack() as stack:
        port = stuck_pair(stack)
        watch, others = Unanswered([os.getpid()]), Unanswered([])
        deadline = time.monotonic() + 120
        watch.look(time.monotonic())
        assert watch.lasting() == []
        while not watch.lasting() and time.monotonic() < deadline:
            time.sleep(0.3)
            watch.look(time.monotonic())
            others.look(time.monotonic())
        (found, *_) = watch.lasting()
        assert (found.remote, found.port, found.opened) == ("127.0.0.2", port, False)
        assert others.lasting() == []  # of other processes
    watch.look(time.monotonic())
    assert watch.lasting()  # MPI may have given it up


def test_the_sentence_names_nodes_and_what_to_check():
    node = Connection("127.0.0.1", 1, "127.0.0.2", 7, opened=False)
    others = [node._replace(remote=f"127.0.0.{i}") for i in range(3, 13)]
    assert describe([]) == ""
    text = describe([node, *others])
    assert all(words in text for words in ("127.0.0.2", "and 3 more", "port 7", "firewall"))
    opened = describe([node._replace(opened=True)])
    assert "small messages pass and large ones do not" in opened
    assert "ping -M do -s" in opened
    assert "cannot connect" in describe([node._replace(opened=True), node])


def test_connections_that_are_refused_are_counted_and_named():
    before = refused_connections()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    count = refused_connections() - before
    assert count >= 1
    assert f"were refused ({count}) while MPI connected the ranks" in describe_refused(count)
    assert describe_refused(0) == ""


@pytest.fixture
def ranks_of_node(monkeypatch):
    """Sets how many of four ranks a node has, and which of them this is."""

    def choose(count, local_rank):
        given = {"PMI_SIZE": 4, "PMI_RANK": 0, "MPI_LOCALNRANKS": count}
        for name, value in (given | {"MPI_LOCALRANKID": local_rank}).items():
            monkeypatch.setenv(name, str(value))

    return choose


def test_on_one_node_no_process_is_started(ranks_of_node, monkeypatch):
    def refuse(*words, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    for count, local_rank in ((4, 0), (2, 1)):  # the first rank of the node does
        ranks_of_node(count, local_rank)
        with network_watched(5.0) as moved:
            moved()
    ranks_of_node(2, 0)
    with pytest.raises(AssertionError, match="a process was started"), network_watched():
        pass


@pytest.mark.thorough
def test_a_start_that_ends_well_is_silent(ranks_of_node, capfd):
    ranks_of_node(2, 0)
    with network_watched(60.0) as moved, network_watched():
        moved()
    with pytest.raises(KeyError), network_watched():
        raise KeyError
    assert capfd.readouterr() == ("", "")


def test_a_start_without_a_thread_for_its_limit_goes_on(ranks_of_node, monkeypatch):
    def refuse(*_, **options):
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr(start_timer.faulthandler, "dump_traceback_later", refuse)
    ranks_of_node(4, 0)
    with limited_start(60.0):
        pass
