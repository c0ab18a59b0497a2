"""The machine that has ended a command, if one has, and by whose word."""

from types import SimpleNamespace

import pytest

from mntrain.launch.verdict import choose, judge
from mntrain.recorder.late_ranks import Wait
from mntrain.watchdog import unanswered
from mntrain.watchdog.monitor import Inquiry
from mntrain.watchdog.rank_status import RankStatus
from mntrain.watchdog.unanswered import Connection

LOST = "mntrain: error: ranks 2, 3 on n2 are lost: the node, or the network to it, does not answer"
WORDLESS = "mntrain: error: rank 1 on n2 is lost: its process has ended without a word"
FAILED = "mntrain: rank 1 of 4 on n2 failed:\nTraceback (most recent call last):\nKeyError: 'x'\n"
OF_MPI = FAILED.replace("KeyError: 'x'", "mpi4py.MPI.Exception: MPI_ERR_PROC_FAILED")
HYDRA = """=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT n3
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: {}
"""
PRTE = "prterun noticed that process rank 1 with PID 25067 on node n3 exited on\nsignal {}.\n"
SPAWNED = """A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the executable.

  Local host:    n1
  Remote host:   n6
  Daemon exit status: 0
"""
CANCELLED = "slurmstepd-n1: error: *** STEP 4.0 ON n1 CANCELLED AT 2026-11-29T19:09:54{} ***\n"
STALL = "mntrain: error: ranks 0, 1 on n1 have waited 40 s for rank 2 on n2"


