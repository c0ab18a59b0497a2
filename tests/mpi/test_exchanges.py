"""Nodes that exchange parameters every few steps, against replicas in one process."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

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
from models import Tiny, net
from oracle import (
    ADAMW,
    EXACT,
    SGD,
    PlainTraining,
    assert_close,
    init,
    loss_of,
    mine,
    samples,
    update,
)
from replicas import Means, Sparse
from torch import nn
from worlds import RANKS, refusal

from mntrain.errors import AgreedError
from mntrain.sync import DiLoCo, LocalSGD, SparseLoCo
from zero.comm_hooks.codes import ChunkCode
from zero.exchange.exchange import EXCHANGED
from zero.shard import NonFiniteGradientError
from zero.state import UNSENT

pytestmark = pytest.mark.simulated

MEANS = [LocalSGD(every=3, warmup=2), DiLoCo(every=3, warmup=2)]
SPARSE = SparseLoCo(every=3, warmup=2, density=0.1)
stages = pytest.mark.parametrize("stage", [0, 1, 2])
PLAIN = partial(torch.optim.SGD, lr=0.2)


@pytest.fixture(scope="module")
def world():
    yield from keep_world()


@pytest.fixture
def make(world):
    yield from keep_optimizers(world, whole=True)


@pytest.fixture
def cut(world):
    """Makes optimizers whose shards cut parameters at stages 1 and 2."""
    yield from keep_optimizers(world)


def kept(optimizer, *keys):
    """This rank's outer state by parameter and element."""
    return {
        (piece.name, piece.low, key): piece.tensors[key].clone()
        for piece in optimizer.slices()
        for key in keys
        if key in piece.tensors
    }


def copies(optimizer, *keys):
    """Copies of the outer state by parameter, without waiting for what is in flight."""
    outer = [optimizer.sync_schedule.state(owned.tensor) for owned in optimizer._shard.pieces]
    return [state[key].clone() for state in outer if state for key in keys if key in state]


def assert_equal_between_nodes(world, optimizer, *keys):
    everyone = world.gather({k: v.tolist() for k, v in kept(optimizer, *keys).items()})
    assert any(everyone)
    for first, other in zip(everyone, everyone[PER_NODE:], strict=False):
        assert first == other


@stages
@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        pytest.param(Means, MEANS[0], id="local SGD"),
        pytest.param(Means, MEANS[1], id="DiLoCo"),
        pytest.param(Sparse, SPARSE, id="SparseLoCo"),
    ],
)
def test_nodes_train_as_replicas_in_one_process_do(*, world, make, cut, kind, sync, stage):
    model = net()
    replicas, exact = kind(model, sync, ADAMW, NODES), kind is Means
    optimizer = (cut if exact else make)(model, sync=sync, stage=stage)
    tolerance = EXACT if exact else 1e-9
    for step in range(9):
        replicas.step(step)
        take_step(world, model, optimizer, step)
        optimizer.wait_for_parameters()
        assert_close(model, replicas.models[NODE], tolerance)
        together = digests(world, model)
        assert optimizer.in_sync == (len(set(together)) == 1)
        assert optimizer.in_sync == (step < 2 or step % 3 == 1)
        assert not differing_ranks(together, world.topology.nodes)
        if step in (4, 7) and not exact:  # in the warm-up there is no outer state
            assert_equal_between_nodes(world, optimizer, EXCHANGED)
    before = model_digest(model)
    with optimizer.averaged() as differing:
        assert differing  # the last step is between exchanges
        assert len(set(digests(world, model))) == 1
        for index, parameter in enumerate(model.parameters()):
            mean = replicas.mean(index)
            torch.testing.assert_close(parameter.detach(), mean, rtol=tolerance, atol=tolerance)
        with pytest.raises(RuntimeError, match="call this after the block"):
            optimizer.step()
    assert model_digest(model) == before
    optimizer.exchange()
    with torch.no_grad():
        replicas.exchange_now()
    assert optimizer.in_sync
    assert_close(model, replicas.models[0], tolerance)
    assert len(set(digests(world, model))) == 1
    if type(sync) is not LocalSGD:  # which keeps nothing
        assert_equal_between_nodes(world, optimizer, EXCHANGED)


