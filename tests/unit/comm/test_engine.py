"""The progress engine, with operations of a test kind that need no MPI."""

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from itertools import cycle
from types import SimpleNamespace

import pytest
from waiting import until

from mntrain.comm import clock
from mntrain.comm import engine as module
from mntrain.comm.engine import Pipelined, ProgressEngine, UnorderedStream
from mntrain.comm.shared_memory import DEPTH
from mntrain.comm.ticket import Signature, Ticket
from mntrain.comm.world_collectives import expect, when_done
from zero.collectives import CompletedWork

WINDOW = 5


@pytest.fixture
def engine():
    engine = ProgressEngine()
    yield engine
    engine.close()


class Steps:
    """A pipelined collective of some chunks that waits at its gates and logs its steps."""

    def __init__(self, log, name, count=1, max_in_flight=WINDOW, *, alone=True, **gates):
        self.log, self.name, self.count = log, name, count
        self.gates = gates  # by step: what must be true before it is done
        self.moving = 0
        self.begun = False
        self.work = Pipelined(self.steps(), max_in_flight, alone)

    def passes(self, step):
        return self.gates.get(step, lambda: True)()

    def steps(self):
        self.begun = True
        yield lambda: self.passes("enter")
        self.note("enter")
        yield lambda: self.passes("all_entered")
        yield self.chunks()
        self.leave()
        yield lambda: self.passes("all_left")
        return self.finish()

    def chunks(self):
        for index in range(self.count):
            yield index, self.chunk(index)

    def chunk(self, index):
        self.note("start", index)
        self.moving += 1
        yield lambda: self.passes("chunk")
        yield lambda: self.passes(index)
        self.moving -= 1
        self.note("end", index)

    def leave(self):
        self.note("leave")

    def finish(self):
        self.note("finish")
        return self.name

    def note(self, step, *more):
        self.log.append((self.name, step, *more))


def of(log, step):
    return [entry[0] for entry in log if entry[1] == step]


@pytest.mark.parametrize("wakes", [True, False])
def test_an_operation_goes_through_its_steps_in_order(engine, wakes):
    log = []
    assert engine.submit(Steps(log, "a", count=2).work, wake=wakes).wait() == "a"
    pieces = [("a", "start", 0), ("a", "end", 0), ("a", "start", 1), ("a", "end", 1)]
    assert log == [("a", "enter"), *pieces, ("a", "leave"), ("a", "finish")]


def test_the_waiting_thread_alone_progresses_an_operation_that_wakes_nobody(engine):
    log, threads, answers = [], set(), cycle([False, False, True])

    def after_a_while():
        threads.add(threading.get_ident())
        return next(answers)

    gates = dict.fromkeys(("enter", "all_entered", "chunk", "all_left"), after_a_while)
    before = engine.busy_s
    assert engine.submit(Steps(log, "a", count=2, **gates).work, wake=False).wait() == "a"
    assert threads == {threading.get_ident()}
    assert engine.busy_s > before


@pytest.mark.parametrize("of_objects", [False, True])
def test_a_wait_is_counted_and_told_once_also_if_it_raises(engine, of_objects):
    told, due = [], time.monotonic() + 0.1
    engine.observe = lambda name, start: told.append(name)

    def steps():
        yield lambda: time.monotonic() > due
        raise OSError("no way")

    future = engine.submit(steps())
    future.of_objects = of_objects
    for _ in range(2):
        with pytest.raises(OSError, match="no way"):
            future.wait()
    waited_s, other_s = engine.waited_s, engine.gathered_s
    if of_objects:
        waited_s, other_s = other_s, waited_s
    assert 0.0 < waited_s < 60.0
    assert other_s == 0.0
    assert told == ["wait"]


