"""The communication thread, with operations of its own kind that need no MPI."""

import threading
import time
from itertools import cycle

import pytest

from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import WaitPolicy, pause
from mntrain.comm.shared_flags import DEPTH

WINDOW = 5


@pytest.fixture
def progress():
    progress = ProgressEngine()
    yield progress
    progress.close()


class Steps:
    """An operation of some pieces, which waits where it is told to, and notes what it does."""

    def __init__(self, log, name, pieces=1, window=WINDOW, *, light=False, alone=True, **gates):
        self.log, self.name, self.count, self.window = log, name, pieces, window
        self.light, self.alone = light, alone
        self.gates = gates  # by step: what must be true before it is done
        self.moving = 0
        self.begun = False

    def passes(self, step):
        return self.gates.get(step, lambda: True)()

    def begin(self):
        self.begun = True

    def enter(self):
        assert self.begun, "nobody has asked for the tensor"
        return self.passes("enter") and self.note("enter")

    def ready(self):
        return self.passes("ready")

    def pieces(self):
        for index in range(self.count):
            yield index, self.piece(index)

    def piece(self, index):
        self.note("start", index)
        self.moving += 1
        yield lambda: self.passes("piece")
        yield lambda: self.passes(index)
        self.moving -= 1
        self.note("end", index)

    def leave(self):
        self.note("leave")

    def left(self):
        return self.passes("left")

    def finish(self):
        self.note("finish")
        return self.name

    def note(self, step, *more):
        self.log.append((self.name, step, *more))
        return True