@stages
def test_the_warm_up_has_the_bits_of_synchronous_training(world, cut, stage):
    models = [net(torch.float32) for _ in range(2)]
    syncs = None, replace(MEANS[1], warmup=4)
    optimizers = [
        cut(model, sync=sync, stage=stage) for model, sync in zip(models, syncs, strict=True)
    ]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            take_step(world, model, optimizer, step)
            optimizer.wait_for_parameters()
        assert model_digest(models[0]) == model_digest(models[1])


@stages
@pytest.mark.parametrize(
    ("sync", "saved_after"),
    [
        pytest.param(MEANS[0], 4, id="local SGD between exchanges, in the background"),
        pytest.param(MEANS[1], 7, id="DiLoCo between exchanges"),
        pytest.param(MEANS[1], 5, id="DiLoCo after an exchange"),
        *[pytest.param(SPARSE, after, id=f"SparseLoCo after {after}") for after in (4, 5, 7)],
    ],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(folder, sync, stage, saved_after):
    sync = replace(sync, weighted=stage > 0)
    final = []
    with init(ranks_per_node=PER_NODE) as world:
        now = saved_after if saved_after % 2 else None
        run(world, folder / "parts", stage, sync, saved_after, every=2, now=now)
    for name in ("whole", "parts"):
        with init(ranks_per_node=PER_NODE) as world:
            model, _ = run(world, folder / name, stage, sync, 10)
            final.append(world.gather(model_digest(model)))
    assert final[0] == final[1]
    assert len(set(final[0])) == NODES


@pytest.mark.parametrize(
    "then",
    [
        LocalSGD(3),
        DiLoCo(2, 7),
        pytest.param(SPARSE, marks=pytest.mark.exhaustive),
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("saved", [*MEANS, SPARSE], ids=["local SGD", "DiLoCo", "SparseLoCo"])
def test_a_checkpoint_between_exchanges_continues_with_another_schedule(folder, saved, then):
    with init(ranks_per_node=PER_NODE) as world:
        run(world, folder, 1, saved, 6, now=6)
    with init(ranks_per_node=PER_NODE) as world:
        model, optimizer = run(world, folder, 1, then, 6)
        for step in range(6, 11):
            take_step(world, model, optimizer, step)
            assert optimizer.in_sync == (len(set(digests(world, model))) == 1)
            if step > 8 and isinstance(then, DiLoCo | SparseLoCo):  # after the warm-up
                assert_equal_between_nodes(world, optimizer, EXCHANGED)
        optimizer.exchange()
        assert len(set(digests(world, model))) == 1


def cross_bytes(world):
    return sum(usage.cross_bytes for usage in world.usage())


def agreement_bytes(world):
    """Bytes with which ranks agree on an exchange. Collective.

    Whether all is finite, on weights, and afterwards on groups and parameters.
    """
    before = cross_bytes(world)
    for numbers in (1 + 2 * RANKS, 1 + 3):
        world.collectives.all_reduce(torch.zeros(numbers, dtype=torch.float64)).wait()
    return cross_bytes(world) - before


def wide(world, make, sync, stage, numel=30_000):
    """An optimizer of one large parameter, whose nodes change it unlike."""
    model = nn.Linear(numel, 1, bias=False)
    return model, make(model, PLAIN, sync=sync, stage=stage, partition="element")


def push(model, optimizer, step):
    generator = torch.Generator().manual_seed(RANK + 10 * step)
    update(optimizer, model(torch.randn(1, model.in_features, generator=generator)).sum())


@stages
@pytest.mark.parametrize(
    ("sync", "code"),
    [
        pytest.param(SparseLoCo(3), ChunkCode(64 / 4096), id="SparseLoCo"),
        pytest.param(LocalSGD(3), None, id="local SGD"),
        pytest.param(DiLoCo(3), None, id="DiLoCo"),
    ],
)
def test_nodes_send_the_bytes_of_a_code_in_an_exchange_and_nothing_before(
    world, make, sync, code, stage
):
    model, optimizer = wide(world, make, sync, stage)
    sent = []
    for step in range(3):
        before = cross_bytes(world)
        push(model, optimizer, step)
        sent.append(cross_bytes(world) - before)
    agreement = agreement_bytes(world)
    expected = 2 * (NODES - 1) * 30_000 * 4  # of an all-reduce
    if code:
        (piece,) = optimizer.slices()
        sizes = world.gather(piece.high - piece.low)[:PER_NODE] if optimizer.sharded else [30_000]
        unit = 8 if optimizer.sharded else 8 * PER_NODE
        expected = NODES * (NODES - 1) * sum(-(-code.nbytes(n) // unit) * unit for n in sizes)
    assert sent[2] - sent[1] == expected + agreement
    assert sent[:2] == [0, 0]


@pytest.mark.parametrize(
    ("sync", "raises_after"),
    [
        (SparseLoCo(2), 2),
        (DiLoCo(2), 2),
        *((kind(2, max_staleness=1), 4) for kind in (LocalSGD, DiLoCo, SparseLoCo)),
    ],
)
@pytest.mark.parametrize("value", [math.nan, 1e300])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_not_finite_is_named_on_all_ranks(*, world, make, sync, raises_after, value, stage):
    model = net()
    optimizer = make(model, PLAIN, sync=sync, stage=stage)
    one = rf"rank \d of node {NODES - 1}"
    said = f" is not finite in fp32 on {one}(, {one})*, and was not exchanged"
    weight = next(model.parameters())
    for step in range(1, raises_after + 1):
        loss_of(model, mine(world, samples(12, step))).backward()
        before, left = copies(optimizer, EXCHANGED), copies(optimizer, UNSENT)
        good = weight.detach().clone()
        if step == 2 and NODE == NODES - 1:
            with torch.no_grad():
                weight[3, 2] = value
        fails = pytest.raises(NonFiniteGradientError, match=said)
        with fails if step == raises_after else nullcontext():
            optimizer.step()
        optimizer.wait_for_parameters()
        assert not differing_ranks(digests(world, model), world.topology.nodes)
        if step == 2:
            with torch.no_grad():
                weight.copy_(good)
        optimizer.zero_grad()
    assert before
    assert all(map(torch.equal, before, copies(optimizer, EXCHANGED)))
    if sync.every == raises_after:  # nothing was in flight before
        assert all(map(torch.equal, left, copies(optimizer, UNSENT)))


def test_a_step_that_a_node_skips_is_followed_by_its_exchange_all_the_same(world, make):
    model = net()
    optimizer = make(model, sync=DiLoCo(every=3), non_finite="skip")
    for step in range(5):
        skips = step == 2 and NODE == NODES - 1
        factor = float("nan") if skips and RANK == RANKS - 1 else 1.0
        loss = loss_of(model, mine(world, samples(12, step))) * factor
        assert update(optimizer, loss).skipped == skips
        together = len(set(digests(world, model)))
        assert together == (1 if step == 2 else NODES)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_of_one_node_that_is_not_finite_ends_all_in_the_exchange(
    world, make, evaluates, stage
):
    model = net()
    optimizer = make(model, sync=DiLoCo(every=4, warmup=1), stage=stage)
    said = rf"a gradient or loss since the last exchange is not finite on .*of node {NODES - 1}$"
    warned = rf"not finite in 0\.weight, .* on rank {RANKS - 1}: the next exchange raises"
    first = RANK % PER_NODE == 0 and NODE == NODES - 1
    for step in range(4):
        before = model_digest(model)
        fails = step == 1 and NODE == NODES - 1
        factor = math.nan if fails and RANK == RANKS - 1 else 1.0
        loss = loss_of(model, mine(world, samples(12, step))) * factor
        with pytest.warns(UserWarning, match=warned) if fails and first else nullcontext():
            assert update(optimizer, loss).skipped == fails
        optimizer.wait_for_parameters()
        assert (model_digest(model) == before) == fails
    if evaluates:
        with pytest.raises(NonFiniteGradientError, match=said), optimizer.averaged():
            pass
    with pytest.raises(NonFiniteGradientError, match=said):
        update(optimizer, loss_of(model, mine(world, samples(12, 4))))


@pytest.mark.parametrize(
    ("kind", "stage"),
    [(net, 0), (lambda: nn.Linear(5, 3, bias=False).double(), 1)],
    ids=["all", "one rank of a node owns the parameter"],
)
def test_a_state_that_is_loaded_forgets_a_step_that_was_not_finite(world, make, kind, stage):
    model = kind()
    optimizer = make(model, sync=LocalSGD(every=2), stage=stage)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    factor = math.nan if NODE == NODES - 1 else 1.0
    warned = pytest.warns(UserWarning, match="the next exchange")
    with warned if factor != 1 and RANK % PER_NODE == 0 else nullcontext():
        update(optimizer, loss_of(model, mine(world, samples(12))) * factor)
    optimizer.wait_for_parameters()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    take_steps(world, model, optimizer, range(2))
    assert optimizer.in_sync


def test_a_state_of_torch_is_loaded_within_a_round(world, make):
    model = net()
    optimizer = make(model, PLAIN, sync=LocalSGD(every=2, weighted=True))
    take_steps(world, model, optimizer, range(1))
    numbers = optimizer.state_dict()["sync_weights"]
    optimizer.load_state_dict(PLAIN(model.parameters()).state_dict())
    assert optimizer.state_dict()["sync_weights"] == numbers
    assert not optimizer.in_sync
    optimizer.exchange()
    assert len(set(digests(world, model))) == 1


def whole(world, optimizer, key):
    """A tensor of the outer state by parameter, of every node: a list of flat tensors."""
    parts = world.gather(
        {(p.name, p.low): p.tensors[key] for p in optimizer.slices() if key in p.tensors}
    )
    per_node = RANKS // optimizer.sync_schedule.replicas
    nodes = [parts[first : first + per_node] for first in range(0, RANKS, per_node)]
    found = []
    for node in nodes:
        merged = {k: v.double() for part in node for k, v in part.items()}
        names = sorted({name for name, _ in merged})
        found.append(
            {n: torch.cat([merged[k] for k in sorted(merged) if k[0] == n]) for n in names}
        )
    return found


@pytest.mark.exhaustive
@pytest.mark.skipif(RANKS != 4, reason="needs two nodes, and then four")
@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_not_sent_continues_on_another_number_of_nodes(folder, stage):
    keys = EXCHANGED, UNSENT
    with init(ranks_per_node=2) as world:
        _, optimizer = run(world, folder, stage, SPARSE, 6, now=6)
        before = {key: whole(world, optimizer, key) for key in keys}
    with init(ranks_per_node=1) as world:
        model, optimizer = run(world, folder, stage, SPARSE, 6)
        after = {key: whole(world, optimizer, key) for key in keys}
        assert before[EXCHANGED][0].keys() == after[EXCHANGED][0].keys()
        for found in after[EXCHANGED]:
            assert all(torch.equal(found[n], before[EXCHANGED][0][n]) for n in found)
        for name, values in after[UNSENT][3].items():
            mean = sum(node[name] for node in before[UNSENT]) / 2
            torch.testing.assert_close(values, mean)
        for step in range(6, 12):
            take_step(world, model, optimizer, step)
            assert_equal_between_nodes(world, optimizer, EXCHANGED)
        optimizer.exchange()
        assert len(set(digests(world, model))) == 1


def test_several_optimizers_exchange_their_parts_of_a_model(world, make):
    model, other = net(), net()
    pairs = list(model.named_parameters())
    sync = DiLoCo(every=4)
    parts = [make(model, PLAIN, sync=sync, groups=part) for part in (pairs[:3], pairs[3:])]
    whole = make(other, PLAIN, sync=sync)
    for step in range(8):
        loss_of(model, mine(world, samples(12, step))).backward()
        for optimizer in parts:
            optimizer.step()
            optimizer.zero_grad()
        take_step(world, other, whole, step)
        assert_close(model, other)


def test_complex_parameters_travel_as_they_are(world, make):
    model = net()
    model.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))
    optimizer = make(model, PLAIN, sync=SPARSE)
    for step in range(9):
        loss = loss_of(model[:4], mine(world, samples(12, step)))
        update(optimizer, loss + ((model.turn - (1 + NODE) * (0.5 + 0.25j)).abs() ** 2).sum())
    assert_equal_between_nodes(world, optimizer, EXCHANGED)
    for (name, _, _), left in kept(optimizer, UNSENT).items():
        assert left.any() == (name != "turn")


@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_that_update_nothing_take_part(world, make, stage):
    model = Tiny().double()  # three elements
    optimizer = make(model, PLAIN, sync=SPARSE, stage=stage)
    for step in range(10):
        take_step(world, model, optimizer, step)
        optimizer.state_dict()
    assert_equal_between_nodes(world, optimizer, EXCHANGED)
    optimizer.exchange()
    assert len(set(digests(world, model))) == 1


def test_a_longer_warm_up_begins_the_outer_state_anew(world, cut):
    kind, first = partial(torch.optim.SGD, lr=0.1), net()
    before = cut(first, kind, sync=DiLoCo(every=2))
    take_steps(world, first, before, range(4))
    resumed, fresh = copy.deepcopy(first), copy.deepcopy(first)
    longer = cut(resumed, kind, sync=DiLoCo(every=2, warmup=9))
    longer.load_state_dict(before.state_dict())
    expected = cut(fresh, kind, sync=DiLoCo(every=2, warmup=5))
    for step in range(4, 13):
        take_step(world, resumed, longer, step)
        take_step(world, fresh, expected, step)
    assert_close(resumed, fresh)


def test_a_state_of_the_warm_up_is_loaded_after_it(world, cut):
    kind, sync, model, other = partial(torch.optim.SGD, lr=0.1), LocalSGD(3, 2), net(), net()
    start = copy.deepcopy(model.state_dict())
    optimizer, expected = cut(model, kind, sync=sync), cut(other, kind, sync=sync)
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


def test_one_model_of_two_optimizers_that_exchange_is_not_saved(world, cut, folder):
    model = net()
    pairs = list(model.named_parameters())
    first, second = ({"sync": LocalSGD(3), "groups": part} for part in (pairs[:2], pairs[2:]))
    one, another = cut(model, **first), cut(model, **second)
    words = "another optimizer with sync= trains parameters of model"
    said = refusal(world.checkpoints, folder, model=model, optimizer=one)
    assert words in said
    another.close()
    world.checkpoints(folder, model=model, optimizer=one)
    said = refusal(world.optimizer, model, torch.optim.SGD, lr=0.1, **second)
    assert words in said
    one.close()
    cut(model, **second)  # of which no checkpoint is made any more


@stages
def test_the_norm_of_a_step_is_that_of_the_whole_gradient(world, cut, stage):
    model = net()
    alone = PlainTraining(model, SGD)
    optimizer = cut(model, SGD, sync=LocalSGD(every=5, warmup=1), stage=stage)
    for step in (0, 1):  # of all ranks, then of a node's
        batch = samples(12, step)
        whole = tuple(c.chunk(NODES)[NODE] for c in batch) if step else batch
        norm = alone.step(loss_of(alone.model, whole))
        found = update(optimizer, loss_of(model, mine(world, batch))).grad_norm
        assert found == pytest.approx(norm, rel=1e-12)


@stages
def test_a_node_without_samples_waits_for_the_next_step(world, cut, stage):
    model = net()
    optimizer = cut(model, sync=LocalSGD(every=3), stage=stage)
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
    after = model_digest(model)
    optimizer.share(0)  # on all nodes
    assert optimizer.step().weight == 0
    optimizer.wait_for_parameters()
    assert len(set(digests(world, model))) == 1  # the exchange
    assert model_digest(model) != after


@pytest.mark.parametrize("stage", [0, 2])
def test_an_exception_of_one_rank_leaves_the_means_without_waiting_for_others(world, cut, stage):
    model = net()
    optimizer = cut(model, sync=LocalSGD(every=4), stage=stage, overlap_forward=False)
    update(optimizer, loss_of(model, mine(world, samples(12))))
    own = model_digest(model)

    def leave(error, *, late):
        with optimizer.averaged() as differ:
            assert differ == (model_digest(model) != own)
            if late:
                world.barrier()
            raise error

    with pytest.raises(AgreedError):
        leave(AgreedError("of all ranks", RANK), late=True)
    assert model_digest(model) == own
    with pytest.raises(KeyError):
        leave(KeyError("of this rank"), late=RANK > 0)
    if RANK == 0:
        world.barrier()  # the others are in the block still
    if stage and PER_NODE > 1:
        with pytest.raises(RuntimeError, match=r"in a block of optimizer\.averaged\(\), .*catch"):
            optimizer.step()
    else:
        assert model_digest(model) == own


def test_a_teacher_that_follows_is_that_of_rank_0_after_an_exchange(world, cut):
    torch.manual_seed(1)
    student = nn.Linear(5, 3).double()
    model = nn.ModuleDict(
        {"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)}
    )
    model.register_buffer("local", torch.zeros(2), persistent=False)
    optimizer = cut(model, sync=LocalSGD(every=2), check_every=1)
    teacher = model["teacher"].weight
    for step in range(7):
        x, _ = mine(world, samples(12, step))
        model.local += RANK
        everyone = world.gather((teacher, model.local))
        update(optimizer, student(x).square().mean())
        of_node, of_first = everyone[NODE * PER_NODE], everyone[0]
        exchanged = step % 2
        expected = of_first if exchanged else (everyone[RANK][0], of_node[1])
        for _ in range(2):
            assert torch.equal(teacher, expected[0])
            assert torch.equal(model.local, expected[1])
            with optimizer.averaged():
                assert torch.equal(teacher, of_first[0])
                assert torch.equal(model.local, of_first[1])
        with torch.no_grad():
            for mine_, its in zip(model["teacher"].parameters(), student.parameters(), strict=True):
                mine_.lerp_(its, 0.5)
    optimizer.exchange()
    assert len(set(digests(world, model))) == 1


def test_nodes_of_unequal_sizes_and_a_single_node_are_reported():
    told = pytest.warns(UserWarning, match="there is one node, so every step is synchronous")
    with init(ranks_per_node=RANKS) as one:
        with told if RANK == 0 else nullcontext():
            optimizer = one.optimizer(net(), ADAMW, sync=LocalSGD(2))
        assert optimizer.sync_schedule.replicas == 1
    if RANKS > 2:
        with init(ranks_per_node=RANKS - 1) as unequal:
            said = refusal(unequal.optimizer, net(), ADAMW, sync=LocalSGD(2))
        assert said.startswith(f"the nodes have {RANKS - 1}+1 ranks: nodes that exchange rarely n")


class CountsByNode(torch.optim.SGD):
    """Keeps a number of each node in its groups."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + NODE + 1


@pytest.mark.parametrize("saved_after", [1, 2])  # within a round, and after an exchange
@pytest.mark.parametrize("stage", [0, 2])
def test_each_node_goes_on_with_its_own_loss_scale_and_numbers(folder, stage, saved_after):
    found, options = (
        [],
        {"stage": stage, "lr": 0.1, "sync": LocalSGD(every=2), "loss_scale": "dynamic"},
    )
    for resumes in (False, True):
        with init(ranks_per_node=PER_NODE) as world:
            model = net()
            optimizer = world.optimizer(model, CountsByNode, **options)
            optimizer.param_groups[0]["count"] = 0
            checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=0)
            done = checkpoints.restore()
            assert done == (saved_after if resumes else 0)
            for step in range(done, saved_after):
                overflows = step == 0 and RANK == RANKS - 1
                loss = loss_of(model, mine(world, samples(12, step)))
                optimizer.backward(loss * (math.inf if overflows else 1), weight=1)
                assert optimizer.step().skipped == (step == 0 and NODE == NODES - 1)
                optimizer.zero_grad()
                checkpoints.save(step + 1, now=step + 1 == saved_after)
            checkpoints.close()
            assert optimizer.param_groups[0]["count"] == (NODE + 1) * (
                saved_after - (NODE == NODES - 1)
            )
            assert optimizer.in_sync == (saved_after == 2)
            found.append(world.gather(optimizer.state_dict()["loss_scale"]))
    assert found[0] == found[1]
    assert len({scale["value"] for scale in found[0]}) == 2
