"""Who stopped first, by recordings written by hand."""

import pytest

from mntrain.recorder.autopsy import describe
from mntrain.recorder.autopsy_diagnosis import Autopsy
from mntrain.recorder.recording import ALL_RANKS, GROUP, Event, Header, Kind, Recording


def begins(time, number, stream="the world", awaited=ALL_RANKS):
    return Event(time, Kind.COLLECTIVE_BEGINS, number, awaited, stream, "all_reduce", "train.py:9")


def done(time, number, stream="the world"):
    return Event(time, Kind.COLLECTIVE_ENDS, number, name=stream)


def phase(time, name, step=1):
    return Event(time, Kind.PHASE_BEGINS, step, name=name)


def error(time, text="KeyError: 3", kind=Kind.ERROR):
    return Event(time, kind, text=text, site="train.py:4")


def end(time):
    return Event(time, Kind.END)


def sigterm(time):
    return Event(time, Kind.SIGNAL, 15, text="SIGTERM")


def recording(rank, *events, size=3, seen=None, complete=True):
    """`seen`: the time of the last sign of life."""
    header = Header(rank, size, "job", "node", 100 + rank, "1", "boot", "pids", 1000.0 + rank, 0.0)
    sign = None if seen is None else Event(seen, Kind.SIGN_OF_LIFE, site="model.py:7")
    return Recording(header, events, complete, sign)


def waits(rank, number=1, since=2.0, seen=9.0, **options):
    """A rank that has done all collectives before `number`, and waits in that one."""
    return recording(rank, begins(1, 0), done(1.1, 0), begins(since, number), seen=seen, **options)


def computes(rank, seen=9.0, *events, **options):
    """A rank that has done collective 0, and then the events."""
    return recording(rank, begins(1, 0), done(1.1, 0), *events, seen=seen, **options)


def diagnose(recordings, **facts):
    diagnosis = Autopsy({recording.header.rank: recording for recording in recordings}, **facts)
    diagnosis.first, diagnosis.missing = tuple(diagnosis.first), tuple(diagnosis.missing)
    return diagnosis


def found(*recordings, **facts):
    diagnosis = diagnose(recordings, **facts)
    return diagnosis.state, diagnosis.first, diagnosis.sure


def test_ranks_that_closed_the_world_ended_well():
    ranks = [computes(rank, 3.0, end(4)) for rank in range(3)]
    assert found(*ranks) == ("ended well", (), True)
    assert found(*ranks, summary={"status": "preempted"})[0] == "ended well"
    assert found(*ranks, summary={"status": "failed", "error": "NaN"})[0] == "failed"
    assert diagnose(ranks, summary={"status": "failed", "error": "NaN"}).cause == "NaN"


def test_a_rank_that_others_wait_for_stopped_first():
    assert found(waits(0), computes(1), waits(2)) == ("failed", (1,), True)


def test_waiting_ranks_are_named_with_what_they_wait_in():
    diagnosis = diagnose([waits(0), computes(1), waits(2)])
    assert {rank: wait.number for rank, ((wait, _),) in diagnosis.waits.items()} == {0: 1, 2: 1}


def test_ranks_that_wait_in_one_call_stand_in_one_line_however_long_each_has_waited():
    for since, seconds in ((2.0, "7"), (3.6, "5 to 7")):
        diagnosis = diagnose([waits(0), computes(1), waits(2, since=since)])
        (line,) = (line for line in describe(diagnosis) if "waiting" in line)
        assert "waiting   ranks 0, 2 on node in all_reduce" in line
        assert f", for {seconds} s, at train.py:9" in line


def test_a_rank_that_waits_for_another_one_is_not_the_first():
    # Rank 0 waits for rank 1, which waits in another stream for rank 2.
    one = computes(1, 9.0, begins(2, 0, "optimizer 1"))
    zero = computes(0, 9.0, begins(2, 0, "optimizer 1"), done(3, 0, "optimizer 1"), begins(4, 1))
    two = computes(2, 9.0)
    assert found(zero, one, two)[1:] == ((2,), True)


def test_ranks_that_wait_for_each_other_are_named_together():
    zero = computes(0, 9.0, begins(2, 0, "optimizer 1"))
    one = computes(1, 9.0, begins(2, 1))
    diagnosis = diagnose([zero, one])
    assert diagnosis.first == (0, 1)
    assert "wait for each other" in diagnosis.cause


