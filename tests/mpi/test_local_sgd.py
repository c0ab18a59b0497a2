"""Nodes that exchange parameters every few steps, against replicas in one process."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from models import net
from mpi4py import MPI
from oracle import ADAMW, SGD, Alone, assert_parity, init, loss_of, mine, samples
from replicas import (
    NODE,
    NODES,
    PER_NODE,
    RANK,
    assert_close,
    digests,
    keep_optimizers,
    keep_world,
    run,
    take_step,
)
from torch import nn
from worlds import RANKS, refusal

from mntrain.sync import DiLoCo, LocalSGD
from mntrain.train.model_digest import differing_ranks, model_digest
from zero.norms import NonFiniteGradientError
from zero.state import MASTER

pytestmark = pytest.mark.mpi(min_size=2)

SYNCS = [LocalSGD(every=3, warmup=2), DiLoCo(every=3, warmup=2)]
syncs = pytest.mark.parametrize("sync", SYNCS, ids=["local SGD", "DiLoCo"])
stages = pytest.mark.parametrize("stage", [0, 1, 2])


@pytest.fixture(scope="module")
def world():
    yield from keep_world()


@pytest.fixture
def make(world):
    yield from keep_optimizers(world)


class Replicas:
    """A replica for each node, trained with plain torch in this process."""

    def __init__(self, model, kind, sync):
        self.models = [copy.deepcopy(model) for _ in range(NODES)]
        self.inner = [kind(model.parameters()) for model in self.models]
        self.sync, self.outer = sync, None

    def step(self, step, batch):
        """Take step number `step`; return whether it ends with an exchange."""
        if step == self.sync.warmup:
            self.begin()
        for node, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
            warm = step < self.sync.warmup
            own = batch if warm else tuple(column.chunk(NODES)[node] for column in batch)
            loss_of(model, own).backward()
            inner.step()
            inner.zero_grad()
        since = step + 1 - self.sync.warmup
        due = since > 0 and since % self.sync.every == 0
        if due:
            self.exchange()
        return due

    def begin(self):
        self.global_model = copy.deepcopy(self.models[0])
        if isinstance(self.sync, DiLoCo):
            self.outer = torch.optim.SGD(
                self.global_model.parameters(),
                lr=self.sync.outer_lr,
                momentum=self.sync.outer_momentum,
                nesterov=True,
            )

    @torch.no_grad()
    def exchange(self):
        mean = self.mean()
        if self.outer:
            pairs = zip(self.global_model.parameters(), mean.parameters(), strict=True)
            for parameter, target in pairs:
                parameter.grad = parameter - target
            self.outer.step()
            mean = self.global_model
        for model in self.models:
            model.load_state_dict(mean.state_dict())

    @torch.no_grad()
    def mean(self):
        made = copy.deepcopy(self.models[0])
        for parameter, *own in zip(
            made.parameters(), *(model.parameters() for model in self.models), strict=True
        ):
            parameter.copy_(sum(own) / NODES)
        return made


@stages
@syncs
def test_nodes_train_as_replicas_in_one_process_do(world, make, sync, stage):
    model = net()
    replicas = Replicas(model, ADAMW, sync)
    optimizer = make(model, sync=sync, stage=stage)
    for step in range(9):  # exchanges after steps 4 and 7
        due = replicas.step(step, samples(12, step))
        take_step(world, model, optimizer, step)
        assert_close(model, replicas.models[NODE])
        together = digests(world, model)
        assert optimizer.in_sync == (due or step < 2) == (len(set(together)) == 1)
        assert not differing_ranks(together, world.topology.nodes)
    before = model_digest(model)
    with optimizer.averaged() as differing:
        assert differing
        assert_close(model, replicas.mean())
        assert len(set(digests(world, model))) == 1
        with pytest.raises(RuntimeError, match="call this after the block"):
            optimizer.step()
    assert model_digest(model) == before
    optimizer.exchange()
    replicas.exchange()
    assert_close(model, replicas.models[0])
    assert len(set(digests(world, model))) == 1


def test_a_longer_warm_up_begins_the_outer_state_anew(world, make):
    kind, first = partial(torch.optim.SGD, lr=0.1), net()
    before = make(first, kind, sync=DiLoCo(every=2))
    for step in range(4):
        take_step(world, first, before, step)
    resumed, fresh = copy.deepcopy(first), copy.deepcopy(first)
    longer = make(resumed, kind, sync=DiLoCo(every=2, warmup=9))
    longer.load_state_dict(before.state_dict())
    expected = make(fresh, kind, sync=DiLoCo(every=2, warmup=5))
    for step in range(4, 13):
        take_step(world, resumed, longer, step)
        take_step(world, fresh, expected, step)
    assert_close(resumed, fresh)


def test_a_state_of_the_warm_up_is_loaded_after_it(world, make):
    kind, sync, model, other = partial(torch.optim.SGD, lr=0.1), LocalSGD(3, 2), net(), net()
    start = copy.deepcopy(model.state_dict())
    optimizer, expected = make(model, kind, sync=sync), make(other, kind, sync=sync)
    state = copy.deepcopy(optimizer.state_dict())
    for step in range(4):
        loss = loss_of(model, mine(world, samples(12, step)))
        optimizer.backward(loss, weight=1000.0 if NODE else 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(start)
    optimizer.load_state_dict(state)
    for step in range(2):
        take_step(world, model, optimizer, step)
        take_step(world, other, expected, step)
        assert_close(model, other)


@pytest.mark.skipif(RANKS != 4, reason="needs nodes of two ranks")
def test_parameters_without_saved_masters_are_loaded_as_they_are(make):
    with init(ranks_per_node=2, gather_dtype="bf16") as narrow:
        model = net()
        saved = narrow.optimizer(model, ADAMW, sync=LocalSGD(3)).state_dict()  # at stage 0
        other = net()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.0009765)
        optimizer = narrow.optimizer(other, ADAMW, sync=LocalSGD(3), stage=1)
        other.load_state_dict(model.state_dict())
        optimizer.load_state_dict(saved)
        optimizer.publish_loaded()
        exact = dict(model.named_parameters())
        for piece in optimizer.slices():
            right = exact[piece.name].detach().reshape(-1)[piece.low : piece.high]
            assert torch.equal(piece.tensors[MASTER], right)


def test_one_model_of_two_optimizers_that_exchange_is_not_saved(world, make, tmp_path):
    model = net()
    pairs = list(model.named_parameters())
    one, _ = (make(model, sync=LocalSGD(3), groups=part) for part in (pairs[:2], pairs[2:]))
    folder = world.gather(str(tmp_path))[0]
    said = refusal(world.checkpoints, folder, model=model, optimizer=one)
    assert "another optimizer with sync= trains parameters of model" in said


@stages
@pytest.mark.parametrize("sync", [LocalSGD(every=1), DiLoCo(1, 0, 1.0, 0.0)])
def test_exchanging_plain_sgd_after_each_step_is_synchronous_training(world, make, sync, stage):
    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.2)

    model = net()
    alone = Alone(model, plain)
    optimizer = make(model, plain, sync=sync, stage=stage)
    for step in range(4):
        alone.step(loss_of(alone.model, samples(12, step)))
        take_step(world, model, optimizer, step)
    # Means of updated parameters and updates by mean gradients round differently: by a few times
    # 2**-53 of a parameter in each step.
    assert_parity(world, model, alone, tolerance=1e-14)


@stages
def test_the_warm_up_has_the_bits_of_synchronous_training(world, make, stage):
    models = [net(torch.float32) for _ in range(2)]
    optimizers = [
        make(model, sync=sync, stage=stage)
        for model, sync in zip(models, [None, DiLoCo(every=2, warmup=4)], strict=True)
    ]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            take_step(world, model, optimizer, step)
        assert model_digest(models[0]) == model_digest(models[1])


@stages
def test_the_norm_of_a_step_is_that_of_the_whole_gradient(world, make, stage):
    model = net()
    alone = Alone(model, SGD)
    optimizer = make(model, SGD, sync=LocalSGD(every=5, warmup=1), stage=stage)
    batches = samples(12, 0), samples(12, 1)
    norm = alone.step(loss_of(alone.model, batches[0]))
    loss_of(model, mine(world, batches[0])).backward()
    assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-12)
    optimizer.zero_grad()
    norm = alone.step(loss_of(alone.model, tuple(c.chunk(NODES)[NODE] for c in batches[1])))
    loss_of(model, mine(world, batches[1])).backward()
    assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-12)


@stages
@syncs
def test_an_exchange_sends_each_parameter_once_to_each_other_node(world, make, sync, stage):
    model = net()
    optimizer = make(model, sync=sync, stage=stage)
    sent = []
    for step in range(6):
        before = world.usage()
        take_step(world, model, optimizer, step)
        after = world.usage()
        sent.append(sum(a.cross_bytes - b.cross_bytes for a, b in zip(after, before, strict=True)))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    *_, alone, exchanging, _ = sent  # steps 3 and 4
    before = world.usage()
    world.collectives.all_reduce(torch.zeros(1 + RANKS, dtype=torch.float64)).wait()
    pairs = zip(world.usage(), before, strict=True)
    agreement = sum(a.cross_bytes - b.cross_bytes for a, b in pairs)  # on whether all is finite
    # So does an all-reduce of a small tensor.
    assert exchanging - alone == NODES * (NODES - 1) * numbers * 8 + agreement
    assert alone < 1000 < sent[0]  # whether all steps are finite, and their weights


def test_a_skipped_step_exchanges_all_the_same(world, make):
    model = net()
    optimizer = make(model, sync=DiLoCo(every=2), non_finite="skip")
    take_step(world, model, optimizer, 0)
    assert len(set(digests(world, model))) == NODES
    factor = float("nan") if RANK == RANKS - 1 else 1.0
    (loss_of(model, mine(world, samples(12, 1))) * factor).backward()
    assert optimizer.step().skipped
    optimizer.zero_grad()
    assert len(set(digests(world, model))) == 1
    assert optimizer.in_sync


def test_a_step_that_stops_leaves_nodes_as_they_were(world, make):
    model = net()
    optimizer = make(model, sync=LocalSGD(every=2))
    take_step(world, model, optimizer, 0)
    factor = float("nan") if RANK == RANKS - 1 else 1.0
    (loss_of(model, mine(world, samples(12, 1))) * factor).backward()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert not optimizer.in_sync
    with optimizer.averaged():
        assert len(set(digests(world, model))) == 1


@stages
def test_a_node_without_samples_waits_for_the_next_step(world, make, stage):
    model = net()
    optimizer = make(model, sync=LocalSGD(every=3), stage=stage)
    before = model_digest(model)
    for _ in range(2):
        if NODE == 0:
            loss_of(model, samples(4)).backward()
        else:
            optimizer.share(0)
        assert optimizer.step().weight == (PER_NODE if NODE == 0 else 0)
        optimizer.zero_grad()
        optimizer.wait_for_parameters()
        assert (model_digest(model) == before) == (NODE > 0)
    optimizer.share(0)
    with pytest.raises(ValueError, match="weights sum to 0"):
        optimizer.step()


@stages
def test_memory_is_as_expected(make, stage, world):
    model = net(torch.bfloat16 if stage == 1 else torch.float64)
    optimizer = make(model, sync=SYNCS[1], stage=stage)
    expected = optimizer.expected_memory()
    for step in range(3):
        take_step(world, model, optimizer, step)
    measured = optimizer.memory()
    assert (measured.state, measured.master) == (expected.state, expected.master)


def test_buffers_are_those_of_rank_0_after_an_exchange(world, make):
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    optimizer = make(model, sync=LocalSGD(every=2))
    buffer = model[0].running_mean
    for step in range(2):
        x, _ = mine(world, samples(12, step))
        own = 0.1 * x.mean(0) + 0.9 * buffer
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        everyone = world.gather(own)
        of_node, of_first = everyone[NODE * PER_NODE], everyone[0]
        torch.testing.assert_close(buffer, of_first if step else of_node)
        with optimizer.averaged():
            torch.testing.assert_close(buffer, of_first)
        torch.testing.assert_close(buffer, of_first if step else of_node)


@stages
@pytest.mark.parametrize(
    ("sync", "saved_after"),
    [
        pytest.param(SYNCS[0], 4, id="local SGD between exchanges, in the background"),
        pytest.param(SYNCS[1], 7, id="DiLoCo between exchanges"),
        pytest.param(SYNCS[1], 5, id="DiLoCo after an exchange"),
    ],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, sync, stage, saved_after):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    final = []
    for name, every in (("whole", 0), ("parts", 2)):
        with init(ranks_per_node=PER_NODE) as world:
            if name == "parts":
                now = saved_after if saved_after % every else None
                run(world, folder / name, stage, sync, saved_after, every=every, now=now)
                MPI.COMM_WORLD.barrier()
        with init(ranks_per_node=PER_NODE) as world:
            model, _ = run(world, folder / name, stage, sync, 9)
            final.append(world.gather(model_digest(model)))
    assert final[0] == final[1]
    assert len(set(final[0])) == NODES


def test_a_checkpoint_continues_on_another_number_of_nodes(tmp_path):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    with init(ranks_per_node=PER_NODE) as world:
        model, optimizer = run(world, folder, 2, SYNCS[1], 6, now=6)
        with optimizer.averaged():
            mean = copy.deepcopy(model)
    other = RANKS if PER_NODE == 1 else 1  # one node, or one rank on each
    with init(ranks_per_node=other) as world:
        sync = SYNCS[1] if other == 1 else None
        model, optimizer = run(world, folder, 2, sync, 6)
        assert_close(model, mean, 0)
        for step in (6, 7):
            take_step(world, model, optimizer, step)
        assert len(set(digests(world, model))) == 1


@pytest.mark.parametrize("sync", [DiLoCo(2, 9), LocalSGD(3), None], ids=["warm-up", "mean", "none"])
@pytest.mark.parametrize("saved", SYNCS, ids=["local SGD", "DiLoCo"])
def test_a_checkpoint_between_exchanges_continues_with_another_schedule(tmp_path, saved, sync):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    with init(ranks_per_node=PER_NODE) as world:
        run(world, folder, 1, saved, 4, now=4)
    with init(ranks_per_node=PER_NODE) as world:
        model, optimizer = run(world, folder, 1, sync, 4)
        for step in range(4, 9):
            take_step(world, model, optimizer, step)
            assert (len(set(digests(world, model))) == 1) == optimizer.in_sync
        assert optimizer.in_sync


def test_nodes_of_unequal_sizes_and_a_single_node_are_reported():
    told = pytest.warns(UserWarning, match="there is one node, so every step is synchronous")
    with init(ranks_per_node=RANKS) as one:
        with told if RANK == 0 else nullcontext():
            optimizer = one.optimizer(net(), ADAMW, sync=LocalSGD(2))
        assert optimizer.schedule.replicas == 1
    if RANKS == 3:
        with init(ranks_per_node=2) as unequal:
            said = refusal(unequal.optimizer, net(), ADAMW, sync=LocalSGD(2))
        assert said.startswith("the nodes have 2+1 ranks: nodes that exchange rarely need")