@pytest.mark.parametrize(
    ("output", "by", "hosts"),
    [
        (LOST, "the ranks", ("n2",)),
        (f"{LOST.replace('2, 3 on n2', '0 on n1, 3 on n2')}", "the ranks", ("n1", "n2")),
        ("mntrain: error: rank 5 has lost its connections to ranks 0 and 1", "the ranks", ()),
        (f"{STALL}, which does not answer", "the ranks", ("n2",)),
        (
            "mntrain: error: rank 2 has waited 61 s, and ranks 0, 1 on n1 do not answer",
            "the ranks",
            ("n1",),
        ),
        ("mntrain: error: n1 has had no answer from 10.0.0.2 for 20 s", "the ranks", ("10.0.0.2",)),
        (f"{OF_MPI}{LOST}", "the ranks", ("n2",)),
        (f"mntrain: error: caught by the script\n{LOST}", "the ranks", ("n2",)),
        (HYDRA.format("Killed (signal 9)"), "mpirun", ("n3",)),
        (HYDRA.format("Bus error (signal 7)"), "mpirun", ("n3",)),
        (HYDRA.rpartition("YOUR APP")[0], "mpirun", ("n3",)),  # its daemons have ended too early
        (PRTE.format("9 (Killed)"), "mpirun", ("n3",)),
        (f"{OF_MPI}{PRTE.format('9 (Killed)')}", "mpirun", ("n3",)),
        ("PRTE has lost communication with a remote daemon.", "mpirun", ()),
        (SPAWNED, "mpirun", ("n6",)),
        ("srun: error: Node failure on n2\nsrun: error: n1: task 0: Killed", "srun", ("n2",)),
        ("srun: error: n2: task 1: Out Of Memory", "srun", ("n2",)),
        (  # with --kill-on-bad-exit
            f"srun: error: n2: task 1: Killed\n{CANCELLED.format('')}"
            "srun: error: n1: task 0: Exited with exit code 1",
            "srun",
            ("n2",),
        ),
        (CANCELLED.format(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG"), "srun", ()),
        (f"{CANCELLED.format('')}srun: error: Node failure on n2", "srun", ("n2",)),
        (f"{WORDLESS}\n{HYDRA.format('Killed (signal 9)')}", "the ranks", ("n2",)),
        (f"{WORDLESS}\n{HYDRA.format('Aborted (signal 6)')}", "the ranks", ("n2",)),
        ("ssh: connect to host n2 port 22: No route to host", "ssh", ("n2",)),
    ],
)
def test_losses_and_kills_are_faults_of_machines(output, by, hosts):
    for code in (0, 1):  # Open MPI's mpirun may return 0
        verdict = judge(code, f"step 1\n{output}\nmore", None)
        assert (verdict.fault, verdict.by, verdict.hosts) == (True, by, hosts)


@pytest.mark.parametrize(
    ("code", "output", "by"),
    [
        (1, FAILED, "the ranks"),
        (1, f"{FAILED}{HYDRA.format('Killed (signal 9)')}", "the ranks"),
        (1, STALL, "the ranks"),
        (1, "mntrain: error: loss is nan after step 3", "the ranks"),
        (3, "mntrain: rank 1 of 2 on n2 left the job with exit code 3", "the ranks"),
        (139, HYDRA.format("Segmentation fault (signal 11)"), "mpirun"),
        (139, PRTE.format("11 (Segmentation fault)"), "mpirun"),
        (139, f"{WORDLESS}\n{HYDRA.format('Segmentation fault (signal 11)')}", "mpirun"),
        (1, f"{WORDLESS}\n{PRTE.format('8 (Floating point exception)')}", "mpirun"),
        (1, f"MPI_ABORT was invoked on rank 1\n{PRTE.format('9 (Killed)')}", "mpirun"),
        (1, "srun: error: n2: task 1: Exited with exit code 1\nsrun: error: n1: task 0: Killed",
         "srun"),
        (137, f"{CANCELLED.format('')}srun: error: n1: tasks 0-3: Killed", "srun"),
        (137, f"{CANCELLED.format(' DUE TO TIME LIMIT')}srun: error: n1: task 0: Killed", "srun"),
        (2, "", "the exit code"),
        (75, "", "the exit code"),
        (130, "", "the exit code"),
    ],
)  # fmt: skip
def test_errors_and_clean_ends_are_none(code, output, by):
    verdict = judge(code, output, None)
    assert (verdict.fault, verdict.by) == (False, by)


def test_the_words_of_mpirun_are_one_short_sentence():
    found = judge(9, HYDRA.format("Killed (signal 9)"), None)
    assert found.said == "a rank on n3 ended: Killed (signal 9) (says mpirun)"
    found = judge(9, PRTE.format("9 (Killed)"), None)
    assert found.said == (
        "process rank 1 with PID 25067 on node n3 exited on signal 9 (says mpirun)"
    )


def test_the_summary_of_the_run_has_the_first_word():
    for status in ("completed", "stopped", "preempted", "interrupted"):
        assert judge(1, LOST, {"status": status}).fault is False
    lost = {"status": "lost", "reason": LOST.removeprefix("mntrain: error: ")}
    found = judge(0, FAILED, lost)
    assert (found.fault, found.by, found.hosts) == (True, "summary.json", ("n2",))
    crashed = {"status": "crashed", "reason": "rank 1 of 4 on n2 failed with KeyError: 'x'"}
    assert judge(1, LOST, crashed).fault is False
    of_mpi = {"status": "crashed", "reason": "rank 0 of 4 on n1 failed with Exception: MPI_ERR_X"}
    assert judge(1, LOST, of_mpi).fault is True
    other = {"status": "lost", "reason": "another job uses runs/a"}
    assert judge(1, "", other).fault is False


@pytest.mark.parametrize(
    "words",
    [
        "the loader cannot connect to db:5432 (Name or service not known)",
        "rank file: 3 rows are lost: shard 7",
        "ranks 1 to 4 of the tensor are lost: its process is not invertible",
        "db has connected to n2, but what it sends does not arrive",
        "the loader has had no answer from db for 20 s",
        "n1 has had no answer from db for long",
        "messages between them do not arrive",
        f"see {LOST}",
    ],
)
def test_the_words_of_users_exceptions_are_no_reports_of_losses(words):
    for line in (words, f"rank 1 of 2 on n1 failed: E: {words}", f"rank 0: E: {words}"):
        assert judge(1, f"mntrain: error: {line}\n", None).fault is False
    for reason in (words, LOST.removeprefix("mntrain: error: ")):
        said = {"status": "crashed", "reason": f"rank 0 of 2 on n1 failed with E: {reason}"}
        assert judge(1, "", said).fault is False
        assert judge(1, "", {"status": "failed", "reason": reason}).fault is False
        assert judge(1, f"mntrain: rank 0 of 2 on n1 failed: {reason}", None).fault is False


@pytest.mark.parametrize("node", ["10.0.0.2", "fd00::2"])
def test_losses_in_the_words_of_the_watchdog_are_known(monkeypatch, node):
    facts = [SimpleNamespace(host=f"n{rank // 3}", host_key=rank // 3) for rank in range(6)]
    wait = Wait("world", 1, "all_reduce", "", 61.0)
    status = RankStatus({"world": 2}, wait, "", "")
    waiting = dict.fromkeys(range(3), status._replace(begun={"world": 1}))
    stopped = dict.fromkeys(range(3, 6), "stopped")
    names = [f"n1 ({node})"]
    monkeypatch.setattr(unanswered, "_names", lambda addresses: names[0])
    unopened = Connection(node, 1, node, 7, opened=False)
    sentences = [unanswered.describe([unopened._replace(opened=up)]) for up in (False, True)]
    waits = Inquiry(facts, (), 0.0, statuses=waiting, silent=stopped).headline()
    of_start = f"n0 has had no answer from {node} for 20 s"
    for report in (*sentences, waits, f"{waits}; {sentences[0]}", of_start):
        found = judge(1, f"mntrain: error: {report}\n", None)
        host = node if report == of_start else "n1"
        assert (found.fault, found.hosts) == (True, (host,)), report
    names[0] = node
    found = judge(1, f"mntrain: error: {unanswered.describe([unopened])}", None)
    assert found.hosts == (node,)
    everyone = Inquiry(facts, (), 0.0, statuses=dict.fromkeys(range(6), status)).headline()
    assert judge(1, f"mntrain: error: {everyone}", None).fault is True


def test_a_command_that_was_killed_itself_is_told_from_others_by_its_exit_code():
    assert [judge(code, "", None).fault for code in (137, 135, 143, 139)] == [
        True,
        True,
        None,
        None,
    ]


def test_what_nobody_explains_is_left_to_the_hosts():
    assert judge(9, HYDRA.format("Terminated (signal 15)"), None).fault is None
    assert judge(255, "Connection to n2 closed", None).fault is None
    assert judge(0, "", None).fault is None  # Open MPI's mpirun after a loss


def test_hosts_keep_their_places_and_those_that_lost_a_rank_come_last():
    now = ["a", "b", "c"]
    assert choose(now, ["a", "b", "c", "d"], [], 3) == now
    assert choose(now, ["a", "c", "d"], [], 3) == ["a", "d", "c"]
    assert choose(now, ["a", "b", "c", "d"], ["a"], 3) == ["d", "b", "c"]
    assert choose(now, ["a", "b", "c"], ["a"], 3) == now
    assert choose(now, ["b", "c"], ["b"], 3) == ["b", "c"]
    assert choose(["a", "c"], ["a", "b", "c"], [], 3) == ["a", "c", "b"]
    assert choose(now, [], [], 3) == []


def test_a_line_of_a_rank_among_those_of_a_banner_hides_no_kill():
    banner = [
        "=   PID 9889 RUNNING AT n2",
        "=   EXIT CODE: 9",
        "=   CLEANING UP REMAINING PROCESSES",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
    ]
    for place in range(1, len(banner)):
        output = "\n".join([*banner[:place], "step 7", *banner[place:], ""])
        cause = judge(9, output, None)
        assert (cause.fault, cause.hosts) == (True, ("n2",))


def test_a_banner_ends_where_it_has_told_its_signal():
    told = "RUNNING AT {}\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: {}\n"
    output = told.format("n1", "Terminated (signal 15)") + told.format("n2", "Killed (signal 9)")
    assert judge(9, output, None).hosts == ("n2",)