def test_work_that_is_asked_for_progresses_without_a_wait_and_after_waits_for_other_work(engine):
    gate, stream = threading.Event(), engine.add_stream("other")
    first = engine.submit(Steps([], "a").work, wake=False)
    behind = engine.submit(Steps([], "b", chunk=gate.is_set).work, wake=False)
    assert not first.done()
    until(first.done)
    assert not behind.done()
    assert engine.submit(Steps([], "c").work, wake=False, stream=stream).wait() == "c"
    gate.set()
    until(lambda: behind.ended)
    assert behind.done()
    assert behind.wait() == behind.wait() == "b"


def test_asking_for_work_raises_the_error_that_has_ended_communication(engine):
    never = threading.Event()
    work = engine.submit(Steps([], "a", chunk=never.is_set).work)
    assert not work.done()
    engine.stop(ValueError("rank 3 has failed"))
    with pytest.raises(ValueError, match="rank 3 has failed"):
        work.done()


@pytest.mark.parametrize("wakes", [True, False])
def test_a_thread_that_turns_to_another_engine_wakes_the_thread_of_the_first(engine, wakes):
    other = ProgressEngine()
    small = engine.submit(Steps([], "a").work, wake=False)
    other.submit(Steps([], "b", chunk=lambda: small.ended).work, wake=wakes).wait()
    assert small.ended
    other.close()


@pytest.mark.parametrize("chunked", [True, False])
def test_what_wakes_no_thread_is_left_until_somebody_waits(engine, chunked):
    log, gate = [], threading.Event()

    def work(name, test):
        return Steps(log, name, chunk=test).work if chunked else alone(log, name, test)

    first = engine.submit(work("a", lambda: True), wake=False)
    second = engine.submit(work("b", gate.is_set), wake=False)
    time.sleep(0.05)
    assert not log
    assert first.wait() == "a"
    gate.set()
    time.sleep(0.05)
    assert not second.ended
    assert second.wait() == "b"
    assert of(log, "enter") == ["a", "b"]


def test_what_gathers_is_left_to_who_waits_or_begins_with_what_does_not_gather(engine, monkeypatch):
    monkeypatch.setattr(module, "GATHER_S", 100.0)
    log, threads = [], set()

    def test():
        threads.add(threading.get_ident())
        return True

    gathered = [engine.submit(alone(log, name, test), gather=True) for name in "ab"]
    until(lambda: engine._gathering)
    gathered += [engine.submit(alone(log, name, test), gather=True) for name in "cd"]
    time.sleep(0.05)
    assert not log
    assert gathered[-1].wait() == "d"
    assert threads == {threading.get_ident()}
    gathered = engine.submit(alone(log, "e", test), gather=True)
    time.sleep(0.05)
    assert not gathered.ended
    last = engine.submit(alone(log, "f", test))
    until(lambda: last.ended)
    assert of(log, "enter") == [*"abcdef"]
    assert gathered.ended


def test_what_gathers_begins_after_a_while_without_a_caller(engine, monkeypatch):
    monkeypatch.setattr(module, "GATHER_S", 0.05)
    for _ in range(3):
        futures = [engine.submit(alone([], name, lambda: True), gather=True) for name in "abc"]
        assert not futures[0].ended
        until(lambda futures=futures: futures[-1].ended)


@pytest.mark.parametrize(
    ("gate", "seen"),
    [
        ("enter", []),
        ("all_entered", ["enter"]),  # for others may be waiting for that
        ("chunk", ["enter", "start", "end"]),
        ("all_left", ["enter", "start", "end", "leave"]),
    ],
)
def test_each_step_comes_after_that_of_the_collective_ahead(engine, gate, seen):
    log, event = [], threading.Event()
    ahead, behind = Steps(log, "a", **{gate: event.is_set}), Steps(log, "b")
    futures = [engine.submit(one.work) for one in (ahead, behind)]
    until(lambda: [entry[1] for entry in log if entry[0] == "b"] == seen and behind.begun)
    time.sleep(0.01)
    assert [entry[1] for entry in log if entry[0] == "b"] == seen
    event.set()
    assert [future.wait() for future in reversed(futures)] == ["b", "a"]
    for step in ("enter", "start", "leave", "finish"):
        assert of(log, step) == ["a", "b"]


