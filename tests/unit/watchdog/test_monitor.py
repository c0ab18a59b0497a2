"""Questions, warnings and reports of a monitor, by messages that tests make up."""

from functools import partial
from types import SimpleNamespace

import pytest

from mntrain.launch.verdict import silent_hosts
from mntrain.recorder.late_ranks import Wait
from mntrain.recorder.launch_notes import VARIABLE
from mntrain.watchdog import monitor as monitors
from mntrain.watchdog.monitor import ANSWER_S, EXIT_S, TAKE_OVER_S, UNREACHED_S, Limits, Monitor
from mntrain.watchdog.rank_status import RankStatus


class KeptMessages:
    """Keeps what is sent."""

    lost_after = 5.0

    def __init__(self, peers):
        self.peers, self.sent, self.listens, self.cut = list(peers), [], True, set()

    def send(self, peer, message):
        if peer in self.peers:
            self.sent.append((peer, message))

    def stop_listening(self):
        self.listens = False

    def acknowledged(self, peer):
        return peer not in self.cut

    def taken(self, kind):
        """The peers to which messages of a kind were sent, which are forgotten."""
        found = [peer for peer, message in self.sent if message["kind"] == kind]
        self.sent = [entry for entry in self.sent if entry[1]["kind"] != kind]
        return found


class MonitoredWorld:
    """One monitor of three ranks, and what it has done."""

    def __init__(self, clock, rank, limit=100.0, hosts="aab", keys=(0, 0, 1)):
        self.clock = clock
        self.channel = KeptMessages({0, 1, 2} - {rank})
        self.warnings, self.ends, self.pardoned = [], [], []
        self.idle, self.unread = {}, {}  # by rank: seconds; "stdout"
        self.waits = {}  # by rank: seconds
        self.limits = dict.fromkeys(range(3), limit)  # by rank: of what it waits for
        self.networks = {}  # by rank: which nodes do not answer
        facts = [
            SimpleNamespace(host=hosts[r], host_key=keys[r], pid=100 + r, pid_namespace="")
            for r in range(3)
        ]
        self.monitor = Monitor(
            rank,
            facts,
            self.channel,
            Limits(10.0, limit),
            own_status=lambda: self.status(rank),
            warn=self.warnings.append,
            end_job=lambda report, *how: self.ends.append((report, how)),
            pardon=lambda: self.pardoned.append(rank),
        )
        self.pass_time(0.0)

    def status(self, rank):
        """A rank's status: in collective 4, or before it."""
        wait = None
        if rank in self.waits:
            wait = Wait("w", 4, "all_reduce of 8", "a.py:1", self.waits[rank])
        begun, network = {"w": 5 if wait else 4}, self.networks.get(rank, "")
        return RankStatus(
            begun,
            wait,
            "stack\n",
            "a.py:2",
            network=network,
            limit=self.limits[rank],
            idle_s=self.idle.get(rank, 0.0),
            unread=self.unread.get(rank, ""),
        )

    def hear(self, peer, kind, **content):
        """Let a message arrive."""
        if kind == "waiting":
            content = {"ends": "reason" in content, "reason": "", "code": 1} | content
        self.monitor.on_message(peer, {"kind": kind, **content})
        if kind == "waiting":
            self.pass_time(0.0)

    def answer(self, *ranks):
        """Let ranks answer the monitor's question."""
        assert set(self.channel.taken("ask")) >= set(ranks)
        for rank in ranks:
            self.hear(rank, "status", status=self.status(rank)._asdict())
        self.pass_time(0.0)

    def pass_time(self, seconds):
        """Let time pass."""
        self.clock[0] += seconds
        self.monitor.look(self.clock[0])


@pytest.fixture
def make(clock):
    """Makes a world whose clock the test sets."""
    return partial(MonitoredWorld, clock)


def test_a_wait_is_one_warning_and_then_one_report(make):
    world = make(0)
    world.waits = {0: 10.0, 1: 10.0}
    world.hear(0, "waiting", ends=False)
    world.hear(1, "waiting", ends=False)
    world.answer(1, 2)
    assert len(world.warnings) == 1
    assert world.warnings[0].startswith("ranks 0, 1 on a have waited 10 s for rank 2 on b\n")
    assert "the job ends after 100 s (--comm.timeout, or timeout=)" in world.warnings[0]
    world.hear(1, "waiting", ends=False)  # a moment later
    assert world.channel.taken("ask") == []
    world.waits = {0: 100.0, 1: 100.0}
    world.hear(0, "waiting", ends=True)
    world.answer(1, 2)
    ((report, how),) = world.ends
    assert report.startswith("ranks 0, 1 on a have waited 100 s for rank 2 on b\n")
    assert how == (report.splitlines()[0], "stalled", 1)
    assert len(world.warnings) == 1


