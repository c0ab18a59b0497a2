"""Checkpoints on the disk: written by all ranks of one world, read by those of another."""

import copy
import functools
import os
import random
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from damages import DAMAGES as ALWAYS_SEEN
from damages import flip
from handmade import Keeping, Lamb, Listed
from models import Mixed, Strided, TiedTokenModel, Tiny, WithEmpty, double, net
from mpi4py import MPI
from oracle import ADAMW, EXACT, PlainTraining, assert_parity, loss_of, samples, update
from safetensors.torch import load_file
from states import (
    SIZES,
    SubWorlds,
    assert_same_slices,
    empty_like,
    gather_slices,
    mode_of,
    saved,
    train,
)
from torch import nn
from worlds import RANKS

import mntrain
from mntrain import checkpoint
from mntrain.checkpoint import Manifest, Saver
from mntrain.checkpoint.format import FILE, FILES, MODEL, OPTIMIZER
from mntrain.checkpoint.reader import inspect, list_checkpoints
from mntrain.errors import AgreedError

pytestmark = pytest.mark.mpi

RANK = MPI.COMM_WORLD.rank


@pytest.fixture(scope="module")
def worlds():
    made = SubWorlds()
    yield made
    made.close()


@pytest.fixture
def sharded(worlds):
    """A world, a model, and its optimizer at stage 1."""
    world, model = worlds(), net()
    optimizer = world.optimizer(model, ADAMW, stage=1)
    yield world, model, optimizer
    optimizer.close()


def progress(step):
    return Manifest(step, {"task": "none"}, samples=12, skipped_steps=0, eval_loss=None)


def save(world, model, optimizer, folder, *, step=2, keep=3):
    return Saver(world, model, optimizer, folder, keep).save(progress(step))


def expect_read_back(world, folder, other, state, kind=ADAMW, **options):
    """Read the newest checkpoint into a model and an optimizer, and compare what they have then."""
    resumed = world.optimizer(other, kind, **options)
    found = checkpoint.newest(world, folder)
    checkpoint.load(found, other, resumed, world)
    gathered = gather_slices(resumed)
    resumed.close()
    pieces, weights = state
    for label, tensor in other.state_dict().items():
        assert torch.equal(tensor, weights[label]), label
    if world.rank == 0:
        assert_same_slices(gathered, pieces)
    return found.manifest.step, found.skipped


def with_buffers():
    """A model with running statistics and a count."""
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


class OfEveryKind(nn.Module):
    """Empty, scalar, strided, fp32 and bf16 parameters, and buffers."""

    def __init__(self):
        super().__init__()
        kinds = (WithEmpty, Tiny, Strided, with_buffers)
        self.parts = nn.ModuleList([Mixed(), *(double(kind)() for kind in kinds)])

    def forward(self, x):
        parts = [part(x.to(next(part.parameters()).dtype)) for part in self.parts]
        return sum(part.double() for part in parts)


# Tiny has fewer elements than ranks.
@pytest.mark.parametrize("make_model", [double(Tiny), OfEveryKind], ids=["tiny", "every kind"])
def test_a_checkpoint_of_any_size_is_read_at_any_size(worlds, folder, make_model):
    """Saved by every number of ranks, read by every other; the stages take turns."""
    turn = 0
    for writers in SIZES:
        place = folder / str(writers)
        world, model = worlds(writers), make_model()
        optimizer = None
        if world is not None:
            optimizer = world.optimizer(model, ADAMW, **mode_of(writers))
            train(world, model, optimizer, range(2))
            save(world, model, optimizer, place)
        state = saved(optimizer, model)
        if optimizer is not None:
            optimizer.close()
        for readers in SIZES:
            turn += 1
            world, other = worlds(readers), empty_like(make_model())
            if world is not None:
                read = expect_read_back(world, place, other, state, **mode_of(turn))
                assert read == (2, {})


@pytest.mark.parametrize("size", SIZES)
def test_resumed_training_equals_uninterrupted_training(worlds, folder, size):
    model = double(Strided)()
    alone = PlainTraining(model, ADAMW)
    for step in range(6):
        alone.step(loss_of(alone.model, samples(12, step)))
    for turn, ranks in enumerate([RANKS, size, RANKS]):
        world = worlds(ranks)
        if world is not None:
            optimizer = world.optimizer(model, ADAMW, **mode_of(turn + size))
            if turn:
                checkpoint.load(checkpoint.newest(world, folder), model, optimizer, world)
            train(world, model, optimizer, range(2 * turn, 2 * turn + 2))
            save(world, model, optimizer, folder, step=turn)
            optimizer.close()
        MPI.COMM_WORLD.Barrier()
        if turn < 2:
            model = empty_like(model)
    assert_parity(worlds(), model, alone, EXACT)