def test_so_many_are_entered_and_so_many_pieces_under_way_and_no_more(engine):
    log, gate = [], threading.Event()
    names = list(range(3 * DEPTH))
    futures = [engine.submit(Steps(log, name, all_left=gate.is_set).work) for name in names]
    until(lambda: len(of(log, "leave")) >= DEPTH)
    time.sleep(0.01)
    assert of(log, "enter") == names[:DEPTH]
    gate.set()
    assert [future.wait() for future in futures] == names
    assert of(log, "enter") == names
    log.clear()
    gate.clear()
    several = [Steps(log, name, count=WINDOW - 2, chunk=gate.is_set) for name in "abc"]
    futures = [engine.submit(one.work) for one in several]
    until(lambda: len(of(log, "start")) >= WINDOW)
    time.sleep(0.01)
    assert [one.moving for one in several] == [WINDOW - 2, 2, 0]
    gate.set()
    for future in futures:
        future.wait()
    starts = [entry[::2] for entry in log if entry[1] == "start"]
    assert starts == [(name, index) for name in "abc" for index in range(WINDOW - 2)]


def test_a_piece_that_waits_does_not_hold_the_next_ones(engine):
    log, gate = [], threading.Event()
    slow = Steps(log, "a", count=2 * WINDOW)
    slow.gates[0] = gate.is_set
    future = engine.submit(slow.work)
    until(lambda: ("a", "end", 2 * WINDOW - 1) in log)
    assert ("a", "end", 0) not in log
    gate.set()
    future.wait()
    assert ("a", "end", 0) in log


# Steps that run alone.


def alone(log, name, test=lambda: True):
    log.append((name, "enter"))
    yield test
    log.append((name, "finish"))
    return name


@pytest.mark.parametrize("function", [True, False])
def test_functions_and_steps_run_alone_and_in_their_turn(engine, function):
    log, gate = [], threading.Event()
    engine.submit(Steps(log, "a", chunk=gate.is_set).work)
    until(lambda: of(log, "start") == ["a"])
    steps = alone(log, "b")
    second = engine.call(lambda: list(steps)) if function else engine.submit(steps)
    third = engine.submit(Steps(log, "c").work)
    time.sleep(0.01)
    assert of(log, "enter") == ["a"]
    gate.set()
    assert third.wait() == "c"
    second.wait()
    assert of(log, "enter") == of(log, "finish") == ["a", "b", "c"]
    assert log.index(("b", "finish")) < log.index(("c", "enter"))


@pytest.fixture
def raising_signal():
    """A signal whose handler raises, as torch's does when a process of a DataLoader has died."""

    def handle(number, frame):
        raise RuntimeError("a worker is killed")

    before = signal.signal(signal.SIGUSR1, handle)
    yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_a_signal_handler_raises_reaches_who_drives(engine, raising_signal, chunked, error):
    def test():
        if error is KeyboardInterrupt:
            raise error("a worker is killed")
        raising_signal()
        return False

    first = engine.submit(
        Steps([], "a", chunk=test).work if chunked else alone([], "a", test), wake=False
    )
    second = engine.submit(alone([], "b"), wake=False)
    with pytest.raises(error, match="a worker is killed"):
        second.wait()  # else it might wait for ranks that wait for this one in the first
    assert second.wait() == "b"
    with pytest.raises(error, match="a worker is killed"):
        first.wait()


@pytest.mark.parametrize("waits", [True, False])
def test_a_signal_handler_that_communicates_within_a_wait_or_a_message_is_refused(engine, waits):
    log, sent = [], []

    def communicate(number, frame):
        engine.submit(alone(log, "b"), stream=messages).wait()

    def test():
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGUSR1)
        return True

    messages = UnorderedStream("messages")
    engine.streams.append(messages)
    before = signal.signal(signal.SIGUSR1, communicate)
    try:
        with pytest.raises(RuntimeError, match=r"signal handler.* world\.stop_requested"):
            engine.submit(
                alone(log, "a", test), stream=None if waits else messages, wake=False
            ).wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert engine.submit(alone(log, "c")).wait() == "c"


