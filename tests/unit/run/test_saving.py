"""Intervals between saves."""

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from mntrain.checkpoint import FoundCheckpoint, Manifest
from mntrain.options.config import CheckpointConfig
from mntrain.run import local_saving
from mntrain.run.local_saving import LocalCheckpoints, SaveCost
from mntrain.run.restart import restored_from
from mntrain.run.save_interval import SaveInterval, cheapest_interval_s


@pytest.mark.parametrize(("every", "steps"), [("3", [3, 6, 9]), ("0", [])])
def test_an_interval_in_steps(every, steps):
    interval = SaveInterval(every, lambda: 0.0)
    assert interval.wanted == bool(steps)
    assert [step for step in range(1, 10) if interval.due_after(step)] == steps
    assert not interval.due_now()


@pytest.mark.parametrize(
    ("every", "first_s", "cost_s", "then_s"),
    [
        ("1.5min", 90.0, 0.1, 90.0),
        ("auto", 0.0, 0.5, 293.9),  # sqrt(2 * 0.5 s * 24 h)
    ],
)
def test_an_interval_by_the_clock(clock, every, first_s, cost_s, then_s):
    costs = [0.0]
    interval = SaveInterval(every, lambda: cheapest_interval_s(costs[-1]))
    assert interval.wanted
    assert not interval.due_after(1)
    for seconds in (first_s, then_s):
        clock[0] += max(0.0, seconds - 1)
        assert interval.due_now() == (seconds == 0)
        clock[0] += 2
        assert interval.due_now()
        costs.append(cost_s)
        interval.begins()


@pytest.mark.parametrize(
    "every", ["-1", "1.5", "10 min", "0min", "0.0min", "min", "often", "1h", ""]
)
def test_invalid_values_of_checkpoint_every(every):
    with pytest.raises(ValueError, match=r"\nevery\n") as error:
        CheckpointConfig(every=every)
    assert "must be a number of steps, minutes such as 10min, or auto" in str(error.value)
    for valid in ("0", "500", "10min", "0.5min", "auto"):
        assert CheckpointConfig(every=valid).every == valid


@pytest.mark.parametrize("every", ["500", "30min", "auto"])
def test_a_save_that_failed_is_tried_again_in_a_minute(clock, every):
    interval = SaveInterval(every, lambda: cheapest_interval_s(10.0))
    interval.failed()
    clock[0] += 59
    assert not interval.due_now()
    clock[0] += 2
    assert interval.due_now()
    assert interval.by_clock
    interval.begins()
    assert not interval.due_now()
    assert interval.by_clock == (every != "500")


@pytest.mark.parametrize(
    ("longer", "unsteady", "nbytes", "cost_s"),
    [
        ([0.1, 0.1, 0.1], 0.0, 10**9, 0.05 + 3 * 0.1),
        ([0.3, 0.0, 0.0], 0.0, 10**9, 0.05 + 3 * 0.1 + 0.1),  # as much, but less surely
        ([0.1, 0.1, 0.1], 1.5, 20 * 10**6, 0.05 + 0.4),  # at most as much as its bytes may take
        ([0.0, 0.0, 0.0], 0.0, 10**9, 0.05),
    ],
)
def test_saves_in_memory_cost_one_percent_of_the_time_or_less(
    clock, longer, unsteady, nbytes, cost_s
):
    """A step takes 1 s; a save blocks for 0.05 s, and 3 steps during it take longer."""
    cost, chance = SaveCost(nbytes), random.Random(1)
    interval = SaveInterval("auto", cost.interval_s)

    def step(seconds, *, saving=False, blocked_s=0.0):
        clock[0] += seconds + unsteady * chance.random()
        cost.step_taken(disturbed=saving)
        clock[0] += blocked_s
        cost.leaves(blocked_s)

    step(7.0)  # before the first call
    for _ in range(5):
        assert not interval.due_now()
        step(1.0)
    assert interval.due_now()
    found = []
    for _ in range(30):
        began = clock[0]
        cost.begins()
        interval.begins()
        cost.leaves(0.05)
        for more in longer:
            step(1.0 + more, saving=True)
        cost.ended()
        while not interval.due_now():
            step(1.0)
        found.append(clock[0] - began)
    assert found[-1] == pytest.approx(cost_s / 0.01, rel=0.25, abs=2.5)
    assert fmean(found) > 0.95 * (0.05 + sum(longer)) / 0.01


