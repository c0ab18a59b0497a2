"""A message of many numbers, and what its readers get, in one process."""

import pytest

from zero.collectives import SingleProcessCollectives
from zero.step_message import StepMessage


@pytest.fixture
def message():
    """A message with a sum and a maximum, whose values are functions."""
    message, counts = StepMessage(), iter([1.0, 2.0])
    message.put("count", lambda: next(counts))
    message.put("most", lambda: 5.0, "max")
    return message


def test_several_readers_share_one_result(message):
    message.send(SingleProcessCollectives())
    assert message.read() == {"count": 1.0, "most": 5.0}
    assert message.read() is message.read()
    assert message.by_rank("most") == {"0": 5.0}


@pytest.mark.parametrize(
    ("numbers", "same"),
    [([7, 7, 7], True), ([7, 7, 8], False), ([7, None, 7], True), ([None] * 3, True)],
)
def test_ranks_that_have_a_number_have_the_same_one_or_not(numbers, same):
    class OneOfSeveral(SingleProcessCollectives):
        size = len(numbers)

        def all_reduce(self, tensor):
            """Add what the ranks before have sent."""
            sent.append(tensor.clone())
            tensor.copy_(sum(sent))
            return super().all_reduce()

    sent = []
    for number in numbers:
        message = StepMessage()
        message.put_same("digest", lambda number=number: number)
        message.send(OneOfSeveral())
    message.read()
    assert message.same("digest") is same


def test_a_message_that_is_sent_again_has_the_values_of_then(message):
    group = SingleProcessCollectives()
    message.send(group)
    assert message.read()["count"] == 1.0
    message.send(group)
    assert message.read() == {"count": 2.0, "most": 5.0}
