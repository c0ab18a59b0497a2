"""Exchanges that nodes do not wait for, up to a bound, against replicas in one process."""

import copy
import time
from dataclasses import replace

import pytest
import torch
from lone_nodes import (
    NODE,
    NODES,
    PER_NODE,
    RANK,
    digests,
    keep_optimizers,
    keep_world,
    run,
    take_step,
    take_steps,
)
from model_digest import differing_ranks, model_digest
from models import net
from oracle import ADAMW, SGD, assert_close, init
from replicas import Rounds
from worlds import RANKS

from mntrain.sync import DiLoCo, LocalSGD, SparseLoCo
from zero.exchange.exchange import EXCHANGED, SentExchange
from zero.state import UNSENT

pytestmark = pytest.mark.simulated

EVERY, WARMUP, BOUND = 2, 1, 2
ROUNDS = {"every": EVERY, "warmup": WARMUP, "max_staleness": BOUND}
SYNCS = [LocalSGD(**ROUNDS), DiLoCo(**ROUNDS), SparseLoCo(**ROUNDS, density=0.1)]
syncs = pytest.mark.parametrize("sync", SYNCS, ids=["local SGD", "DiLoCo", "SparseLoCo"])
stages = pytest.mark.parametrize("stage", [0, 1, 2])
# Rounds for which what has been sent is withheld from a node.
LAGS = {
    "at once": [0] * NODES,
    "at the bound": [BOUND] * NODES,
    "unlike": [0, *[BOUND] * (NODES - 1)],
}


@pytest.fixture(scope="module")
def world():
    yield from keep_world()


@pytest.fixture
def make(world):
    yield from keep_optimizers(world, whole=True)


def withhold(monkeypatch, lags):
    """Let rounds arrive when they are sent, or only at the bound, by this rank's node.

    On a node that is to wait, only its first rank says that nothing has arrived.
    """
    arrived = not lags[NODE] or RANK % PER_NODE != 0
    monkeypatch.setattr(SentExchange, "arrived", lambda self: arrived)


def kept(world, optimizer, key):
    """The outer state under a key, of all ranks of the first node and of this one's. Collective."""
    optimizer.state_dict()  # waits for what is in flight
    own = {
        (piece.name, piece.low): piece.tensors[key].tolist()
        for piece in optimizer.slices()
        if key in piece.tensors
    }
    everyone = world.gather(own)
    assert own
    return everyone[:PER_NODE], everyone[NODE * PER_NODE : (NODE + 1) * PER_NODE]


@stages
@syncs
@pytest.mark.parametrize("lags", LAGS.values(), ids=LAGS)
@pytest.mark.parametrize("kind", [ADAMW, pytest.param(SGD, marks=pytest.mark.thorough)])
def test_nodes_train_as_the_formula_says(world, make, monkeypatch, *, kind, lags, sync, stage):
    withhold(monkeypatch, lags)
    model = net()
    replicas = Rounds(model, sync, kind, lags)
    optimizer = make(model, kind, sync=sync, stage=stage)
    for step in range(WARMUP + 5 * EVERY + 1):
        replicas.step(step)
        take_step(world, model, optimizer, step)
        optimizer.wait_for_parameters()
        assert_close(model, replicas.models[NODE], 1e-9)
        assert optimizer.in_sync == (step < WARMUP)
        assert not differing_ranks(digests(world, model), world.topology.nodes)
    with optimizer.averaged():  # within a round
        replicas.settle()
        assert len(set(digests(world, model))) == 1
        for index, parameter in enumerate(model.parameters()):
            mean = replicas.mean(index)
            torch.testing.assert_close(parameter.detach(), mean, rtol=1e-9, atol=1e-9)
    assert_close(model, replicas.models[NODE], 1e-9)
    first, own = kept(world, optimizer, EXCHANGED)
    assert first == own
    take_step(world, model, optimizer, step + 1)
    replicas.step(step + 1)
    optimizer.wait_for_parameters()
    assert_close(model, replicas.models[NODE], 1e-9)
    optimizer.exchange()  # between rounds: no outer step beyond those of the rounds
    replicas.settle()
    assert optimizer.in_sync
    assert len(set(digests(world, model))) == 1
    assert_close(model, replicas.models[0], 1e-9)


def wait_for(paths):
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"waits for {paths}"
        time.sleep(0.01)