@pytest.mark.parametrize("limit", [100.0, None])
def test_a_wait_for_a_rank_that_has_left_ends_the_job_soon(make, limit):
    world = make(0, limit=limit)
    world.hear(2, "left")
    world.channel.peers.remove(2)
    for seconds, told in ((2.0, 0), (6.0, 1)):  # its last messages may still come
        world.waits = {0: seconds, 1: seconds}
        world.pass_time(5.0)
        world.answer(1)
        said = [report for report, _ in world.ends] if limit else world.warnings
        assert len(said) == told
    assert said[0].startswith("ranks 0, 1 on a have waited 6 s for rank 2 on b\n")
    assert "rank 2 on b: has left the world, or ended its script" in said[0]
    world.pass_time(5.0)  # a warning is not repeated at once
    assert world.channel.taken("ask") == [] or limit


@pytest.mark.parametrize("may_end", [True, False])
@pytest.mark.parametrize("peers", [[1], [2], [1, 2]])
def test_a_message_from_a_rank_that_has_left_ends_the_job_unless_it_may_come(
    make, monkeypatch, peers, may_end
):
    world = make(0)
    world.hear(2, "left")
    world.channel.peers.remove(2)
    what = "recv of 8 bytes", "a.py:1", 7.0, None, peers, True, may_end
    statuses = [
        RankStatus({"w": 0}, wait, "", "", limit=100.0) for wait in (Wait("w", 0, *what), None)
    ]
    monkeypatch.setattr(world, "status", lambda rank: statuses[rank])
    world.pass_time(5.0)
    world.answer(1)
    ended = peers == [2] and not may_end
    assert [report.splitlines()[:2] for report, _ in world.ends] == ended * [
        [
            "rank 0 on a has waited 7 s for rank 2 on b",
            "  rank 0 on a: in recv of 8 bytes (w), called at a.py:1",
        ]
    ]
    assert world.warnings == []


def test_a_wait_for_a_rank_that_is_there_goes_on_after_another_has_left(make):
    world = make(0)
    world.hear(2, "left")
    world.waits = {0: 7.0}  # for rank 1, too
    world.pass_time(5.0)
    world.answer(1)
    assert (world.warnings, world.ends) == ([], [])


@pytest.mark.parametrize("ends", [True, False])
def test_a_wait_that_is_over_when_the_answers_come_is_nothing(make, ends):
    world = make(0)
    world.networks = {} if ends else {1: "a cannot connect to b"}
    world.hear(1, "waiting", ends=ends)
    world.waits = {1: 3.0} if ends else {}
    world.answer(1, 2)
    world.hear(2, "left")
    world.monitor.on_disconnected(2, None)  # it is not lost
    assert (world.warnings, world.ends) == ([], [])


@pytest.mark.parametrize(("own", "ends"), [(40.0, 1), (50.0, 0), (None, 0)])
def test_a_wait_ends_the_job_at_the_limit_of_what_is_waited_for(make, own, ends):
    world = make(0)
    world.limits[1] = own
    world.waits = {0: 12.0, 1: 12.0}
    world.hear(1, "waiting", ends=False)
    world.answer(1, 2)
    said = {40.0: "40 s (of this group)", 50.0: "50 s (of this group)"}
    assert (
        f"the job ends after {said.get(own, '100 s (--comm.timeout, or timeout=)')}"
        in world.warnings[0]
    )
    world.waits = {0: 45.0, 1: 45.0}
    world.hear(1, "waiting", ends=True)
    world.answer(1, 2)
    assert len(world.ends) == ends