# Streams.


def test_a_stream_does_not_wait_for_another_one(engine):
    log, gate = [], threading.Event()
    other = engine.add_stream("other")
    first = engine.submit(Steps(log, "a", chunk=gate.is_set).work)
    later = engine.submit(alone(log, "b"))
    assert engine.submit(Steps(log, "c", count=3).work, stream=other).wait() == "c"
    assert engine.submit(alone(log, "d"), wake=False, stream=other).wait() == "d"
    assert [first.ended, later.ended] == [False, False]
    gate.set()
    assert (first.wait(), later.wait()) == ("a", "b")
    until(lambda: engine.idle)


def test_a_caller_returns_when_another_one_has_progressed_its_collective(engine):
    gate, own = threading.Event(), threading.Event()
    other = engine.add_stream("other")
    first = engine.submit(Steps([], "a", chunk=gate.is_set).work)
    second = engine.submit(Steps([], "b", chunk=own.is_set).work, stream=other)
    driver = threading.Thread(target=first.wait)
    driver.start()
    until(engine._turn.locked)
    waiting = threading.Thread(target=second.wait)
    waiting.start()
    time.sleep(0.05)
    own.set()
    waiting.join(120)
    assert not waiting.is_alive()
    assert driver.is_alive()
    gate.set()
    driver.join(120)


def test_ranks_do_not_compare_their_calls_in_a_short_wait(engine, monkeypatch):
    monkeypatch.setattr("mntrain.comm.engine.STALL_S", 60)
    asked, end = [], time.monotonic() + 0.1
    engine.watch = SimpleNamespace(look=asked.append)
    engine.submit(Steps([], "a", chunk=lambda: time.monotonic() > end).work).wait()
    engine.watch = None
    assert asked == []


@pytest.mark.parametrize("wakes", [True, False])
def test_a_long_wait_for_a_message_sleeps_is_busy_and_lets_ranks_compare(
    engine, monkeypatch, wakes
):
    monkeypatch.setattr("mntrain.comm.engine.STALL_S", 0.1)
    asked, pauses, end = [], [], time.monotonic() + 0.5
    stream, before, pause = UnorderedStream("messages"), engine.busy_s, clock.pause
    monkeypatch.setattr(clock, "pause", lambda seconds: (pauses.append(seconds), pause(seconds)))
    engine.streams.append(stream)
    engine.watch = SimpleNamespace(look=asked.append)
    message = engine.submit(
        alone([], "a", lambda: time.monotonic() > end), stream=stream, wake=wakes
    )
    assert message.wait() == "a"
    engine.watch = None
    assert asked
    assert max(pauses) > 0
    assert engine.busy_s - before >= 0.3


# Errors.


def fail():
    raise OSError("no way")


@pytest.mark.parametrize("wakes", [True, False])
@pytest.mark.parametrize(
    "step", ["enter", "all_entered", "chunk", "all_left", "chunks", "leave", "finish", "alone"]
)
def test_an_error_in_any_step_reaches_who_waits(engine, step, wakes):
    failing = Steps([], "a", **{step: fail})
    if step in ("chunks", "leave", "finish"):
        setattr(failing, step, fail)
    work = alone([], "a", fail) if step == "alone" else failing.work
    future = engine.submit(work, wake=wakes)
    for _ in range(2):
        with pytest.raises(OSError, match="no way"):
            future.wait()
    assert engine.submit(Steps([], "b").work, wake=wakes).wait() == "b"