def until(condition):
    """Wait for what the communication thread does by itself."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def rest_long(progress, monkeypatch):
    """Let the thread look for nothing by itself."""
    monkeypatch.setattr("mntrain.comm.engine.REST_S", 3600)
    ticket = progress.submit(Steps([], "before"))
    until(lambda: ticket.settled)
    time.sleep(0.05)  # in which it goes to rest


def of(log, step):
    return [entry[0] for entry in log if entry[1] == step]


@pytest.mark.parametrize("light", [False, True])
def test_an_operation_goes_through_its_steps_in_order(progress, light):
    log = []
    assert progress.submit(Steps(log, "a", pieces=2, light=light)).wait() == "a"
    pieces = [("a", "start", 0), ("a", "end", 0), ("a", "start", 1), ("a", "end", 1)]
    assert log == [("a", "enter"), *pieces, ("a", "leave"), ("a", "finish")]


def test_it_goes_on_by_itself_while_nobody_waits(progress):
    log, gate = [], threading.Event()
    ticket = progress.submit(Steps(log, "a", piece=gate.is_set))
    until(lambda: of(log, "start"))
    assert not ticket.settled
    gate.set()
    until(lambda: ticket.settled)
    assert ticket.wait() == ticket.wait() == "a"


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("alone", [True, False])
def test_who_waits_for_one_of_several_sleeps_from_the_start(progress, monkeypatch, alone, light):
    pauses, here, gate = [], threading.get_ident(), threading.Event()

    def pause_and_note(seconds):
        if threading.get_ident() == here:
            pauses.append(seconds)
        pause(seconds)

    for module in ("engine", "pending"):
        monkeypatch.setattr(f"mntrain.comm.{module}.pause", pause_and_note)
        manner = WaitPolicy(eager_s=60, most_s=1e-3)
        monkeypatch.setattr(f"mntrain.comm.{module}.LATENCY_BOUND", manner)
    ticket = progress.submit(Steps([], "a", alone=alone, light=light, piece=gate.is_set))
    later = threading.Timer(0.05, gate.set)
    later.start()
    ticket.wait()
    later.join()
    assert any(pauses) != alone


def test_a_light_one_rests_until_it_is_waited_for(progress, monkeypatch):
    rest_long(progress, monkeypatch)
    log = []
    ticket = progress.submit(Steps(log, "a", light=True))
    time.sleep(0.05)
    assert not log
    assert ticket.wait() == "a"


def test_who_waits_for_a_light_one_moves_it_piece_by_piece_and_no_other_thread(
    progress, monkeypatch
):
    rest_long(progress, monkeypatch)
    log, threads, answers = [], set(), cycle([False, False, True])

    def after_a_while():
        threads.add(threading.get_ident())
        return next(answers)

    gates = dict.fromkeys(("enter", "ready", "piece", "left"), after_a_while)
    before = progress.busy_s
    assert progress.submit(Steps(log, "a", pieces=2, light=True, **gates)).wait() == "a"
    assert threads == {threading.get_ident()}
    pieces = [("a", "start", 0), ("a", "end", 0), ("a", "start", 1), ("a", "end", 1)]
    assert log == [("a", "enter"), *pieces, ("a", "leave"), ("a", "finish")]
    assert progress.busy_s > before


def test_a_light_one_waits_for_what_was_handed_in_before_it(progress, monkeypatch):
    rest_long(progress, monkeypatch)
    log = []
    for name in "ab":
        progress.submit(Steps(log, name, light=True))
    assert progress.submit(Steps(log, "c", light=True)).wait() == "c"
    assert of(log, "enter") == of(log, "finish") == ["a", "b", "c"]


def test_a_light_one_waits_for_what_is_under_way(progress):
    log, gate = [], threading.Event()
    progress.submit(Steps(log, "a", piece=gate.is_set))
    until(lambda: of(log, "start"))
    light = progress.submit(Steps(log, "b", light=True))
    later = threading.Timer(0.05, gate.set)
    later.start()
    assert light.wait() == "b"
    later.join()
    assert of(log, "finish") == ["a", "b"]


def test_a_light_one_goes_before_what_comes_after_it(progress, monkeypatch):
    rest_long(progress, monkeypatch)
    log = []
    light = progress.submit(Steps(log, "a", light=True))
    heavy = progress.submit(Steps(log, "b"))
    until(lambda: light.settled and heavy.settled)
    assert of(log, "enter") == of(log, "finish") == ["a", "b"]


def test_a_light_one_that_nobody_waits_for_does_not_rest_forever(progress):
    ticket = progress.submit(Steps([], "a", light=True))
    until(lambda: ticket.settled)


def test_several_are_under_way_before_the_first_has_ended(progress):
    log, gate = [], threading.Event()
    tickets = [progress.submit(Steps(log, name, piece=gate.is_set)) for name in "abc"]
    until(lambda: of(log, "start") == ["a", "b", "c"])
    assert of(log, "enter") == ["a", "b", "c"]
    gate.set()
    assert [ticket.wait() for ticket in reversed(tickets)] == ["c", "b", "a"]
    assert of(log, "finish") == ["a", "b", "c"]


def test_they_leave_in_the_order_in_which_they_entered(progress):
    log, gate = [], threading.Event()
    first = progress.submit(Steps(log, "a", piece=gate.is_set))
    second = progress.submit(Steps(log, "b"))
    until(lambda: ("b", "end", 0) in log)
    time.sleep(0.01)
    assert of(log, "leave") == []
    gate.set()
    second.wait()
    first.wait()
    assert of(log, "leave") == of(log, "finish") == ["a", "b"]


def test_none_starts_before_those_ahead_of_it_have_started(progress):
    log, gate = [], threading.Event()
    progress.submit(Steps(log, "a", ready=gate.is_set))
    second = progress.submit(Steps(log, "b"))
    until(lambda: of(log, "enter") == ["a", "b"])  # for others may be waiting for that
    time.sleep(0.01)
    assert of(log, "start") == []
    gate.set()
    second.wait()
    assert of(log, "start") == ["a", "b"]


def test_none_enters_before_those_ahead_of_it_have_entered(progress):
    log, gate = [], threading.Event()
    progress.submit(Steps(log, "a", enter=gate.is_set))
    second = progress.submit(Steps(log, "b"))
    time.sleep(0.01)
    assert log == []
    gate.set()
    second.wait()
    assert of(log, "enter") == ["a", "b"]


def test_no_tensor_is_handed_back_before_all_others_have_left(progress):
    log, gate = [], threading.Event()
    ticket = progress.submit(Steps(log, "a", left=gate.is_set))
    until(lambda: of(log, "leave"))
    time.sleep(0.01)
    assert not ticket.settled
    gate.set()
    assert ticket.wait() == "a"


def test_so_many_are_entered_and_no_more(progress):
    log, gate = [], threading.Event()
    names = list(range(3 * DEPTH))
    tickets = [progress.submit(Steps(log, name, left=gate.is_set)) for name in names]
    until(lambda: len(of(log, "leave")) >= DEPTH)
    time.sleep(0.01)
    assert of(log, "enter") == names[:DEPTH]
    gate.set()
    assert [ticket.wait() for ticket in tickets] == names
    assert of(log, "enter") == names


def test_so_many_pieces_are_under_way_and_no_more(progress):
    log, gate = [], threading.Event()
    several = [Steps(log, name, pieces=WINDOW - 2, piece=gate.is_set) for name in "abc"]
    tickets = [progress.submit(one) for one in several]
    until(lambda: len(of(log, "start")) >= WINDOW)
    time.sleep(0.01)
    assert [one.moving for one in several] == [WINDOW - 2, 2, 0]
    gate.set()
    for ticket in tickets:
        ticket.wait()
    starts = [entry[::2] for entry in log if entry[1] == "start"]
    assert starts == [(name, index) for name in "abc" for index in range(WINDOW - 2)]


def test_an_operation_with_a_smaller_window_waits_for_more_of_the_others(progress):
    log, gate = [], threading.Event()
    first = Steps(log, "a", pieces=4, piece=gate.is_set)
    second = Steps(log, "b", pieces=4, window=2, piece=gate.is_set)
    tickets = [progress.submit(one) for one in (first, second)]
    until(lambda: len(of(log, "start")) >= 4)
    time.sleep(0.01)
    assert [one.moving for one in (first, second)] == [4, 0]
    gate.set()
    assert [ticket.wait() for ticket in tickets] == ["a", "b"]


def test_others_get_the_core_once_the_first_piece_has_started(progress, monkeypatch):
    log, gate = [], threading.Event()

    def pause_and_note(seconds):
        log.append(("core", "offered"))
        pause(seconds)

    monkeypatch.setattr("mntrain.comm.engine.pause", pause_and_note)
    ticket = progress.submit(Steps(log, "a", pieces=4, piece=gate.is_set))
    until(lambda: len(of(log, "start")) == 4)
    gate.set()
    ticket.wait()
    first, second, third, fourth = (log.index(("a", "start", number)) for number in range(4))
    assert ("core", "offered") in log[first:second]
    assert (third, fourth) == (second + 1, second + 2)


def test_a_piece_that_waits_does_not_hold_the_next_ones(progress):
    log, gate = [], threading.Event()
    slow = Steps(log, "a", pieces=2 * WINDOW)
    slow.gates[0] = gate.is_set
    ticket = progress.submit(slow)
    until(lambda: ("a", "end", 2 * WINDOW - 1) in log)
    assert ("a", "end", 0) not in log
    gate.set()
    ticket.wait()
    assert ("a", "end", 0) in log


# Functions.


def test_a_function_runs_alone_and_in_its_turn(progress):
    log, gate = [], threading.Event()
    progress.submit(Steps(log, "a", piece=gate.is_set))
    called = progress.call(lambda: log.append(("f", "call")))
    after = progress.submit(Steps(log, "b"))
    until(lambda: of(log, "start") == ["a"])
    time.sleep(0.01)
    assert of(log, "call") == of(log, "enter")[1:] == []
    gate.set()
    after.wait()
    called.wait()
    assert [name for name, step, *_ in log if step in ("finish", "call")] == ["a", "f", "b"]
    assert log.index(("f", "call")) < log.index(("b", "enter"))


def test_a_function_gives_its_result_or_its_error_every_time(progress):
    good, bad = progress.call(lambda: 7), progress.call(lambda: 1 // 0)
    assert good.wait() == good.wait() == 7
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.wait()
    assert progress.call(lambda: 8).wait() == 8  # nothing else has suffered


# Errors.


def fail():
    raise OSError("no way")


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("step", ["enter", "ready", "piece", "left"])
def test_an_error_in_any_step_reaches_who_waits(progress, step, light):
    ticket = progress.submit(Steps([], "a", light=light, **{step: fail}))
    for _ in range(2):
        with pytest.raises(OSError, match="no way"):
            ticket.wait()
    assert progress.submit(Steps([], "b", light=light)).wait() == "b"


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("step", ["pieces", "leave", "finish"])
def test_an_error_where_nothing_is_asked_reaches_who_waits(progress, step, light):
    operation = Steps([], "a", light=light)
    setattr(operation, step, fail)
    with pytest.raises(OSError, match="no way"):
        progress.submit(operation).wait()


def test_an_error_reaches_who_waits_for_those_behind_too(progress):
    log, gate = [], threading.Event()

    def fail_later():
        return gate.is_set() and fail()

    tickets = [progress.submit(Steps(log, "a", piece=fail_later))]
    tickets += [progress.submit(Steps(log, name, left=lambda: False)) for name in "bc"]
    until(lambda: of(log, "start") == ["a", "b", "c"])
    gate.set()
    for ticket in tickets:
        with pytest.raises(OSError, match="no way"):
            ticket.wait()
    assert of(log, "finish") == []


def test_an_error_gives_back_what_a_piece_has_borrowed(progress):
    returned = []

    class Borrowing(Steps):
        ask = staticmethod(lambda: False)

        def piece(self, index):
            try:
                yield self.ask
            finally:
                returned.append(index)

    class Light(Borrowing):
        ask = staticmethod(fail)

    with pytest.raises(OSError, match="no way"):
        progress.submit(Light([], "a", light=True)).wait()
    assert returned == [0]
    returned.clear()
    gate = threading.Event()
    progress.submit(Borrowing([], "a", pieces=3))
    last = progress.submit(Steps([], "b", piece=lambda: gate.is_set() and fail()))
    gate.set()
    with pytest.raises(OSError, match="no way"):
        last.wait()
    until(lambda: sorted(returned) == [0, 1, 2])


# Who moves them.


def test_several_threads_wait_at_a_time():
    progress, log, gate = ProgressEngine(), [], threading.Event()
    tickets = [progress.submit(Steps(log, name, piece=gate.is_set)) for name in range(20)]
    results = {}

    def wait(name):
        results[name] = tickets[name].wait()

    threads = [threading.Thread(target=wait, args=(name,)) for name in range(20)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    assert results == {}
    gate.set()
    for thread in threads:
        thread.join(20)
    assert results == {name: name for name in range(20)}
    progress.close()


def test_only_one_thread_at_a_time_moves_them():
    progress, inside, met = ProgressEngine(), threading.Lock(), []

    def alone():
        met.append(inside.acquire(blocking=False))
        time.sleep(0)
        inside.release()
        return True

    def work(name):
        for _ in range(100):
            progress.submit(Steps([], name, enter=alone, piece=alone, left=alone)).wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(met) == 3 * 100 * 3
    assert all(met)
    progress.close()


def test_what_is_left_when_a_caller_has_what_it_waited_for_goes_on(progress):
    log, gate = [], threading.Event()
    first = progress.submit(Steps(log, "a"))
    second = progress.submit(Steps(log, "b", piece=gate.is_set))
    first.wait()
    gate.set()
    until(lambda: second.settled)


def test_busy_seconds_are_those_with_something_under_way(progress):
    progress.call(lambda: None).wait()
    time.sleep(0.05)
    assert progress.busy_s < 0.05
    end = time.monotonic() + 0.1
    before = progress.busy_s
    progress.submit(Steps([], "a", piece=lambda: time.monotonic() > end)).wait()
    until(lambda: progress.busy_s - before > 0.09)
    assert progress.busy_s - before < 10


# The end.


def test_close_finishes_what_is_queued_and_ends_the_thread():
    before = threading.active_count()
    progress, log = ProgressEngine(), []
    end = time.monotonic() + 0.02
    tickets = [
        progress.submit(Steps(log, name, pieces=3, piece=lambda: time.monotonic() > end))
        for name in range(3 * DEPTH)
    ]
    progress.close()
    assert all(ticket.settled for ticket in tickets)
    assert of(log, "finish") == list(range(3 * DEPTH))
    assert [ticket.wait() for ticket in tickets] == list(range(3 * DEPTH))
    assert threading.active_count() == before


def test_nothing_is_taken_after_close():
    progress = ProgressEngine()
    progress.close()
    with pytest.raises(RuntimeError, match="this world is closed"):
        progress.submit(Steps([], "a"))
    with pytest.raises(RuntimeError, match="this world is closed"):
        progress.call(lambda: None)


def test_an_idle_thread_takes_no_time(progress):
    progress.submit(Steps([], "a")).wait()
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1


def test_tensors_of_collectives_behind_one_that_waits_are_asked_for_meanwhile(progress):
    log, there = [], threading.Event()
    first = Steps(log, "a", enter=there.is_set)
    second = Steps(log, "b")
    tickets = [progress.submit(first), progress.submit(second)]
    until(lambda: second.begun)
    assert log == []
    there.set()
    for ticket in tickets:
        ticket.wait()


def test_what_the_thread_is_to_do_first_is_done_by_the_thread_itself(progress):
    threads = []
    progress.prepare(lambda: threads.append(threading.current_thread().name))
    progress.call(lambda: None).wait()
    until(lambda: threads)
    assert threads == ["mntrain communication"]
