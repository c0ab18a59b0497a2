"""Watchdogs of three ranks in one process, over real connections."""

import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from waiting import until

from mntrain.comm.engine import ProgressEngine, steps_of
from mntrain.launch.verdict import silent_hosts
from mntrain.watchdog import thread as watchdogs
from mntrain.watchdog.monitor import Limits
from mntrain.watchdog.side_channel import SideChannel
from mntrain.watchdog.thread import Watchdog

SECRET = b"s" * 32


class WatchedJob:
    """The watchdogs by rank."""

    def __init__(self, *, addresses=lambda found: found, keys=(0, 0, 0), lost_after=20.0):
        listeners = {rank: socket.create_server(("127.0.0.1", 0)) for rank in (0, 1)}
        facts = [
            SimpleNamespace(host="abc"[key], host_key=key, pid=os.getpid(), pid_namespace="")
            for key in keys
        ]
        found = {rank: addresses(own.getsockname()) for rank, own in listeners.items()}
        self.engine = ProgressEngine()
        self.ranks = []
        for rank in range(3):
            channel = SideChannel(rank, SECRET, listeners.get(rank), lost_after=lost_after)
            recorder = SimpleNamespace(active_at=time.monotonic())
            options = {
                "channel": channel,
                "addresses": found,
                "fail": None,
                "recorder": recorder,
            }
            self.ranks.append(Watchdog(rank, facts, self.engine, Limits(1.0, 100.0), **options))

    def connected(self):
        """Return whether the monitors have a connection to each other rank."""
        return all(len(self.ranks[rank]._channel.peers) == 2 for rank in (0, 1))

    def close(self):
        """Close all."""
        for rank in self.ranks:
            rank.close()
        self.engine.close()


@pytest.fixture
def job():
    made = WatchedJob()
    yield made
    made.close()


def test_only_rank_0_says_how_a_run_ends_and_an_error_of_one_summary_is_printed(job, capsys):
    ends = []
    until(job.connected)
    job.ranks[0].at_end.append(lambda status, reason: 1 / 0)
    for rank in job.ranks:
        rank.at_end.append(lambda *how: ends.append(how))
    for rank in reversed(job.ranks):
        rank.end_run("lost", "why")
    assert ends == [("lost", "why")]
    assert "the summary cannot be written: division by zero" in capsys.readouterr().err


def test_rank_1_says_how_a_run_ends_once_rank_0_is_lost(job):
    ends = []
    until(job.connected)
    for rank in job.ranks[1:]:
        rank.at_end.append(lambda *how: ends.append(how))
    job.ranks[0].close()
    until(lambda: 0 not in job.ranks[1]._channel.peers)
    for rank in reversed(job.ranks):
        rank.end_run("lost", "why")
    assert ends == [("lost", "why")]


def test_output_that_nobody_has_read_is_told_afterwards(job, monkeypatch, capfd):
    unread = ["stdout"]
    monkeypatch.setattr(watchdogs, "unread_output", lambda: unread[0])
    until(lambda: job.ranks[2]._unread_s >= 1.0)
    assert "nobody has read" not in capfd.readouterr().err
    unread[0] = ""
    until(lambda: not any(rank._unread_s for rank in job.ranks))
    assert "nobody has read the stdout of rank 2 for 1 s" in capfd.readouterr().err


@pytest.mark.thorough
def test_a_job_that_takes_part_in_nothing_is_told_once_in_a_while(job, monkeypatch):
    told = []
    monkeypatch.setattr(job.ranks[0], "_tell_waiting", lambda **how: told.append(how["idle_s"]))
    until(lambda: told)
    assert told[0] >= 1.0
    time.sleep(2.5)
    assert len(told) == 1
    for rank in job.ranks:
        rank._recorder.active_at = time.monotonic()
    until(lambda: len(told) == 2)
    assert told[1] >= 2.0


def test_a_monitor_that_comes_late_is_tried_again_and_awaited_by_no_exit(monkeypatch):
    monkeypatch.setattr(watchdogs, "RECONNECT_S", 0.2)
    job = WatchedJob(addresses=lambda found: ("127.0.0.2", found[1]))
    try:
        job.ranks[2].arrive_at_exit()
        until(job.ranks[2]._all_at_exit.is_set)
        assert not job.ranks[2]._none_unknown
        assert not job.connected()
        for rank in job.ranks:
            rank._addresses = {m: ("127.0.0.1", port) for m, (_, port) in rank._addresses.items()}
        until(job.connected)
    finally:
        job.close()


