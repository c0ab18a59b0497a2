"""Gradients that are compressed between nodes, by hooks of our own and by those of DDP."""

import itertools
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import RANK, bits, check_bits, in_order
from mpi4py import MPI
from oracle import SHARED, update
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from worlds import DEALT, RANKS, refusal

import mntrain
from mntrain import checkpoint
from zero import precision
from zero.comm_hooks import CommHook, ReducibleBucket
from zero.comm_hooks.between_nodes import Int8Hook
from zero.comm_hooks.codes import BlockCode
from zero.comm_hooks.ddp import DDPHook
from zero.layout import ParameterSpec, lay_out

pytestmark = pytest.mark.simulated

# Ranks alone on their nodes, nodes of two (the last may have one), and nodes of unequal size.
LAYOUTS = [1, *([2] if RANKS > 2 else []), *DEALT]
UNEQUAL = {2: 1, 3: "abb", 4: "abbb"}.get(RANKS, 2)
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
SGD = {"lr": 0.1, "momentum": 0.9}
CODE = BlockCode()
_numbers = itertools.count()


@pytest.fixture
def world(worlds):
    return worlds(layout=UNEQUAL)


class Seam:
    """A hook between the nodes of a world, called with buckets of one parameter."""

    def __init__(self, world, hook, numel, dtype=torch.float32, *, sharded=False):
        self.world, self.hook, self.sharded = world, hook, sharded
        hook.levels = self.levels = world.node_levels(f"test {next(_numbers)}")
        (self.layout,) = lay_out([ParameterSpec("p", (numel,), dtype)], 1 << 30, RANKS)

    def reduce(self, own):
        """The part of the sum of all ranks' tensors that this rank needs."""
        bucket = ReducibleBucket(0, self.layout, own.clone(), self.world.collectives, self.sharded)
        self.hook(bucket).wait()
        self.hook.end_reduction(1.0)
        self.hook.end_step(taken=True)
        return bucket.shard

    def lanes(self):
        """The elements of each lane, by the ranks that own its slots."""
        owners, bounds = self.world.topology.owners, self.layout.bounds
        ranges = []
        for lane in range(self.levels.lanes):
            locals_of = self.world.topology.local_rank
            count = self.levels.lanes
            slots = [s for s, rank in enumerate(owners) if locals_of(rank) % count == lane]
            assert slots == list(range(slots[0], slots[-1] + 1))
            ranges.append((bounds[slots[0]], bounds[slots[-1] + 1]))
        return ranges


def everyone(numel, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(RANKS, numel, generator=generator, dtype=torch.float64).to(dtype)


def coded(sums):
    """Return what sums are coded as, and leave in them what the code lacks."""
    code = torch.zeros(CODE.nbytes(len(sums)), dtype=torch.uint8)
    total = torch.zeros_like(sums)
    if len(sums):
        CODE.encode(sums, code)
        CODE.decode(code, total)
    return total


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@by_layout
def test_nodes_sums_are_coded_and_added_in_order(worlds, layout, sharded):
    world = worlds(layout=layout)
    cases = [(1, torch.float32), (1003, torch.float32), (777, torch.float64), (900, torch.bfloat16)]
    for numel, dtype in cases:
        seam = Seam(world, Int8Hook(), numel, dtype, sharded=sharded)
        wide = torch.promote_types(dtype, torch.float32)
        left = torch.zeros(len(world.topology.nodes), numel, dtype=wide)
        for step in range(3):
            given = everyone(numel, dtype, step)
            found = seam.reduce(given[RANK])
            expected = torch.zeros(numel, dtype=wide)
            for node, ranks in enumerate(world.topology.nodes):
                left[node] += in_order([given[rank] for rank in ranks]).to(wide)
                for low, high in seam.lanes():
                    expected[low:high] += coded(left[node, low:high])
            mine = slice(*seam.layout.shard(world.collectives.slot(RANK)))
            expected = expected.to(dtype)[mine] if sharded else expected.to(dtype)
            assert torch.equal(bits(found.clone()), bits(expected)), (numel, dtype, step)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@by_layout
def test_the_bytes_between_nodes_are_those_of_the_codes(worlds, layout, sharded):
    world, numel = worlds(layout=layout), 9001
    others = len(world.topology.nodes) - 1
    seam = Seam(world, Int8Hook(), numel, sharded=sharded)
    before = [used.cross_bytes for used in world.usage()]
    seam.reduce(torch.ones(numel))
    after = [used.cross_bytes for used in world.usage()]
    lengths = [high - low for low, high in seam.lanes()]
    expected = []
    for rank in range(RANKS):
        lane = world.topology.local_rank(rank)
        nbytes = CODE.nbytes(lengths[lane]) if lane < len(lengths) else 0
        expected.append(others * (nbytes + -nbytes % 8))
    assert [b - a for a, b in zip(before, after, strict=True)] == expected


def net(dtype=torch.float32):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Linear(12, 1)).to(
        dtype
    )