def test_a_job_that_was_killed_as_a_whole_is_no_rank_s_fault_for_certain():
    # Rank 1 is late by half a second, as in any healthy job.
    ranks = [waits(0, since=8.5), computes(1), waits(2, since=8.5)]
    assert found(*ranks) == ("failed", (1,), False)
    assert "killed as a whole" in diagnose(ranks).cause
    alike = [waits(rank, since=8.9) for rank in range(3)]
    assert found(*alike) == ("failed", (), False)


def test_a_rank_without_the_signal_that_the_others_got_died_before():
    ranks = [
        computes(0, 9.0, begins(8.5, 1), sigterm(9)),
        computes(1, 8.0),
        computes(2, 9.0, begins(8.5, 1), sigterm(9)),
    ]
    assert found(*ranks) == ("failed", (1,), True)


def test_a_rank_that_all_wait_with_is_found_by_its_last_sign_of_life():
    # Stopped inside the collective that all have begun.
    ranks = [waits(0, seen=40.0), waits(1, seen=3.0), waits(2, seen=40.0)]
    assert found(*ranks)[:2] == ("failed", (1,))
    assert "SIGSTOP" in diagnose(ranks).cause


def test_clocks_of_hosts_do_not_matter():
    ranks = [waits(0), computes(1), waits(2)]
    shifted = Recording(
        Header(**{**vars(ranks[0].header), "wall": 9e8, "monotonic": 5e5}), ranks[0].events
    )
    assert found(shifted, *ranks[1:])[:2] == ("failed", (1,))


def test_the_first_of_two_exceptions_counts():
    ranks = [computes(0, 9.0, error(5)), computes(1, 9.0, error(4, "OSError")), waits(2)]
    diagnosis = diagnose(ranks)
    assert diagnosis.first == (1,)
    assert "OSError" in diagnosis.cause
    assert "train.py:4" in diagnosis.fix


def crash(time, text="Segmentation fault"):
    return Event(time, Kind.CRASH, text=text, site="native.py:3")


def saw(time, rank):
    return Event(time, Kind.PEER_ENDED, rank)


def test_a_crash_of_native_code_is_named_for_certain_even_if_no_rank_is_behind():
    ranks = [computes(0, 1.0), computes(1, 1.0, crash(1)), computes(2, 1.0)]
    diagnosis = diagnose(ranks, processes=dict.fromkeys(range(3), "gone"))
    assert (diagnosis.state, diagnosis.first, diagnosis.sure) == ("failed", (1,), True)
    assert diagnosis.cause == "native code crashed: Segmentation fault"
    assert "native.py:3" in diagnosis.fix
    assert "in no collective" not in "".join(describe(diagnosis))


def test_the_process_that_others_saw_end_first_probably_stopped_first():
    # Each was killed within the first second: rank 2 first, and the launcher killed the others.
    ranks = [computes(0, 1.0, saw(0.7, 2), saw(0.9, 1)), computes(1, 0.9, saw(0.8, 2))]
    ranks.append(computes(2, 0.6))
    for processes in ({}, dict.fromkeys(range(3), "gone")):
        diagnosis = diagnose(ranks, processes=processes)
        assert (diagnosis.first, diagnosis.sure) == ((2,), False)
        assert "killed (SIGKILL) or crashed" in diagnosis.cause
    assert found(*ranks, processes={0: "runs", 1: "gone", 2: "runs"})[1] == (1,)


def test_an_error_of_all_ranks_blames_none():
    text = "AgreedError: in step 2, the loss is nan on rank 1"
    ranks = [computes(r, 9.0, error(5, text, Kind.SHARED_ERROR), end(6)) for r in range(3)]
    diagnosis = diagnose(ranks, summary={"status": "failed"})
    assert (diagnosis.state, diagnosis.first, diagnosis.cause) == ("failed", (), text)


def test_a_rank_without_the_error_that_others_raise_while_they_wait_stopped_first():
    text = "RemoteRankError: rank 1 is lost"
    waiting = [computes(r, 40.0, begins(2, 1), error(30, text, Kind.SHARED_ERROR)) for r in (0, 2)]
    diagnosis = diagnose([waiting[0], computes(1, 3.0), waiting[1]])
    assert (diagnosis.first, diagnosis.sure) == ((1,), True)
    assert "SIGKILL" in diagnosis.cause