def test_another_world_of_a_process_ends_the_watch_over_the_exit_of_one_that_is_closed():
    first = WatchedJob()
    until(first.connected)
    first.ranks[2].leave_world()
    second = WatchedJob()
    try:
        assert first.ranks[2]._closed
        assert not first.ranks[1]._closed
        for rank in (0, 1):
            first.ranks[rank].arrive_at_exit()
        until(first.ranks[0]._all_at_exit.is_set)
    finally:
        first.close()
        second.close()


def test_what_wakes_no_thread_is_done_at_the_exit(job):
    short = job.engine.submit(steps_of(lambda: "sent"), wake=False)
    job.ranks[2].arrive_at_exit()
    assert short.ended
    assert job.ranks[2]._idle


SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_a_job_ends_some_time_after_a_signal_or_at_a_second_one(job, monkeypatch, ending, code):
    rank, now = job.ranks[2], time.monotonic()
    assert rank.expect_signals(SIGNALS, 1000.0)
    try:
        rank._on_signal(signal.SIGHUP)
        assert rank._signals.end is None
        rank._on_signal(ending)
        name = signal.Signals(ending).name
        said = f"{name} on rank 2: the step has not ended within 1000 s "
        said += "(--run.grace, or grace of world.stop_requested)"
        assert rank._signals.end[1:] == (said, code)
        rank._on_signal(ending)  # passed on by a launcher and a scheduler
        assert rank._signals.end[0] >= now + 1000
        monkeypatch.setattr(watchdogs, "_SENDERS_S", 0.0)
        rank._on_signal(signal.SIGUSR1)
        assert rank._signals.end[0] >= now + 1000
        monkeypatch.setattr(rank, "_tell_waiting", lambda **how: None)
        rank._on_signal(signal.SIGINT)
        until(lambda: rank._signals.end is None)  # at once
    finally:
        rank.ignore_signals()


@pytest.mark.thorough
@pytest.mark.parametrize("answers", [False, True])
def test_a_rank_elsewhere_tells_that_the_monitors_do_not_answer(monkeypatch, capfd, answers):
    monkeypatch.setattr(watchdogs, "TAKE_OVER_S", 0.2)
    monkeypatch.setattr(watchdogs, "ANSWER_S", 0.3)
    job = WatchedJob(keys=(0, 0, 1), lost_after=3.0)
    try:
        until(job.connected)
        for rank in (0, 1) if not answers else ():
            deaf = {name: lambda *given: None for name in ("look", "on_message", "on_disconnected")}
            job.ranks[rank]._monitor = SimpleNamespace(all_at_exit=None, acts=False, **deaf)
        stream = SimpleNamespace(name="w", timeout_s=None, begun=1, oldest=None, ranks=None)
        job.ranks[2]._engine = SimpleNamespace(
            awaited=lambda: (stream, 1.0, None), streams=[stream], idle=False, abandoned=False
        )
        until(lambda: job.ranks[2]._stalled_s > 2.5)
    finally:
        job.close()
    said = [line for line in capfd.readouterr().err.splitlines() if silent_hosts(line)]
    assert len(said) == (not answers)
    assert answers or said[0].endswith("and ranks 0, 1 on a do not answer; no rank on a answers")
    assert answers or silent_hosts(said[0]) == ["a"]


def test_a_loss_that_is_only_warned_of_does_not_wait_for_a_reader_of_stderr(job, monkeypatch):
    until(job.connected)
    read, rank = threading.Event(), job.ranks[2]
    monkeypatch.setattr(watchdogs, "PRINT_S", 0.1)
    monkeypatch.setattr(watchdogs, "_print", lambda text: read.wait(10.0))
    rank._limits = Limits(1.0, None)
    for other in job.ranks[:2]:
        other.close()
    until(lambda: not rank._channel.peers)
    start = time.monotonic()
    rank._on_disconnected(3, "reset by peer")
    assert time.monotonic() - start < 5.0
    read.set()