def samples(step, dtype=torch.float32, rows=8):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    x = torch.randn(rows, 12, generator=generator).to(dtype)
    return x, torch.tanh(x.sum(1, keepdim=True))


def train(world, hook, steps=5, *, model=None, optimizer=None, bad=(), after=None, **options):
    """Weights of this rank and the optimizer; a gradient of step `bad` is not finite on rank 0."""
    model = net() if model is None else model
    dtype = next(model.parameters()).dtype
    if optimizer is None:
        optimizer = world.optimizer(model, torch.optim.SGD, comm_hook=hook, **SGD | options)
    for step in range(steps) if isinstance(steps, int) else steps:
        x, y = samples(step, dtype)
        factor = math.inf if step in bad and RANK == 0 else 1.0
        update(optimizer, optimizer.scale(functional.mse_loss(model(x * factor), y)))
        if after:
            after(optimizer)
    optimizer.wait_for_parameters()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), optimizer


@pytest.mark.parametrize(("layout", "partition"), [(1, "element"), (UNEQUAL, "parameter")])
def test_stages_and_ranks_have_the_same_bits(worlds, layout, partition):
    world = worlds(layout=layout, bucket_mb=SHARED)
    results = []
    for stage in (0, 1, 2):
        weights, optimizer = train(world, Int8Hook(), stage=stage, partition=partition)
        assert any(world.gather(optimizer.memory().hook))
        results.append(weights)
    assert all(torch.equal(weights, results[0]) for weights in results)
    check_bits(world, results)
    assert not torch.equal(results[0], train(world, None)[0])


def test_the_loss_scale_changes_no_bits(world, monkeypatch):
    plain, _ = train(world, Int8Hook())
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 2)
    growing, optimizer = train(world, Int8Hook(), loss_scale="dynamic")
    assert optimizer.state_dict()["loss_scale"]["value"] == 2.0**18
    assert torch.equal(growing, plain)


@pytest.mark.parametrize(("stage", "by"), [(0, "optimizer"), (0, "model"), (2, "model")])
def test_gradients_that_are_discarded_leave_no_trace(world, stage, by):
    model = net()

    def discard(optimizer):
        x, y = samples(99)
        (1e3 * functional.mse_loss(model(x), y)).backward()
        (optimizer if by == "optimizer" else model).zero_grad()

    expected, _ = train(world, Int8Hook(), stage=stage)
    found, _ = train(world, Int8Hook(), model=model, after=discard, stage=stage)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_left_of_a_gradient_arrives_in_steps_that_do_not_use_the_parameter(world, stage):
    heads = nn.ModuleList([nn.Linear(5, 3, bias=False), nn.Linear(5, 4, bias=False)])
    before = heads[1].weight.detach().clone()
    optimizer = world.optimizer(heads, torch.optim.SGD, lr=1.0, comm_hook=Int8Hook(), stage=stage)
    x = everyone(5)[RANK]
    for step in range(8):
        update(optimizer, heads[1](x).sum() if step == 0 else 0.0 * heads[0](x).sum())
        if step == 3:  # a job goes on from here
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
    optimizer.wait_for_parameters()
    change = everyone(5).mean(dim=0).expand(4, 5)
    torch.testing.assert_close(before - heads[1].weight.detach(), change, rtol=0.0, atol=1e-6)


def test_loading_a_state_without_one_of_the_hook_forgets_what_was_kept(world):
    model = net()
    expected, _ = train(world, Int8Hook())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plain = world.optimizer(net(), torch.optim.SGD, **SGD).state_dict()
    _, optimizer = train(world, Int8Hook(), model=model)
    model.load_state_dict(start)
    optimizer.load_state_dict(plain)
    assert torch.equal(train(world, None, model=model, optimizer=optimizer)[0], expected)