@stages
@syncs
def test_no_node_waits_within_the_bound_and_every_node_waits_at_it(
    world, make, folder, sync, stage
):
    model = net()
    optimizer = make(model, sync=sync, stage=stage)
    steps = iter(range(100))

    def take(count):
        for _ in range(count):
            take_step(world, model, optimizer, next(steps))

    take(WARMUP)
    ahead = [folder / f"ahead-{rank}" for rank in range(RANKS - PER_NODE)]
    released = [folder / f"released-{rank}" for rank in range(RANKS - PER_NODE, RANKS)]
    if NODE < NODES - 1:
        take(BOUND * EVERY)  # rounds 0 to BOUND - 1, of which the last node has begun none
        take(EVERY - 1)
        ahead[RANK].touch()
        take(1)  # ends round BOUND, and needs round 0 of the last node
        assert all(path.exists() for path in released)
        take(EVERY)
    else:
        wait_for(ahead)
        time.sleep(0.3)
        released[RANK - (RANKS - PER_NODE)].touch()
        take((BOUND + 2) * EVERY)
    optimizer.exchange()
    assert len(set(digests(world, model))) == 1


@pytest.mark.parametrize("stage", [0, 1])
@syncs
def test_rounds_in_flight_up_to_the_bound_take_memory(world, make, monkeypatch, sync, stage):
    withhold(monkeypatch, LAGS["at the bound"])
    model = net(torch.bfloat16 if stage else torch.float64)
    optimizer = make(model, sync=sync, stage=stage)
    other = net(model[0].weight.dtype)
    waits = make(other, sync=replace(sync, max_staleness=0), stage=stage)
    for step in range(WARMUP + (BOUND + 2) * EVERY):
        take_step(world, model, optimizer, step)
        take_step(world, other, waits, step)
    measured, without = optimizer.memory(), waits.memory()
    numel = sum(piece.high - piece.low for piece in optimizer.slices())
    assert measured.master == without.master
    # A node keeps what it has sent in a round until it is applied.
    assert measured.state == without.state
    assert measured.exchange >= without.exchange + BOUND * 4 * numel


@stages
@syncs
@pytest.mark.parametrize("saved_after", [WARMUP + 2 * EVERY, WARMUP + 3 * EVERY + 1])
def test_a_resumed_job_goes_on_from_what_the_saving_job_went_on_from(
    folder, monkeypatch, sync, stage, saved_after
):
    sync = replace(sync, weighted=stage > 0)
    withhold(monkeypatch, LAGS["unlike"])
    final = []
    for saves in (saved_after, None):
        with init(ranks_per_node=PER_NODE) as world:
            last = WARMUP + 5 * EVERY + 1
            model, optimizer = run(world, folder, stage, sync, last, now=saves)
            unsent = kept(world, optimizer, UNSENT) if isinstance(sync, SparseLoCo) else None
            final.append((world.gather(model_digest(model)), unsent))
    assert final[0] == final[1]
    assert len(set(final[0][0])) == NODES


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    "then",
    [None, DiLoCo(3), *(pytest.param(sync, marks=pytest.mark.thorough) for sync in SYNCS)],
    ids=str,
)
@pytest.mark.parametrize("sync", [*SYNCS, DiLoCo(every=4, warmup=2)], ids=str)
def test_a_checkpoint_continues_on_other_nodes_and_with_other_schedules(
    folder, monkeypatch, sync, then, stage
):
    withhold(monkeypatch, LAGS["unlike"])
    saved_after = WARMUP + 3 * EVERY + 1
    with init(ranks_per_node=PER_NODE) as world:
        model, optimizer = run(world, folder, stage, sync, saved_after, now=saved_after)
        with optimizer.averaged():
            mean = copy.deepcopy(model.state_dict())
    monkeypatch.undo()
    other = RANKS if PER_NODE == 1 else 1  # one node, or one rank on each
    with init(ranks_per_node=other) as world:
        then = then if other == 1 else None
        model, optimizer = run(world, folder, stage, then, saved_after)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, mean[name], rtol=0, atol=0)
        for step in range(saved_after, saved_after + 5):
            take_step(world, model, optimizer, step)
        optimizer.exchange()
        assert len(set(digests(world, model))) == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_a_state_is_loaded_while_an_exchange_is_in_flight(world, make, monkeypatch, stage):
    withhold(monkeypatch, LAGS["at the bound"])
    model = net()
    optimizer = make(model, sync=SYNCS[1], stage=stage)
    take_steps(world, model, optimizer, range(6))
    optimizer.wait_for_parameters()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for more in (3, 4, 0):
        for step in range(more):
            take_step(world, model, optimizer, 20 + step)
        optimizer.wait_for_parameters()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        take_steps(world, model, optimizer, range(6, 13))
        optimizer.wait_for_parameters()
        ends.append(model_digest(model))
    assert len(set(ends)) == 1