def test_an_error_reaches_who_waits_for_those_behind_too_but_no_other_stream(engine):
    log, gate, other = [], threading.Event(), engine.add_stream("other")

    def fail_later():
        return gate.is_set() and fail()

    good = engine.submit(Steps([], "d", chunk=gate.is_set).work, stream=other)
    futures = [engine.submit(Steps(log, "a", chunk=fail_later).work)]
    futures += [engine.submit(Steps(log, name, all_left=lambda: False).work) for name in "bc"]
    until(lambda: of(log, "start") == ["a", "b", "c"])
    gate.set()
    for future in futures:
        with pytest.raises(OSError, match="no way"):
            future.wait()
    assert of(log, "finish") == []
    assert good.wait() == "d"


@pytest.mark.parametrize("place", ["test", "steps"])
@pytest.mark.parametrize("kind", ["chunks", "alone", "message"])
def test_what_an_error_or_interrupt_ends_keeps_the_memory_that_others_write_to(engine, kind, place):
    """The error is in a test of a collective, or in its steps; another one is in flight behind."""
    kept, gate, messages = [], threading.Event(), UnorderedStream("messages")
    engine.streams.append(messages)

    def interrupt():
        if gate.is_set():
            raise KeyboardInterrupt
        return False

    def steps(test):
        memory = Memory()
        kept.append(weakref.ref(memory))
        yield test
        interrupt()

    def work(test):
        if kind != "chunks":
            return steps(test)
        one = Steps([], "a")
        one.chunk = lambda index: steps(test)
        return one.work

    stream = messages if kind == "message" else engine.main
    tests = [interrupt if place == "test" else gate.is_set, lambda: False]
    futures = [engine.submit(work(test), wake=False, stream=stream) for test in tests]
    driver = threading.Thread(target=suppressed(futures[0].wait, KeyboardInterrupt))
    driver.start()
    until(lambda: len(kept) == (1 if kind == "alone" else 2))
    gate.set()
    driver.join(120)
    assert futures[0].ended
    engine.stop(OSError("no way"))
    futures.clear()
    gc.collect()
    assert None not in [memory() for memory in kept]


class Memory:
    """Memory that MPI writes to."""


# Who moves them.


def test_only_one_thread_at_a_time_moves_them(engine):
    inside, met = threading.Lock(), []

    def alone():
        met.append(inside.acquire(blocking=False))
        time.sleep(0)
        inside.release()
        return True

    def work(name):
        for _ in range(100):
            engine.submit(Steps([], name, enter=alone, chunk=alone, all_left=alone).work).wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(met) == 3 * 100 * 3
    assert all(met)


def test_busy_seconds_are_those_with_something_under_way(engine):
    assert engine.call(lambda: 7).wait() == 7
    end = time.monotonic() + 0.1
    before = engine.busy_s
    time.sleep(0.05)  # idle
    assert engine.busy_s == before
    engine.submit(Steps([], "a", chunk=lambda: time.monotonic() > end).work).wait()
    until(lambda: engine.busy_s > before)


# The end.


def test_close_finishes_what_is_queued_and_ends_the_thread():
    before = threading.active_count()
    engine, log = ProgressEngine(), []
    end, other = time.monotonic() + 0.02, engine.add_stream("other")

    def slow(name):
        return Steps(log, name, count=3, chunk=lambda: time.monotonic() > end).work

    futures = [engine.submit(slow(name)) for name in range(3 * DEPTH)]
    elsewhere = engine.submit(alone([], "a", lambda: time.monotonic() > end), stream=other)
    engine.close()
    assert elsewhere.ended
    assert all(future.ended for future in futures)
    assert of(log, "finish") == list(range(3 * DEPTH))
    assert [future.wait() for future in futures] == list(range(3 * DEPTH))
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="this world is closed"):
        engine.submit(Steps([], "a").work)
    with pytest.raises(RuntimeError, match="this world is closed"):
        engine.call(lambda: None)