def test_a_node_that_does_not_answer_is_warned_of_before_the_limit(make):
    world = make(0, keys=(0, 0, 2))
    world.networks = {0: "a cannot connect to b. Fix: F", 1: "a cannot connect to b. Fix: F"}
    world.waits = {0: 3.0, 1: 3.0}
    for ends in (False, True):  # an early question does not end the job
        world.hear(0, "waiting", ends=ends)
        world.channel.taken("ask")
        world.hear(1, "status", status=world.status(1)._asdict())
        world.pass_time(ANSWER_S + 0.1)
    assert world.ends == []
    (warning,) = world.warnings
    assert warning.startswith(
        "ranks 0, 1 on a have waited 3 s for rank 2 on b, which does not answer; "
        "a cannot connect to b. Fix: F\n"
    )
    assert warning.count("cannot connect") == 1
    assert "  rank 2 on b: does not answer\n" in warning


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (set(), "its node does, so its process is stopped, or held in C code"),
        ({2}, "nor does its node: the link to it may be down, or the node lost"),
    ],
)
def test_a_rank_that_does_not_answer_is_named_after_some_seconds(make, monkeypatch, cut, said):
    monkeypatch.setattr(monitors, "print_stack", lambda pid: None)
    world = make(0, keys=(0, 1, 2))
    world.waits = {0: 100.0, 1: 100.0}
    world.channel.cut = cut
    world.hear(0, "waiting", ends=True)
    world.answer(1)
    assert world.ends == []
    world.pass_time(ANSWER_S + 0.1)
    assert f"rank 2 on b: does not answer: {said}\n" in world.ends[0][0]


def test_rank_1_leaves_it_to_rank_0_that_answers(make):
    world = make(1)
    world.waits = {1: 100.0, 2: 100.0}
    world.hear(2, "waiting", ends=True)
    world.pass_time(TAKE_OVER_S + 0.1)
    world.answer(0, 2)
    assert (world.warnings, world.ends) == ([], [])


@pytest.mark.parametrize("ends", [False, True])
def test_rank_1_acts_for_a_rank_0_that_does_not_answer(make, ends):
    world = make(1)
    world.waits = {1: 100.0, 2: 100.0}
    world.hear(2, "waiting", ends=False)
    world.hear(1, "waiting", ends=ends)
    assert world.channel.taken("ask") == []
    world.pass_time(TAKE_OVER_S + 0.1)
    world.answer(2)
    world.pass_time(ANSWER_S + 0.1)
    assert (len(world.warnings), len(world.ends)) == ((0, 1) if ends else (1, 0))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_ends_after_a_signal_also_if_rank_0_does_not_answer(make, rank):
    world = make(rank)
    world.waits = {rank: 5.0}
    world.hear(2, "waiting", ends=False)
    world.hear(2, "waiting", reason="SIGINT on rank 2: too late", code=130)
    world.hear(1, "waiting", ends=False)
    world.pass_time(TAKE_OVER_S * rank + 0.1)
    world.answer(2)
    world.pass_time(ANSWER_S + 0.1)
    ((report, how),) = world.ends
    assert report.startswith(f"SIGINT on rank 2: too late; rank {rank} on a has waited 5 s for ")
    assert how[2] == 130


@pytest.mark.parametrize(("limit", "ends"), [(100.0, 1), (None, 0)])
def test_a_lost_rank_ends_the_job_if_there_is_a_limit(make, limit, ends):
    world = make(0, limit=limit)
    world.monitor.on_disconnected(2, None)
    assert (len(world.ends), len(world.warnings)) == (ends, 1 - ends)
    text = world.ends[0][0] if ends else world.warnings[0]
    assert text.startswith("rank 2 on b is lost: its process has ended without a word")
    assert text.count("`mntrain launch -- COMMAND`") == ends
    assert not ends or "mntrain launch" not in world.ends[0][1][0]


def test_a_lost_rank_of_a_job_under_launch_is_told_without_a_hint(make, monkeypatch):
    monkeypatch.setenv(VARIABLE, "folder")
    world = make(0)
    world.monitor.on_disconnected(2, None)
    assert "mntrain launch" not in world.ends[0][0]


def test_all_ranks_of_a_lost_node_are_named_but_not_those_of_a_namesake(make):
    world = make(0, hosts="aaa", keys=(0, 1, 1))
    world.monitor.on_disconnected(2, "Connection timed out")
    assert world.ends[0][0].startswith("ranks 1, 2 on a are lost: the node, or the network to it")
    assert world.ends[0][1][1] == "lost"


def test_rank_1_acts_once_rank_0_is_gone_but_not_before_it_was_there(make):
    world = make(1)
    world.monitor.on_disconnected(2, None)
    assert world.ends == []  # rank 0 sees the same
    world.channel.peers.remove(0)
    world.monitor.on_disconnected(2, None)
    assert len(world.ends) == 1