def test_a_resumed_run_goes_on_with_the_same_bits(world, tmp_path):
    options = {"stage": 1}
    folder = Path(world.gather(str(tmp_path))[0])
    expected, _ = train(world, Int8Hook(), **options)
    model = net()
    _, optimizer = train(world, Int8Hook(), 3, model=model, **options)
    progress = checkpoint.Manifest(3, {}, samples=0, skipped_steps=0, eval_loss=None)
    saver = checkpoint.DirectorySaver(world, checkpoint.Saved(model, optimizer), folder, keep=1)
    saver.save(progress)
    model = net()
    resumed = world.optimizer(model, torch.optim.SGD, comm_hook=Int8Hook(), stage=1, **SGD)
    checkpoint.load(checkpoint.newest(world, folder), model, resumed, world)
    weights, _ = train(world, None, (3, 4), model=model, optimizer=resumed)
    assert torch.equal(weights, expected)
    other = world.optimizer(
        net(), torch.optim.SGD, comm_hook=CommHook(torch.bfloat16), stage=1, **SGD
    )
    with pytest.warns(UserWarning, match="anew") if world.master else nullcontext():
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.exhaustive
def test_accumulated_micro_batches_are_compressed_together_or_one_by_one(world):
    results = []
    for stage in (0, 1, 2):
        model = net()
        optimizer = world.optimizer(
            model, torch.optim.SGD, lr=0.1, comm_hook=Int8Hook(), stage=stage
        )
        for step in range(3):
            for micro in range(2 + (RANK == 0)):  # a rank has more of them than others
                x, y = samples(10 * step + micro)
                last = micro == 1 + (RANK == 0)
                with nullcontext() if last else optimizer.no_sync():
                    functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait_for_parameters()
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    check_bits(world, results)
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[2], results[0], rtol=0.0, atol=0.3)


def test_on_one_node_nothing_is_compressed_and_that_is_said_once(worlds, capfd):
    world = worlds(layout=None)
    capfd.readouterr()
    weights, optimizer = train(world, Int8Hook())
    said = capfd.readouterr().err
    assert said.count("all ranks are on one node, and Int8Hook compresses") == world.master
    assert torch.equal(weights, train(world, None)[0])
    assert optimizer.memory().hook == 0


def test_compress_is_the_hook_of_optimizers_that_are_given_none():
    options = {"ranks_per_node": 1, "device": "cpu"}
    with mntrain.init(compress="int8", **options) as world, mntrain.init(**options) as plain:
        assert torch.equal(train(world, None)[0], train(plain, Int8Hook())[0])
        assert "both say how gradients cross nodes" in refusal(train, world, Int8Hook())
    words = refusal(mntrain.init, compress="int8", wire_dtype="bf16", **options)
    assert "compress int8 and wire_dtype bf16 both say how gradients cross nodes" in words
    words = refusal(mntrain.init, compress="gzip", **options)
    assert re.match(r"compress: Input should be 'none'.* 'int8'.*, not 'gzip'", words)


@pytest.fixture(scope="module")
def group():
    comm = MPI.COMM_WORLD
    store = dist.TCPStore("localhost", 0, is_master=True) if RANK == 0 else None
    port = comm.bcast(store.port if store else None)
    store = store or dist.TCPStore("localhost", port)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_ddp_hook_without_a_process_group_is_refused(world):
    with pytest.raises(TypeError, match=r"give DDPHook\(state, hook\), in this order"):
        DDPHook(default_hooks.allreduce_hook, None)
    hook = DDPHook(None, default_hooks.allreduce_hook)
    said = refusal(train, world, hook)
    assert "has not been initialized, please make sure to call init_process_group" in said


@pytest.mark.processes
@pytest.mark.usefixtures("group")
def test_a_process_group_of_another_size_is_refused():
    alone, *_ = [dist.new_group([rank]) for rank in range(RANKS)]
    if RANK == 0:
        with pytest.raises(ValueError, match=f"has 1 ranks, and this one {RANKS}"):
            DDPHook(alone, default_hooks.allreduce_hook).bind(RANKS, None, scheduled=False)


@pytest.mark.processes
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(default_hooks.allreduce_hook, None), (default_hooks.bf16_compress_hook, torch.bfloat16)],
    ids=["allreduce", "bf16"],
)
def test_torchs_hooks_give_what_our_own_give(worlds, group, theirs, ours, stage):
    world = worlds(layout=1)
    weights, _ = train(world, DDPHook(group, theirs), stage=stage)
    expected, _ = train(world, CommHook(ours), stage=stage)
    check_bits(world, [weights])
    if RANKS == 2:  # one sum, of halves
        assert torch.equal(weights, expected)
    else:
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-2 if ours else 1e-6)


@pytest.mark.processes
@pytest.mark.usefixtures("group")
def test_torchs_powersgd_trains(worlds):
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=1,
    )
    world, model = worlds(layout=1), net()
    x, y = samples(0)
    before = functional.mse_loss(model(x), y)
    weights, _ = train(world, DDPHook(state, powerSGD_hook.powerSGD_hook), 6, model=model)
    check_bits(world, [weights])
    assert state.iter == 6
    assert state.total_numel_after_compression < 0.5 * state.total_numel_before_compression
    assert functional.mse_loss(model(x), y) < before
