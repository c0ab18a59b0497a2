"""Worlds that their ranks abandon, and worlds over the ranks that remain."""

import signal
import sys
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from models import net
from mpi4py import MPI
from oracle import PlainTraining, loss_of, rows, samples, update
from worlds import RANKS, communication_threads, make_world

import mntrain

COMM = MPI.COMM_WORLD
LAST = RANKS - 1
STEPS = 3
PLAIN = partial(torch.optim.SGD, lr=0.1)


class LostRankError(Exception):
    """Raised by the test where a rank has waited too long for another one."""


@contextmanager
def limit(seconds):
    """Interrupt the block with a LostRankError after some time, as a watchdog would."""

    def interrupt(*_):
        raise LostRankError

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(LostRankError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def share(step, first, ranks=1):
    """The samples of some ranks in a step, of which each has four."""
    return rows(samples(4 * RANKS, step), 4 * first, 4 * (first + ranks))


def train(world, model, optimizer, step):
    """Take one step on this rank's batch, and return the loss over all ranks."""
    loss = loss_of(model, share(step, world.rank))
    update(optimizer, loss)
    return world.mean(loss.item())


def expected_losses():
    """The losses of one step on all ranks, and of further ones on all but the last."""
    alone, losses = PlainTraining(net(), PLAIN), []
    for step in range(STEPS):
        losses.append(loss_of(alone.model, share(step, 0, RANKS if step == 0 else LAST)))
        alone.step(losses[-1])
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_remaining_ranks_train_on_in_another_world(stage):
    remaining = COMM.Split(int(COMM.rank == LAST), COMM.rank)  # while all ranks take part
    hooks, before = (sys.excepthook, threading.excepthook), communication_threads()
    world = make_world("lanes")
    model, options = net(), {"stage": stage, "overlap_forward": True}
    optimizer = world.optimizer(model, PLAIN, **options)
    losses = [train(world, model, optimizer, 0)]
    optimizer.wait_for_parameters()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    if COMM.rank != LAST:
        with limit(0.3):
            train(world, model, optimizer, 1)
    world.abandon()
    assert communication_threads() == before
    assert (sys.excepthook, threading.excepthook) == hooks
    if COMM.rank != LAST:
        with mntrain.init(remaining, device="cpu") as smaller:
            assert smaller.size == LAST
            model.load_state_dict(saved)
            model.zero_grad()
            optimizer = smaller.optimizer(model, PLAIN, **options)
            losses += [train(smaller, model, optimizer, step) for step in range(1, STEPS)]
            optimizer.wait_for_parameters()
        assert losses == pytest.approx(expected_losses(), rel=1e-12)
    remaining.Free()
    COMM.Barrier()


def test_abandoned_world_refuses_every_use():
    world = make_world("lanes")
    optimizer = world.optimizer(net(), PLAIN)
    pending = []
    if COMM.rank != LAST:
        pending = [world.collectives.all_reduce(torch.ones(100_000)), world.gather_later(1)]
    world.abandon()
    uses = [
        lambda: world.gather(1),
        lambda: world.sum([1.0]),
        world.usage,
        lambda: world.shard([]),
        lambda: world.optimizer(net(), PLAIN),
        lambda: world.agreement().__enter__(),
        lambda: world.collectives.all_reduce(torch.ones(1)),
        optimizer.step,
        *(work.wait for work in pending),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="abandoned"):
            use()
    world.abandon()
    world.close()  # neither does anything
    COMM.Barrier()


def test_abandoning_within_the_with_block_does_not_end_the_job():
    def fail():
        with make_world("lanes") as world:
            world.abandon()
            raise LostRankError

    with pytest.raises(LostRankError):
        fail()
    with make_world("lanes") as another:
        assert another.sum([1.0]) == [RANKS]