def test_a_wait_for_a_rank_whose_output_is_unread_counts_from_then_on(make):
    world = make(0)
    world.waits, world.unread = {0: 100.0, 1: 100.0}, {2: "stdout"}
    world.hear(0, "waiting", ends=True)
    world.answer(1, 2)
    assert world.channel.taken("output is unread") == [1]
    assert (world.pardoned, world.ends, world.warnings) == ([0], [], [])
    world.unread = {1: "stdout"}  # one that waits for another itself
    world.hear(0, "waiting", ends=True)
    world.answer(1, 2)
    assert len(world.ends) == 1
    signalled = make(0)
    signalled.waits, signalled.unread = {0: 1.0}, {2: "stdout"}
    signalled.hear(0, "waiting", ends=True, reason="SIGTERM on rank 0")
    signalled.answer(1, 2)
    assert len(signalled.ends) == 1


def test_ranks_that_take_part_in_nothing_are_one_warning(make):
    world = make(0)
    world.idle = dict.fromkeys(range(3), 11.0)
    world.hear(0, "waiting", ends=False, idle_s=10.0)
    world.answer(1, 2)
    (text,) = world.warnings
    head, where, stack, end = text.splitlines()
    assert head == "no rank has taken a step or begun a collective for 10 s"
    assert where == "  ranks 0, 1 on a, 2 on b: at a.py:2"
    assert stack.strip() == "stack"
    assert "the job goes on" in end


@pytest.mark.parametrize("why", ["one has gone on", "one waits", "unread output", "one has left"])
def test_ranks_are_not_idle_if(make, why):
    world = make(0)
    world.idle = {0: 11.0, 1: 11.0, 2: 0.5 if why == "one has gone on" else 11.0}
    world.waits = {1: 3.0} if why == "one waits" else {}
    world.unread = {2: "stderr"} if why == "unread output" else {}
    if why == "one has left":
        world.hear(2, "left")
    world.hear(0, "waiting", ends=False, idle_s=10.0)
    world.answer(1, 2)
    assert world.warnings == []


def test_ranks_that_wait_for_each_other_are_not_said_to_wait_for_themselves(make, monkeypatch):
    world = make(0)
    wait = Wait("w", 0, "recv", "a.py:1", 20.0, None, [1], True)
    statuses = {0: wait, 1: wait._replace(ranks=[0])}

    def status(rank):
        return RankStatus({"w": 0}, statuses.get(rank), "stack\n", "a.py:2", limit=100.0)

    monkeypatch.setattr(world, "status", status)
    world.hear(0, "waiting", ends=False)
    world.answer(1, 2)
    assert world.warnings[0].startswith("ranks 0, 1 on a have waited 20 s for each other\n")


def test_a_failed_rank_learns_when_all_others_have_left(make):
    world = make(0)
    world.hear(2, "failed", report={"rank": 2})
    assert world.channel.taken("failed") == [1]
    world.hear(1, "left")
    assert world.channel.taken("others left") == []
    world.hear(0, "left")
    assert world.channel.taken("others left") == [2]
    late = make(0)  # it fails after all others have left
    come(late, 0, 1)
    late.hear(2, "failed", report={"rank": 2})
    assert late.channel.taken("others left") == [2]


def test_a_monitor_listens_until_the_ranks_above_it_are_connected(make):
    for rank, above in ((0, [2, 1]), (1, [2])):
        world = make(rank)
        world.channel.listens, world.monitor._connected = True, set()
        world.channel.peers = []
        for peer in above:
            world.pass_time(0.1)
            assert world.channel.listens
            world.channel.peers.append(peer)
        world.pass_time(0.1)
        assert not world.channel.listens


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_cannot_reach_rank_0_are_one_warning(make, rank):
    world = make(rank)
    world.monitor._connected, world.channel.peers, world.channel.port = set(), [], 4100
    world.monitor._unreached_at = world.clock[0] + UNREACHED_S
    world.pass_time(UNREACHED_S - 1)
    assert world.warnings == []
    world.channel.peers = [1] if rank == 0 else [0]
    world.pass_time(2)
    world.pass_time(UNREACHED_S)
    if rank == 1:
        assert world.warnings == []  # rank 0 tells
        return
    (text,) = world.warnings
    assert text.startswith("rank 2 on b cannot reach rank 0 on a beside MPI, at TCP port 4100: ")
    assert "--comm.port-range" in text


