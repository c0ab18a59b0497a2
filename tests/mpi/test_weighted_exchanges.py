"""Exchanges in which a node counts by its samples, of which nodes have unequal numbers."""

import copy
from contextlib import nullcontext

import pytest
import torch
from lone_nodes import NODE, NODES, PER_NODE, RANK, digests, keep_optimizers, keep_world
from oracle import init
from replicas import coded
from torch import nn
from worlds import RANKS

from mntrain.sync import DiLoCo, LocalSGD, SparseLoCo
from zero.comm_hooks.codes import ChunkCode
from zero.state import UNSENT

pytestmark = pytest.mark.simulated

LR, EVERY, WARMUP, STEPS = 0.1, 3, 1, 7
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}
SYNCS = {
    "local SGD": LocalSGD(EVERY, WARMUP, weighted=True),
    "DiLoCo": DiLoCo(EVERY, WARMUP, **PLAIN, weighted=True),
    "stale local SGD": LocalSGD(EVERY, WARMUP, max_staleness=1, weighted=True),
    "stale DiLoCo": DiLoCo(EVERY, WARMUP, **PLAIN, max_staleness=1, weighted=True),
}


@pytest.fixture(scope="module")
def world():
    yield from keep_world()


@pytest.fixture
def make(world):
    yield from keep_optimizers(world, torch.optim.SGD, lr=LR)


class Linear(nn.Module):
    """Its gradient is the mean of the samples, so all it learns is known in closed form."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.linspace(-1, 1, 10, dtype=torch.float64))
        self.other = nn.Parameter(torch.linspace(2, 3, 5, dtype=torch.float64))

    def forward(self, x):
        return x @ torch.cat([self.one, self.other])

    def values(self):
        return torch.cat([self.one, self.other]).detach().clone()


def samples_of(rank, step):
    """From 1 to 4 samples; ranks of a node have equally many."""
    count = 1 + (3 * (rank // PER_NODE) + step) % 4
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(count, 15, generator=generator, dtype=torch.float64)


def take_step(model, optimizer, step):
    own = samples_of(RANK, step)
    optimizer.share(len(own))
    model(own).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def drift_of(node, steps):
    """Return the way of a node in steps of its own, and their samples."""
    ranks = range(node * PER_NODE, (node + 1) * PER_NODE)
    batches = [torch.cat([samples_of(rank, step) for rank in ranks]) for step in steps]
    return LR * sum(batch.mean(0) for batch in batches), sum(map(len, batches))


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def weighted_mean(pairs):
    return sum(weight * value for value, weight in pairs) / sum(weight for _, weight in pairs)


def after_rounds(start, *rounds):
    for steps in rounds:
        start = start - weighted_mean([drift_of(node, steps) for node in range(NODES)])
    return start


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
def test_a_node_counts_by_the_samples_of_its_steps_since_the_last_exchange(
    world, make, sync, stage
):
    model = Linear()
    optimizer = make(model, sync=sync, stage=stage)
    for step in range(STEPS):
        take_step(model, optimizer, step)
    rounds = [range(1, 4), range(4, 7)]
    if sync.max_staleness:  # an exchange within a round ends it
        take_step(model, optimizer, STEPS)
        rounds.append(range(STEPS, STEPS + 1))
        optimizer.exchange()
    optimizer.wait_for_parameters()
    warm = start_of()
    expected = after_rounds(warm, *rounds)
    assert_equal(model.values(), expected)
    assert len(set(digests(world, model))) == 1
    alike = warm
    for steps in rounds:
        alike = alike - sum(drift_of(node, steps)[0] for node in range(NODES)) / NODES
    assert (alike - expected).abs().max() > 1e-3  # which an exchange without weights gives


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_micro_batches_of_a_step_count_together(make, stage):
    model = Linear()
    optimizer = make(model, sync=SYNCS["local SGD"], stage=stage)
    for step in range(STEPS):
        own = samples_of(RANK, step)
        # Nodes differ in the size of the second one, which some do not have.
        for part, waits in ((own[:1], optimizer.no_sync()), (own[1:], nullcontext())):
            with waits:
                loss = model(part).mean() if len(part) else 0 * model(own).sum()
                optimizer.backward(loss, len(part))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_parameters()
    expected = after_rounds(start_of(), range(1, 4), range(4, 7))
    assert_equal(model.values(), expected)


@pytest.mark.parametrize("name", ["local SGD", "DiLoCo"])
def test_an_evaluation_within_a_round_is_of_the_weighted_mean(make, name):
    model = Linear()
    optimizer = make(model, sync=SYNCS[name])
    for step in range(1 + EVERY):
        take_step(model, optimizer, step)
    start = model.values()
    with optimizer.averaged():  # nothing has changed since the exchange
        assert_equal(model.values(), start)
    steps = range(1 + EVERY, 3 + EVERY)
    for step in steps:
        take_step(model, optimizer, step)
    with optimizer.averaged():
        expected = after_rounds(start, steps)
        assert_equal(model.values(), expected)
    take_step(model, optimizer, 3 + EVERY)
    expected = after_rounds(start, range(1 + EVERY, 4 + EVERY))
    assert_equal(model.values(), expected)


CODE = ChunkCode(0.25)
CODED = {
    "SparseLoCo": SparseLoCo(2, density=0.25, weighted=True),
    "stale SparseLoCo": SparseLoCo(2, density=0.25, max_staleness=1, weighted=True),
}


@pytest.mark.parametrize("sync", CODED.values(), ids=CODED)
def test_what_a_code_lacks_is_kept_without_the_weight(make, sync):
    model = Linear()
    start = model.values()
    optimizer = make(model, sync=sync)
    for step in range(2):
        take_step(model, optimizer, step)
    if sync.max_staleness:
        optimizer.exchange()
    for part in (slice(0, 10), slice(10, 15)):
        sent, total = [], 0.0
        for node in range(NODES):
            drift, weight = drift_of(node, range(2))
            sent.append(coded(CODE, weight * drift[part]))
            total += weight
        after = start[part] - sum(sent) / total
        torch.testing.assert_close(model.values()[part], after, rtol=1e-9, atol=1e-9)
    kept = {piece.name: piece.tensors[UNSENT] for piece in optimizer.slices()}
    drift, weight = drift_of(NODE, range(2))
    for name, part in (("one", slice(0, 10)), ("other", slice(10, 15))):
        lacks = drift[part] - coded(CODE, weight * drift[part]) / weight
        torch.testing.assert_close(kept[name].view(-1), lacks, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
def test_a_round_whose_steps_are_all_skipped_changes_nothing(make, sync):
    model = Linear()
    optimizer = make(model, sync=sync, non_finite="skip")
    for step in range(1 + EVERY):
        take_step(model, optimizer, step)
    start = model.values()
    for _ in range(EVERY):
        (model(samples_of(RANK, 0)).mean() * torch.inf).backward()
        assert optimizer.step().skipped
        optimizer.zero_grad()
    if sync.max_staleness:
        optimizer.exchange()
        start = after_rounds(start_of(), range(1, 4))
    assert_equal(model.values(), start)


def start_of():
    """The parameters after the warm-up."""
    every = torch.cat([samples_of(rank, 0) for rank in range(RANKS)])
    return Linear().values() - LR * every.mean(0)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_round_of_local_sgd_is_ended_by_another_schedule(make, stage):
    """The node's second rank updates nothing, and takes part in what all ranks do."""
    model = Linear()
    del model.other
    model.other = torch.zeros(5, dtype=torch.float64)
    whole = {"stage": stage, "partition": "parameter"} if stage else {}
    before = make(model, sync=SYNCS["local SGD"], **whole)
    for step in range(WARMUP + 2):
        take_step(model, before, step)
    before.wait_for_parameters()
    state, own = before.state_dict(), copy.deepcopy(model.state_dict())
    before.close()
    after = make(model, sync=SYNCS["DiLoCo"], **whole)
    model.load_state_dict(own)
    after.load_state_dict(state)
    for step in range(WARMUP + 2, WARMUP + EVERY):
        take_step(model, after, step)
    after.wait_for_parameters()
    # What the nodes' steps weigh goes along with their parameters.
    expected = after_rounds(start_of(), range(WARMUP, WARMUP + EVERY))
    assert_equal(model.one.detach(), expected[:10])