def test_state_of_whole_parameters(worlds, folder):
    """Optimizers with state that is not of a parameter's shape, read by fewer ranks."""
    options = {"lr": 0.01}
    fewer = worlds(max(1, RANKS - 1))
    for kind in (torch.optim.Adafactor, torch.optim.NAdam, Lamb, Listed, Keeping):
        world, model, place = worlds(), net(torch.float32), folder / kind.__name__
        optimizer = world.optimizer(model, kind, stage=2, **options)
        train(world, model, optimizer, range(2))
        save(world, model, optimizer, place)
        state = saved(optimizer, model)
        optimizer.close()
        if fewer is not None:
            expect_read_back(fewer, place, empty_like(model), state, kind, stage=1, **options)


class Correlated(Keeping):
    """Also keeps correlations of all elements, which no file has by element."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                flat = p.grad.flatten()[:8]
                state = self.state[p].setdefault("deep", {})
                state["square"] = state.get("square", 0) + flat[:, None] * flat
                p.sub_(state["square"].mean(), alpha=0.1)


WAYS = [  # classes and partitions of what saves and what loads
    (Correlated, "auto", "auto"),
    (Listed, "element", "auto"),
    (Listed, "auto", "element"),
    (Keeping, "element", "parameter"),
]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_of_every_kind_goes_on_from_a_checkpoint(worlds, folder, stage):
    world = worlds()
    for number, (kind, saves, loads) in enumerate(WAYS):
        alone, model, place = PlainTraining(net(), kind), net(), folder / str(number)
        optimizer = world.optimizer(model, kind, stage=stage, partition=saves)
        train(world, model, optimizer, range(3))
        save(world, model, optimizer, place)
        optimizer.close()
        other = empty_like(model)
        resumed = world.optimizer(other, kind, stage=(stage + 1) % 3, partition=loads)
        checkpoint.load(checkpoint.newest(world, place), other, resumed, world)
        train(world, other, resumed, range(3, 6))
        resumed.close()
        for step in range(6):
            alone.step(loss_of(alone.model, samples(12, step, torch.float64)))
        assert_parity(world, other, alone)


class OfRank(Lamb):
    """Keeps a number of this rank under a key that is no parameter."""

    def step(self, closure=None):
        super().step()
        self.state["rank"] = {"number": RANK}


def test_state_of_no_parameter_that_differs_is_restored_on_as_many_ranks(worlds, folder):
    world, model = worlds(), net()
    optimizer = world.optimizer(model, OfRank, stage=1)
    train(world, model, optimizer, range(1))
    save(world, model, optimizer, folder)
    optimizer.close()
    for readers in {RANKS, max(1, RANKS - 1)}:
        if (world := worlds(readers)) is None:
            continue
        resumed = world.optimizer(other := net(), OfRank, stage=2)
        found = checkpoint.newest(world, folder)
        if readers == RANKS:
            checkpoint.load(found, other, resumed, world)
            assert resumed.state["rank"] == {"number": RANK}
        else:
            with pytest.raises(AgreedError, match=f"differed between the {RANKS} ranks"):
                checkpoint.load(found, other, resumed, world)
        resumed.close()


class Odd(Lamb):
    """Keeps what no checkpoint holds, from a step on."""

    def __init__(self, params, odd, lr=0.01):
        super().__init__(params, lr)
        self.odd, self.steps = odd, 0

    def step(self, closure=None):
        super().step()
        self.steps += 1
        if self.steps == 8:
            self.state[self.odd or self.param_groups[0]["params"][0]]["odd"] = object()


@pytest.mark.parametrize("odd", [None, "key"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_that_no_checkpoint_holds_is_refused_in_its_first_step(worlds, folder, stage, odd):
    world, model = worlds(), net()
    optimizer = world.optimizer(model, functools.partial(Odd, odd=odd), stage=stage)
    checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=1000)
    checkpoints.restore()
    for step in range(1, 9):
        train(world, model, optimizer, [step])
        refused = pytest.raises(ValueError, match=r"has optimizer.state.*odd, a object")
        with refused if step == 8 else nullcontext():
            checkpoints.save(step)
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_model_file_opens_with_the_safetensors_library(worlds, folder, stage):
    world = worlds()
    for name, model in (("a", TiedTokenModel()), ("b", with_buffers()), ("c", double(Strided)())):
        optimizer = world.optimizer(model, ADAMW, stage=stage)
        done = save(world, model, optimizer, folder / name)
        optimizer.close()
        found = load_file(done.path / MODEL)
        expected = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[label], expected[label]) for label in expected)
        assert done.nbytes == sum((done.path / name).stat().st_size for name in FILES)


def test_ranks_write_equal_parts(worlds, folder):
    world = worlds()
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    for stage in (0, 1, 2):
        optimizer = world.optimizer(model, ADAMW, stage=stage)
        update(optimizer, model(torch.ones(2, 300)).sum())
        path = save(world, model, optimizer, folder / str(stage)).path
        optimizer.close()
        for name in (MODEL, OPTIMIZER):
            # With one run for each rank and tensor at least, nobody wrote a whole file.
            longest = max(part.length for part in inspect(path).checksums[name])
            whole = (path / name).stat().st_size
            assert longest <= whole / RANKS + 4096


def test_random_states_are_restored_at_the_same_size_only(worlds, folder):
    world, model = worlds(), net()
    optimizer = world.optimizer(model, ADAMW)

    def drawn():
        return [*torch.rand(3).tolist(), random.random(), random.gauss(0, 1), *np.random.rand(3)]

    torch.manual_seed(world.rank)
    random.gauss(0, 1)
    np.random.seed(world.rank)
    save(world, model, optimizer, folder)
    expected = drawn()
    drawn()
    checkpoint.restore_randomness(checkpoint.newest(world, folder), world)
    assert drawn() == expected
    optimizer.close()
    for size in range(1, RANKS):
        smaller = worlds(size)
        if smaller is not None:
            checkpoint.restore_randomness(checkpoint.newest(smaller, folder), smaller)
            assert drawn() != expected


DAMAGES = {
    **{how: ALWAYS_SEEN[how] for how in ("a changed manifest", "a model cut", "no optimizer")},
    "a bit": (lambda path: flip(path / OPTIMIZER, -7), f"{OPTIMIZER} is damaged between bytes"),
    "no manifest": (lambda path: (path / FILE).unlink(), f"{FILE} cannot be read: No such file"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(sharded, folder, how):
    world, model, optimizer = sharded
    train(world, model, optimizer, range(1))
    paths = [save(world, model, optimizer, folder, step=step).path for step in (1, 2)]
    damage, said = DAMAGES[how]
    if world.master:
        damage(paths[1])
    MPI.COMM_WORLD.Barrier()
    found = checkpoint.newest(world, folder)
    assert found.path == paths[0]
    assert list(found.skipped) == [paths[1]]
    assert said in found.skipped[paths[1]]
    MPI.COMM_WORLD.Barrier()
    if world.master:
        damage(paths[0])
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(mntrain.AgreedError, match="no checkpoint in") as error:
        checkpoint.newest(world, folder)
    assert said in str(error.value)


def test_a_checkpoint_of_another_model_is_refused(sharded, folder):
    world, model, optimizer = sharded
    save(world, model, optimizer, folder)
    other = nn.Sequential(nn.Linear(5, 17), nn.Linear(17, 3)).double()
    resumed = world.optimizer(other, ADAMW, stage=1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(mntrain.AgreedError, match="of another model") as error:
        checkpoint.load(checkpoint.newest(world, folder), other, resumed, world)
    resumed.close()
    assert "0.weight is (16, 5) in the checkpoint, (17, 5) in the model" in str(error.value)
    assert "1.weight is absent in the checkpoint, (3, 17) in the model" in str(error.value)
    assert all(torch.equal(before[name], now) for name, now in other.state_dict().items())


def test_an_expanded_buffer_is_saved_and_loaded(worlds, folder):
    world, models = worlds(), []
    for value in (1.0, 2.0):
        model = net()
        model.register_buffer("rows", torch.full((1, 3), value).expand(4, 3))
        optimizer = world.optimizer(model, ADAMW, stage=1)
        if not models:
            save(world, model, optimizer, folder)
        else:
            checkpoint.load(checkpoint.newest(world, folder), model, optimizer, world)
        optimizer.close()
        models.append(model)
    assert models[1].rows.tolist() == [[1.0] * 3] * 4
    assert models[1].rows.stride() == (0, 1)


def test_training_continues_while_a_checkpoint_is_written(worlds, folder, monkeypatch):
    """The checkpoint holds the state at `begin`, not that of later steps."""
    world, model, gate = worlds(), net(), threading.Event()
    optimizer = world.optimizer(model, ADAMW, stage=2)
    saver = Saver(world, model, optimizer, folder, keep=3)
    write = os.pwrite
    if RANK == RANKS - 1:  # has a slow disk
        monkeypatch.setattr(
            "mntrain.checkpoint.format.os.pwrite", lambda *args: gate.wait() and write(*args)
        )
    for turn in (1, 2):
        train(world, model, optimizer, range(turn))
        state = saved(optimizer, model)
        gate.clear()
        saver.begin(progress(turn))
        train(world, model, optimizer, range(10, 13))
        assert saver.saving
        assert sum(world.gather(saver.ready())) < RANKS
        assert len(list_checkpoints(folder)) == turn - 1
        gate.set()
        done = saver.finish()
        assert not saver.saving
        assert list_checkpoints(folder)[0] == done.path
        assert expect_read_back(world, folder, empty_like(net()), state, stage=1) == (turn, {})
        train(world, model, optimizer, range(20, 21))
    optimizer.close()


def test_advance_does_not_wait_when_all_ranks_are_ready(sharded, folder):
    world, model, optimizer = sharded
    saver = Saver(world, model, optimizer, folder, keep=3)
    assert saver.ready() == 0
    saver.begin(progress(1))
    stages = []
    while saver.saving:
        while sum(world.gather(saver.ready())) < RANKS:
            time.sleep(0.001)
        stages.append(saver.advance())
        if saver.saving:  # the end of the script would wait for it on every rank
            saver._pending.published.result(timeout=30)
    assert [stage and stage.path for stage in stages] == [None, list_checkpoints(folder)[0]]


# Calls that fail, and the rank on which they do.
FAILURES = {
    "mntrain.checkpoint.saver.os.pwrite": RANKS - 1,
    "mntrain.checkpoint.format.os.fsync": RANKS // 2,
    "mntrain.checkpoint.saver.Path.mkdir": 0,
    "mntrain.checkpoint.saver.os.fsync": 0,
    "mntrain.checkpoint.saver.Path.rename": 0,
}


@pytest.mark.parametrize("way", ["at once", "begun"])
@pytest.mark.parametrize("call", FAILURES)
def test_a_failed_save_leaves_earlier_checkpoints_intact(sharded, folder, call, way):
    world, model, optimizer = sharded
    saver = Saver(world, model, optimizer, folder, keep=3)
    path = saver.save(progress(1)).path

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    def save():
        if way == "at once":
            saver.save(progress(2))
        saver.begin(progress(2))
        while sum(world.gather(saver.ready())) < RANKS or not saver.advance():
            pass

    with pytest.MonkeyPatch.context() as patch:
        if FAILURES[call] == RANK:
            patch.setattr(call, refuse)
        with pytest.raises(mntrain.AgreedError, match="step-00000002 was not saved") as error:
            save()
    assert "No space left on device" in str(error.value)
    assert not saver.saving
    MPI.COMM_WORLD.Barrier()
    assert list_checkpoints(folder) == [path]
    assert [one.name for one in (folder / "checkpoints").iterdir()] == [path.name]
    assert checkpoint.newest(world, folder).path == path
    MPI.COMM_WORLD.Barrier()
    assert saver.save(progress(3)).path == list_checkpoints(folder)[0]


def test_a_folder_that_only_the_master_sees_is_named(sharded, folder, monkeypatch):
    world, model, optimizer = sharded
    own = folder / f"of rank {RANK}"
    if RANKS == 1:
        save(world, model, optimizer, own)
    else:
        monkeypatch.setattr("mntrain.checkpoint.saver._VISIBLE_WITHIN_S", 0.2)
        with pytest.raises(
            mntrain.AgreedError, match="is it on a file system that all nodes share"
        ):
            save(world, model, optimizer, own)
