"""Values by name, of which a rank may lack some: what travels, and what comes of it."""

import pytest
import torch

from mntrain.run.named_sums import NamedSums, NamedValue
from zero import SingleProcessCollectives
from zero.step_message import StepMessage

GROUP = SingleProcessCollectives()


@pytest.fixture
def sent(monkeypatch):
    """The names in each message that is sent."""
    messages, send = [], StepMessage.send

    def noted(message, group):
        messages.append(sorted(message._values))
        send(message, group)

    monkeypatch.setattr(StepMessage, "send", noted)
    return messages


def send(sums, own):
    message = StepMessage()
    for name, term in sums.terms(own).items():
        message.put(name, *term)
    message.send(GROUP)
    return message.read()


def test_names_that_are_new_in_several_steps_take_one_message_more_for_all_of_them(sent):
    sums = NamedSums()
    steps = [
        {"loss": NamedValue("mean", 6.0, 3.0)},
        {"loss": NamedValue("mean", torch.tensor(8.0), 2.0)},
    ]
    steps[1]["worst"] = NamedValue("max", 7.0, 1.0)
    found = [send(sums, own) for own in steps]
    assert sent == [["unknown names"]] * 2
    first, second = sums.take(steps, found, GROUP)
    assert first == {"loss": NamedValue("mean", 2.0, 3.0)}
    assert second == {"loss": NamedValue("mean", 4.0, 2.0), "worst": NamedValue("max", 7.0, 1.0)}
    assert len(sent) == 3


def test_names_that_are_known_take_no_other_message_and_may_be_lacking(sent):
    sums = NamedSums()
    own = {"loss": NamedValue("mean", 6.0, 3.0), "errors": NamedValue("sum", 2.0, 1.0)}
    sums.take([own], [send(sums, own)], GROUP)
    sent.clear()
    own = {"errors": NamedValue("sum", 0.0, 1.0)}
    assert sums.take([own], [send(sums, own)], GROUP) == [{"errors": NamedValue("sum", 0.0, 1.0)}]
    assert len(sent) == 1


def test_a_value_counts_as_it_is_when_the_message_is_sent():
    sums, own = NamedSums(), {"loss": NamedValue("mean", 1.0, 1.0)}
    sums.take([own], [send(sums, own)], GROUP)
    message = StepMessage()
    for name, term in sums.terms(own).items():
        message.put(name, *term)
    own["loss"] = NamedValue("mean", 10.0, 4.0)
    message.send(GROUP)
    assert sums.take([own], [message.read()], GROUP) == [{"loss": NamedValue("mean", 2.5, 4.0)}]


def test_a_name_that_has_become_known_between_a_message_and_its_sending_is_not_lost():
    sums, own = NamedSums(), {"loss": NamedValue("mean", 6.0, 3.0)}
    message = StepMessage()
    for name, term in sums.terms(own).items():
        message.put(name, *term)
    sums.take([own], [send(sums, own)], GROUP)
    message.send(GROUP)
    assert sums.take([own], [message.read()], GROUP) == [{"loss": NamedValue("mean", 2.0, 3.0)}]


def test_a_name_that_is_reduced_in_two_ways_is_refused():
    sums, own = NamedSums(), {"loss": NamedValue("mean", 1.0, 1.0)}
    sums.take([own], [send(sums, own)], GROUP)
    own = {"loss": NamedValue("max", 1.0, 1.0)}
    with pytest.raises(ValueError, match="the metric loss is a max, and was a mean: reduce it in"):
        sums.take([own], [send(sums, own)], GROUP)