def come(world, *ranks, kind="at exit"):
    """Let ranks come to the exit."""
    for rank in ranks:
        world.hear(rank, kind, idle=True)
    world.pass_time(EXIT_S + 0.1)


@pytest.mark.parametrize("kind", ["at exit", "closed"])
def test_ranks_at_the_exit_go_on_when_all_have_come(make, kind):
    world = make(0)
    world.hear(2, "left")
    come(world, 0, 1)
    assert world.monitor.all_at_exit is None
    come(world, 2, kind=kind)
    assert world.channel.taken("all at exit") == [1, 2]
    # One that has closed its watch before may train on in another world.
    assert world.monitor.all_at_exit["none_unknown"] == (kind == "at exit")
    assert world.monitor.all_at_exit["all_idle"] == (kind == "at exit")
    world.monitor.on_disconnected(2, None)
    assert (world.ends, world.warnings) == ([], [])


def test_ranks_compare_no_calls_at_the_exit_if_one_of_them_has_some_pending(make):
    world = make(0)
    world.hear(1, "at exit", idle=False)
    come(world, 0, 2)
    assert world.monitor.all_at_exit["none_unknown"]
    assert not world.monitor.all_at_exit["all_idle"]


def test_a_rank_without_a_connection_is_not_waited_for_long_at_the_exit(make):
    world = make(0)
    world.channel.peers, world.monitor._connected = [1], {1}
    world.hear(0, "at exit", idle=True)
    come(world, 1)
    assert world.monitor.all_at_exit is None
    world.pass_time(EXIT_S + 0.1)
    assert world.channel.taken("all at exit") == [1]
    assert not world.monitor.all_at_exit["none_unknown"]


@pytest.mark.parametrize("came", [False, True])
def test_a_process_that_ends_after_the_world_is_lost_once_all_others_are_at_the_exit(make, came):
    world = make(0)
    world.hear(2, "at exit" if came else "left", idle=True)
    world.monitor.on_disconnected(2, None)
    come(world, 1)
    assert world.ends == []  # rank 0 has work left
    come(world, 0)
    said = "rank 2 on b is lost: its process has ended without the end of MPI"
    assert world.ends[0][1][0] == said


def test_a_host_of_which_no_rank_answers_is_told_early_to_those_who_start_the_job(make):
    world = make(0)
    for seconds, told in ((1.0, 0), (2.5, 1), (9.0, 2)):  # half of lost_after; again soon
        world.pass_time(5.0)
        world.waits = {0: seconds, 1: seconds}
        world.hear(0, "waiting", ends=False)
        world.answer(1)
        world.pass_time(ANSWER_S + 1)
        assert len(world.warnings) == told
    head = world.warnings[0].splitlines()[0]
    assert head == (
        "ranks 0, 1 on a have waited 2 s for rank 2 on b, which does not answer; no rank on b "
        "answers"
    )
    assert silent_hosts(f"mntrain: warning: {head}") == ["b"]
    world.pass_time(10.0)
    world.waits = {0: 100.0, 1: 100.0}
    world.hear(0, "waiting", ends=True)
    world.answer(1)
    world.pass_time(ANSWER_S + 1)
    ((report, _),) = world.ends
    assert silent_hosts(f"mntrain: error: {report.splitlines()[0]}") == []


@pytest.mark.parametrize("kind", ["it answers", "its node does not", "it is not connected"])
def test_a_host_is_not_told_early_if_a_rank_answers_or_nothing_is_known_of_it(make, kind):
    world = make(0)
    world.waits = {0: 4.0, 1: 4.0}
    if kind == "its node does not":
        world.channel.cut.add(2)
    elif kind == "it is not connected":
        world.channel.peers.remove(2)
    world.hear(0, "waiting", ends=False)
    world.answer(1, *([2] if kind == "it answers" else []))
    world.pass_time(ANSWER_S + 1)
    assert world.warnings == []


@pytest.mark.parametrize("answers", [False, True])
def test_a_host_is_not_told_early_if_another_rank_of_it_answers(make, answers):
    world = make(0, hosts="abb", keys=(0, 1, 1))
    world.waits = {0: 4.0, **({1: 4.0} if answers else {})}
    world.hear(0, "waiting", ends=False)
    world.answer(*([1] if answers else []))
    world.pass_time(ANSWER_S + 1)
    assert [silent_hosts(f"mntrain: warning: {text}") for text in world.warnings] == (
        [] if answers else [["b"]]
    )