def run_in(folder, sync, steps, *, per_node=PER_NODE, stage=0, save=None):
    """Continue the run in a folder, or begin it; return its model after `steps` steps."""
    model = Linear()
    with init(ranks_per_node=per_node) as world:
        optimizer = world.optimizer(model, torch.optim.SGD, lr=LR, sync=sync, stage=stage)
        checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=0)
        for step in range(checkpoints.restore(), steps):
            take_step(model, optimizer, step)
            checkpoints.save(step + 1, now=step + 1 == save)
        checkpoints.close()
        if sync.max_staleness and save != steps:
            optimizer.exchange()
        optimizer.wait_for_parameters()
    return model


@pytest.mark.mpi(min_size=4)
def test_on_fewer_nodes_a_round_goes_on_from_the_weighted_mean(folder):
    sync, saved = SYNCS["local SGD"], WARMUP + 2
    run_in(folder, sync, saved, per_node=1, save=saved)
    resumed = run_in(folder, sync, saved + 1, per_node=PER_NODE)
    nodes = []
    for rank in range(RANKS):
        batches = [samples_of(rank, step) for step in range(WARMUP, saved)]
        nodes.append((LR * sum(b.mean(0) for b in batches), sum(map(len, batches))))
    expected = after_rounds(start_of() - weighted_mean(nodes), [saved])
    assert_equal(resumed.values(), expected)