def test_a_rank_that_ended_its_program_stopped_first():
    diagnosis = diagnose([waits(0), computes(1, 2.0, end(2)), waits(2)])
    assert (diagnosis.first, diagnosis.sure) == ((1,), True)
    assert "ended its program" in diagnosis.cause


def test_a_rank_that_is_left_alone_at_the_end_is_named():
    ranks = [computes(0, 3.0, end(4)), computes(1, 3.0), computes(2, 3.0, end(4))]
    assert found(*ranks) == ("failed", (1,), True)


@pytest.mark.parametrize("awaited", [0, 1, 2])
def test_a_broadcast_waits_for_its_root_until_that_has_begun(awaited):
    waiting = computes(2, 9.0, begins(2, 1, awaited=awaited))
    first = found(computes(0, 9.0), computes(1, 9.0), waiting)[1]
    assert first == ((awaited,) if awaited != 2 else (0, 1))


def test_a_rank_outside_of_a_group_is_not_waited_for():
    name = "the node group of rank 0"
    two = [computes(r, 9.0, begins(2, 0, name, GROUP)) for r in (0, 1)]
    assert found(*two, computes(2, 9.0)) == ("failed", (), False)


def test_a_rank_whose_older_events_are_lost_is_not_accused():
    waiting = computes(0, 9.0, begins(2, 5, "rare"), size=2)
    assert found(waiting, computes(1, 9.0, size=2))[1] == (1,)
    assert found(waiting, computes(1, 9.0, size=2, complete=False))[1] == ()


def test_a_missing_recording_is_told():
    diagnosis = diagnose([waits(0), waits(2)])
    assert (diagnosis.missing, diagnosis.first, diagnosis.sure) == ((1,), (1,), False)
    assert "could record" in diagnosis.cause
    late = diagnose([waits(0), computes(2)])
    assert (late.missing, late.first) == ((1,), (2,))


def test_processes_decide_between_dead_stopped_and_slow():
    ranks = [waits(0), computes(1), waits(2)]
    for state, said in (("stopped", "SIGSTOP"), ("runs", "it runs, but"), ("gone", "killed")):
        processes = {0: "runs", 1: state, 2: "runs"}
        diagnosis = diagnose(ranks, processes=processes)
        assert (diagnosis.first, diagnosis.sure) == ((1,), True), state
        assert diagnosis.state == ("runs" if state == "runs" else "failed")
        assert said in diagnosis.cause, state


def test_a_job_that_runs_is_not_called_dead():
    ranks = [waits(0, since=8.5), computes(1), waits(2, since=8.5)]
    assert found(*ranks, processes=dict.fromkeys(range(3), "runs"))[0] == "runs"
    assert found(*ranks, now=1015.0)[0] == "runs"  # on other hosts, seen some seconds ago
    assert found(*ranks, now=1500.0)[0] == "failed"
    assert found(*ranks, now=1015.0, processes={0: "gone"})[0] == "failed"


def test_the_kernel_and_the_scheduler_are_heard():
    ranks = [waits(0), computes(1), waits(2)]
    killed = diagnose(ranks, oom_kills={1: 1})
    assert "lack of memory" in killed.cause
    assert "--train.micro-batch-size" in killed.fix
    out = diagnose([waits(r) for r in range(3)], scheduler="TIMEOUT")
    assert "TIMEOUT" in out.cause
    assert "--run.max-minutes" in out.fix


def test_a_job_that_was_told_to_end_and_killed_says_so():
    ranks = [computes(r, 9.0, sigterm(5)) for r in range(3)]
    diagnosis = diagnose(ranks)
    assert (diagnosis.first, "SIGTERM" in diagnosis.cause) == ((), True)


def test_the_phase_is_the_innermost_open_one_and_that_of_an_error():
    nested = [phase(1, "forward"), Event(2, Kind.PHASE_ENDS, name="forward"), phase(3, "backward")]
    assert recording(0, *nested).phase.name == "backward"
    failed = recording(0, *nested, error(4), phase(5, "close"))
    assert failed.phase.name == "backward"
    unopened = recording(0, Event(2, Kind.PHASE_ENDS, name="data"), phase(3, "forward"))
    assert unopened.phase.name == "forward"