def test_copies_are_sent_in_a_quarter_of_the_interval(clock):
    cost = SaveCost(0)
    for _ in range(5):
        cost.leaves(0.0)
        clock[0] += 2.0
        cost.step_taken(disturbed=False)
    assert cost.copy_s(10) == pytest.approx(5.0)
    cost.begins()
    for _ in range(20):  # steps have become shorter, and saves take all the time
        cost.leaves(0.0)
        clock[0] += 1.0
        cost.step_taken(disturbed=True)
    assert cost.copy_s(10) == pytest.approx(2.5)
    for _ in range(99):
        cost.leaves(0.0)
        clock[0] += 20.0
        cost.step_taken(disturbed=False)
    assert cost.copy_s(10) == 30.0
    by_clock = SaveCost(0)
    by_clock.begins()
    by_clock.leaves(0.05)
    assert by_clock.copy_s(0) == pytest.approx(0.05 / 0.01 / 4)


class TimedSaver:
    """Saves that take some steps each, with the interface of `LocalSaver` as far as it is used."""

    partner, copy_problem = 1, ""

    def __init__(self, durations):
        self._durations, self.copies = iter(durations), SimpleNamespace(until=0.0)
        self.left = 0  # steps of the present save
        self.begun = self.whole = 0  # steps that were saved last, and with all copies
        self.longest = 0

    @property
    def saving(self):
        return self.left > 0

    def check(self):
        """Do nothing."""

    def begin(self, progress):
        assert not self.saving
        self.begun, self.left = progress.step, next(self._durations)
        self.longest = max(self.longest, self.left)

    def advance(self):
        self.left, self.whole = 0, self.begun
        return SimpleNamespace(path=Path())


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_at_any_step_costs_an_interval_and_a_save_at_most(monkeypatch, seed):
    """The time of a save that takes longer than the interval counts in its place."""
    chance = random.Random(seed)
    every = chance.randint(1, 8)
    saver = TimedSaver(chance.randint(1, 8) for _ in range(300))
    monkeypatch.setattr(local_saving, "LocalSaver", lambda *given: saver)
    monkeypatch.setattr(local_saving, "_own_bytes", lambda *given: 0)
    monkeypatch.setattr(LocalCheckpoints, "_expect_room", lambda own: None)
    world = SimpleNamespace(size=1, master=True, agreement=nullcontext)
    world.output = SimpleNamespace(warn=pytest.fail)
    checkpoints = LocalCheckpoints(world, None, None, str(every))
    lost, late = [], 0
    for step in range(1, 300):
        lost.append(step - saver.whole)  # in the middle of this step, which is taken again, too
        ready = saver.left == 1
        saver.left = max(saver.left - 1, 1) if saver.saving else 0
        late += step % every == 0 and saver.saving and not ready
        progress = SimpleNamespace(step=step, eval_loss=None)
        flags = {"local due": 0, "local ready": ready}
        checkpoints.after_step(progress, flags, before_save=lambda: None)
        assert saver.saving or step - saver.begun < every
    assert max(lost) <= max(every, saver.longest) + saver.longest
    assert checkpoints.summary()["late"] == late


@pytest.mark.parametrize("every", ["0", "10min", "-1", "", "soon"])
def test_invalid_values_of_checkpoint_local_every(every):
    with pytest.raises(ValueError, match="must be a number of steps, or auto"):
        CheckpointConfig(local_every=every)


def test_an_interval_in_memory_without_its_folder_is_refused():
    with pytest.raises(ValueError, match=r"local_every 9 .* give their folder, too \(--checkpoint"):
        CheckpointConfig(local_every="9")
    assert CheckpointConfig(local_every="9", local=Path("/dev/shm/x")).wanted


def test_a_restart_tells_what_it_used_and_how_many_steps_are_taken_again():
    found = FoundCheckpoint(Path(), Manifest(6, {}, 0, 0, None), {}, "of 2 ranks")
    assert restored_from(found, 8) == (
        "restored step 6 in the nodes' memory, of 2 ranks; 2 steps of metrics.jsonl after it are "
        "taken again"
    )
    # A loop without metrics does not know.
    assert restored_from(found, 0).endswith("; the steps after it are taken again")
    shared = restored_from(replace(found, from_nodes=""), 7)
    assert shared.startswith("restored the run's checkpoint of step 6: no newer step is whole")
    assert shared.endswith("; 1 step of metrics.jsonl after it is taken again")
    for last_step, passed in ((3, []), (0, ["step-00000002 was passed over"])):
        told = restored_from(None, last_step, passed)
        assert told.startswith("restored nothing: no step is whole")
    assert not restored_from(None, 0, [])  # a run that begins