def test_what_the_thread_is_to_do_first_is_done_by_the_thread_itself():
    threads = []
    engine = ProgressEngine(lambda: threads.append(threading.current_thread().name))
    engine.close()
    assert threads == ["mntrain communication"]


# What the observer of a stream is told.


class Told(list):
    timeline = None

    def collective_begins(self, *event):
        self.append(("begins", *event))

    def collective_ends(self, *event):
        self.append(("ends", *event))


def ticketed(engine, signature, test=lambda: True, stream=None):
    ticket = Ticket(signature, "train.py:3")
    engine.submit(alone([], "a", test), ticket=ticket, stream=stream).wait()


def test_begin_and_end_of_a_collective_are_told_with_number_call_and_line(engine):
    engine.main.observer = log = Told()
    ticketed(engine, Signature("gather"))
    ticketed(engine, Signature("broadcast", "parameters", root=2))
    engine.call(lambda: None).wait()  # local: no collective
    assert log == [
        ("begins", "the world", 0, "gather", "train.py:3", -1),
        ("ends", "the world", 0),
        ("begins", "the world", 1, "parameters: broadcast", "train.py:3", 2),
        ("ends", "the world", 1),
    ]
    log.clear()
    with pytest.raises(OSError, match="no way"):  # one that fails does not end
        ticketed(engine, Signature("gather"), fail)
    assert [event[0] for event in log] == ["begins"]
    log.clear()
    group = engine.add_stream("group", [4, 6])  # which names ranks of the world
    ticketed(engine, Signature("gather"), stream=group)
    ticketed(engine, Signature("broadcast", root=1), stream=group)
    assert [event[-1] for event in log if event[0] == "begins"] == [-2, 6]


def test_what_follows_several_works_waits_for_all_of_them_in_any_order(engine):
    gates, called, again = [False, False], threading.Event(), threading.Event()

    def steps(number):
        yield lambda: gates[number]

    streams = [engine.add_stream(f"stream {number}") for number in range(2)]
    works = [engine.submit(steps(number), stream=stream) for number, stream in enumerate(streams)]
    when_done([CompletedWork(), *works], called.set)
    gates[1] = True
    assert not called.wait(0.2)
    gates[0] = True
    assert called.wait(120)
    when_done(works, again.set)  # they have finished
    assert again.is_set()


@pytest.mark.parametrize("before", [True, False])
def test_what_follows_a_work_is_called_once_when_communication_ends_or_has_ended(engine, before):
    called, never = [], threading.Event()
    work = engine.submit(alone([], "a", never.is_set))
    if before:
        when_done([work], lambda: called.append("before"))
    engine.stop(OSError("rank 3 has failed"))
    assert called == ["before"] * before
    when_done([work], lambda: called.append("after"))
    assert called == ["before"] * before + ["after"]


@pytest.mark.parametrize("end", ["done", "failed", "stopped"])
def test_an_expected_work_counts_as_waited_for_until_its_end(engine, end):
    """Nobody calls `wait`, as where C++ waits for a future."""
    gate = threading.Event()

    def steps():
        yield gate.is_set
        if end == "failed":
            raise OSError("no way")

    stream = engine.add_stream("another")
    engine.submit(Steps([], "before", enter=gate.is_set).work)
    work = engine.submit(steps(), stream=stream, wake=False)
    assert engine.awaited() is None
    before = time.monotonic()
    expect([CompletedWork(), work])
    awaited = engine.awaited()
    assert awaited is not None
    assert awaited[0] is stream
    assert before <= awaited[1] <= time.monotonic()
    waiter = threading.Thread(target=suppressed(engine.submit(steps()).wait))
    waiter.start()
    until(lambda: engine.awaited()[0] is engine.main)  # a caller that waits counts first
    if end == "stopped":
        engine.stop(OSError("no way"))
    gate.set()
    until(lambda: engine.awaited() is None)
    waiter.join()


def suppressed(function, error=OSError):
    def call():
        with suppress(error):
            function()

    return call
