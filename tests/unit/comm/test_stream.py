"""What the observer of a stream is told of its collectives."""

import pytest

from mntrain.comm.engine import ProgressEngine
from mntrain.comm.ticket import Signature, Ticket


class Log(list):
    def collective_begins(self, *event):
        self.append(("begins", *event))

    def collective_ends(self, *event):
        self.append(("ends", *event))


def steps(error=None):
    yield lambda: True
    if error:
        raise error


@pytest.fixture
def engine():
    engine = ProgressEngine()
    engine.main.observer = Log()
    yield engine
    engine.close()


def call(engine, signature, error=None, stream=None):
    ticket = Ticket(signature, "train.py:3")
    engine.submit(steps(error), ticket=ticket, stream=stream).wait()


def test_begin_and_end_of_a_collective_are_told_with_number_call_and_line(engine):
    call(engine, Signature("gather"))
    call(engine, Signature("broadcast", "parameters", root=2))
    engine.call(lambda: None).wait()  # local: no collective
    assert engine.main.observer == [
        ("begins", "the world", 0, "gather", "train.py:3", -1),
        ("ends", "the world", 0),
        ("begins", "the world", 1, "parameters: broadcast", "train.py:3", 2),
        ("ends", "the world", 1),
    ]


def test_a_collective_that_fails_does_not_end(engine):
    with pytest.raises(OSError, match="lost"):
        call(engine, Signature("gather"), OSError("lost"))
    assert [event[0] for event in engine.main.observer] == ["begins"]


def test_streams_of_some_ranks_say_so_and_name_ranks_of_the_world(engine):
    group = engine.add_stream("group", [4, 6])
    call(engine, Signature("gather"), stream=group)
    call(engine, Signature("broadcast", root=1), stream=group)
    awaited = [event[-1] for event in engine.main.observer if event[0] == "begins"]
    assert awaited == [-2, 6]
