"""Checkpoints on the disk: written by all ranks of one world, read by those of another."""

import errno
import functools
import os
import random
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from damages import flip
from handmade import Keeping, Lamb, Listed
from models import Mixed, Strided, TiedTokenModel, Tiny, WithEmpty, double, net
from mpi4py import MPI
from oracle import ADAMW, PlainTraining, assert_parity, loss_of, samples, update
from safetensors.torch import load_file
from states import (
    SIZES,
    NumberOfRank,
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
from mntrain.checkpoint import DirectorySaver, Manifest, Saved, reader
from mntrain.checkpoint.format import FILE, FILES, MODEL, OPTIMIZER, RANDOM
from mntrain.checkpoint.reader import list_checkpoints
from mntrain.checks.storage import PAGE_BYTES
from mntrain.errors import AgreedError
from zero import ZeroOptimizer

pytestmark = pytest.mark.simulated

RANK = MPI.COMM_WORLD.rank


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
    if world.master:
        folder.mkdir(exist_ok=True)
    return DirectorySaver(world, Saved(model, optimizer), folder, keep).save(progress(step))


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


# Tiny, which every kind holds too, has fewer elements than ranks: its reads take turns.
@pytest.mark.parametrize("make_model", [double(Tiny), OfEveryKind], ids=["tiny", "every kind"])
def test_a_checkpoint_of_any_size_is_read_at_any_size(worlds, folder, make_model):
    """Saved by every number of ranks, read by every other; the stages take turns."""
    every = make_model is OfEveryKind
    turn = 0
    for writers in SIZES:
        place = folder / str(writers)
        world, model = worlds(size=writers), make_model()
        optimizer = None
        if world is not None:
            optimizer = world.optimizer(model, ADAMW, **mode_of(writers))
            train(world, model, optimizer, range(2))
            save(world, model, optimizer, place)
        state = saved(optimizer, model)
        if optimizer is not None:
            optimizer.close()
        for readers in SIZES if every else [writers % RANKS + 1]:
            turn += 1
            world, other = worlds(size=readers), empty_like(make_model())
            if world is not None:
                read = expect_read_back(world, place, other, state, **mode_of(turn))
                assert read == (2, {})


PRECISIONS = [  # parameters and gather dtypes of what saves, and of what loads
    (torch.bfloat16, None, torch.float32, None),
    (torch.bfloat16, None, torch.float16, None),
    (torch.float32, torch.bfloat16, torch.float32, None),
    (torch.float32, torch.bfloat16, torch.float32, torch.float16),
]


def at_precision(world, model, gather_dtype):
    named = model.named_parameters()
    return ZeroOptimizer(named, ADAMW, world.collectives, stage=1, gather_dtype=gather_dtype)


def test_master_weights_go_on_at_another_precision(worlds, folder):
    world = worlds()
    for number, (own, gathered, dtype, travels) in enumerate(PRECISIONS):
        model, place = net(own), folder / str(number)
        optimizer = at_precision(world, model, gathered)
        train(world, model, optimizer, range(3))
        with torch.no_grad():
            model[0].bias.fill_(2.0)  # a change of the script's own stays
        save(world, model, optimizer, place)
        pieces, _ = saved(optimizer, model)
        optimizer.close()
        other = empty_like(model).to(dtype)
        resumed = at_precision(world, other, travels)
        checkpoint.load(checkpoint.newest(world, place), other, resumed, world)
        for piece in pieces:
            master, parameter = piece.tensors["master"], other.get_parameter(piece.name)
            if piece.name == "0.bias":
                master = torch.full_like(master, 2.0)
            rounded = master.to(travels or dtype).to(dtype)
            assert torch.equal(parameter.detach().flatten(), rounded), (piece.name, number)
        resumed.full_state_dict()  # as at a step, master weights follow changed parameters
        masters = {piece.name: piece.tensors.get("master") for piece in saved(resumed, other)[0]}
        resumed.close()
        for piece in pieces:
            if piece.name != "0.bias" and (travels or dtype == torch.float16):
                assert torch.equal(masters[piece.name], piece.tensors["master"])


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
    (torch.optim.Adafactor, "auto", "auto"),
    (Lamb, "auto", "auto"),
]


RARE = [(0, WAYS[3:]), (1, WAYS), (2, WAYS[:3])]


@pytest.mark.parametrize(
    ("stage", "ways"),
    [
        (0, WAYS[:3]),
        (2, WAYS[3:]),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in RARE),
    ],
)
def test_state_of_every_kind_goes_on_from_a_checkpoint(worlds, folder, stage, ways):
    """On as many ranks, or on one fewer."""
    for number, (kind, saves, loads) in enumerate(ways):
        alone, model, place = PlainTraining(net(), kind), net(), folder / str(number)
        world = worlds()
        optimizer = world.optimizer(model, kind, stage=stage, partition=saves)
        train(world, model, optimizer, range(3))
        save(world, model, optimizer, place)
        optimizer.close()
        other = empty_like(model)
        if (world := worlds(size=RANKS - number % 2)) is None:
            continue
        resumed = world.optimizer(other, kind, stage=(stage + 1) % 3, partition=loads)
        checkpoint.load(checkpoint.newest(world, place), other, resumed, world)
        train(world, other, resumed, range(3, 6))
        resumed.close()
        for step in range(6):
            alone.step(loss_of(alone.model, samples(12, step, torch.float64)))
        assert_parity(world, other, alone, 1e-9)


def test_state_of_no_parameter_that_differs_is_restored_on_as_many_ranks(worlds, folder):
    world, model = worlds(), net()
    optimizer = world.optimizer(model, NumberOfRank, stage=1)
    train(world, model, optimizer, range(1))
    save(world, model, optimizer, folder)
    optimizer.close()
    for readers in {RANKS, RANKS - 1}:
        if (world := worlds(size=readers)) is None:
            continue
        resumed = world.optimizer(other := net(), NumberOfRank, stage=2)
        found = checkpoint.newest(world, folder)
        if readers == RANKS:
            checkpoint.load(found, other, resumed, world)
            assert resumed.state["rank"] == {"number": RANK}
        else:
            with pytest.raises(AgreedError, match=f"differed between the {RANKS} ranks"):
                checkpoint.load(found, other, resumed, world)
        resumed.close()


class Odd(Lamb):
    """Keeps what no checkpoint holds, from a step on; 0: from the start."""

    def __init__(self, params, odd, first=8, lr=0.01):
        super().__init__(params, lr)
        self.odd, self.first, self.steps = odd, first, 0
        self.keep()

    def step(self, closure=None):
        super().step()
        self.steps += 1
        self.keep()

    def keep(self):
        if self.steps == self.first:
            self.state[self.odd or self.param_groups[0]["params"][0]]["odd"] = object()


@pytest.mark.parametrize("odd", [None, "key"])
@pytest.mark.parametrize("stage", [0, 2])
def test_state_that_no_checkpoint_holds_is_refused_as_soon_as_it_is_there(
    worlds, folder, stage, odd
):
    world, model = worlds(), net()
    early = world.optimizer(model, functools.partial(Odd, odd="key", first=0), stage=stage)
    checkpoints = world.checkpoints(folder / "early", model=model, optimizer=early, every=1000)
    with pytest.raises(AgreedError, match=r"has optimizer.state.*odd, a object"):
        checkpoints.restore()
    early.close()
    optimizer = world.optimizer(model, functools.partial(Odd, odd=odd), stage=stage)
    checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=1000)
    checkpoints.restore()
    for step in range(1, 9):
        train(world, model, optimizer, [step])
        refused = pytest.raises(ValueError, match=r"has optimizer.state.*odd, a object")
        with refused if step == 8 else nullcontext():
            checkpoints.save(step)
    optimizer.close()


def test_the_model_file_opens_with_the_safetensors_library(worlds, folder):
    world = worlds()
    for name, model in (("a", TiedTokenModel()), ("b", with_buffers()), ("c", double(Strided)())):
        optimizer = world.optimizer(model, ADAMW, stage=2)
        done = save(world, model, optimizer, folder / name)
        optimizer.close()
        found = load_file(done.path / MODEL)
        expected = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[label], expected[label]) for label in expected)
        assert done.nbytes == sum((done.path / name).stat().st_size for name in FILES)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_write_equal_parts_and_no_page_together(worlds, folder, monkeypatch, stage):
    """A page that two ranks write, a network file system may write back with what one of them has.

    The parameters have odd sizes, and some optimizer state of each rank is of another dtype.
    """
    world, written, write = worlds(), [], os.pwrite

    def noted(file, data, start):
        path = os.readlink(f"/proc/self/fd/{file}")
        written.append((os.path.basename(path), start, start + len(data)))
        return write(file, data, start)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(301, 199), nn.Linear(199, 97).bfloat16(), nn.Linear(97, 3))
    optimizer = world.optimizer(model, ADAMW, stage=stage)
    first, second, third = model
    update(optimizer, third(second(first(torch.ones(2, 301)).bfloat16()).float()).sum())
    monkeypatch.setattr("mntrain.checkpoint.format.os.pwrite", noted)
    path = save(world, model, optimizer, folder).path
    monkeypatch.undo()
    optimizer.close()
    by_rank = world.gather(written)
    for name in FILES:
        whole = (path / name).stat().st_size
        pages = [
            {
                page
                for file, start, stop in own
                if file == name
                for page in range(start // PAGE_BYTES, -(-stop // PAGE_BYTES))
            }
            for own in by_rank
        ]
        assert sum(map(len, pages)) == len(set().union(*pages)) == -(-whole // PAGE_BYTES)
        if name != RANDOM:
            longest = max(len(own) for own in pages) * PAGE_BYTES
            assert longest <= whole / RANKS + 2 * PAGE_BYTES


@pytest.mark.processes  # Python's random numbers are the process's
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
        smaller = worlds(size=size)
        if smaller is not None:
            checkpoint.restore_randomness(checkpoint.newest(smaller, folder), smaller)
            assert drawn() != expected


DAMAGES = {
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


class OtherOnEachRank(nn.Linear):
    """Has an extra state and a buffer that a forward changes on each rank apart."""

    def __init__(self):
        super().__init__(5, 3, dtype=torch.float64)
        self.seen = []
        self.register_buffer("kept", torch.zeros(7))

    def forward(self, x):
        self.seen.append(RANK + 3)
        self.kept += RANK + 1
        return super().forward(x)

    def get_extra_state(self):
        return torch.tensor(self.seen * (RANK + 1), dtype=torch.int64)

    def set_extra_state(self, state):
        self.seen = state.tolist()


def test_what_differs_between_ranks_is_saved_as_the_master_has_it(worlds, folder):
    world, model = worlds(), OtherOnEachRank()
    optimizer = world.optimizer(model, ADAMW, stage=1)
    loss_of(model, samples(6, 1)).backward()
    optimizer.step()
    model(samples(6, 1)[0])  # as an evaluation does
    checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=0)
    checkpoints.restore()
    checkpoints.save(1, now=True)
    checkpoints.close()
    kept = world.gather(model.kept)[0]
    other = OtherOnEachRank()
    resumed = world.optimizer(other, ADAMW, stage=1)
    checkpoint.load(checkpoint.newest(world, folder), other, resumed, world)
    assert other.seen == [3, 3]
    assert torch.equal(other.kept, kept)
    assert torch.equal(other.weight, model.weight)
    optimizer.close()
    resumed.close()


class Growing(nn.Linear):
    """Keeps its inputs in a buffer."""

    def __init__(self):
        super().__init__(5, 3, dtype=torch.float64)
        self.register_buffer("queue", torch.zeros(0, 5, dtype=torch.float64))

    def forward(self, x):
        self.queue = torch.cat([self.queue, x.detach()])
        return super().forward(x)


def test_buffers_that_grow_are_refused_at_the_first_save(worlds, folder):
    world, model = worlds(), Growing()
    optimizer = world.optimizer(model, ADAMW, stage=2)
    checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=1000)
    checkpoints.restore()
    train(world, model, optimizer, [1])
    said = (
        r"the model is not as it was made: queue is \(\d+, 5\), and was \(0, 5\).*not set queue\)"
    )
    for now in (False, True):
        with pytest.raises(AgreedError, match=said):
            checkpoints.save(1, now=now)
    checkpoints.close()
    optimizer.close()


def test_training_continues_while_a_checkpoint_is_written(worlds, folder, monkeypatch):
    """The checkpoint holds the state at `begin`, not that of later steps."""
    world, model, gate = worlds(), net(), threading.Event()
    optimizer = world.optimizer(model, ADAMW, stage=2)
    saver = DirectorySaver(world, Saved(model, optimizer), folder, keep=3)
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
    saver = DirectorySaver(world, Saved(model, optimizer), folder, keep=3)
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


class FailingReads:
    """Reading of files in which some reads fail, or give other bytes."""

    def __init__(self, monkeypatch, error):
        self.error, self.left, self.calls = error, 0, 0
        self.compare = reader.compare
        monkeypatch.setattr(reader, "compare", self)

    def __call__(self, path, parts):
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        self.compare(path, parts)


def test_what_cannot_be_read_is_tried_again_and_then_refused_and_is_not_damaged(
    sharded, folder, monkeypatch
):
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    world, model, optimizer = sharded
    paths = [save(world, model, optimizer, folder, step=step).path for step in (1, 2)]
    monkeypatch.setattr(reader, "RETRY_AFTER_S", (0.01, 0.02))
    broken = FailingReads(monkeypatch, stale)
    for left, refused in ((1, False), (2, False), (3, True)):
        broken.left = left if RANK == RANKS - 1 else 0
        if not refused:
            found = checkpoint.newest(world, folder)
            assert (found.path, found.skipped) == (paths[1], {})
            continue
        with pytest.raises(mntrain.AgreedError, match="cannot be read") as error:
            checkpoint.newest(world, folder)
        assert stale.strerror in str(error.value)
        assert str(error.value).startswith(f"rank {RANKS - 1}: {paths[1]} cannot be read (")
    assert checkpoint.newest(world, folder).path == paths[1]
    left = [2]  # a run whose checkpoints cannot be listed is not one without checkpoints

    def refuse(*_):
        left[0] -= 1
        if left[0] < 0:
            return list_folder(folder / "checkpoints")
        raise stale

    list_folder = os.listdir
    for name in ("listdir", "scandir") if world.master else ():
        monkeypatch.setattr(os, name, refuse)
    assert checkpoint.newest(world, folder).path == paths[1]
    left[0] = 3
    with pytest.raises(mntrain.AgreedError, match=f"{folder} cannot be read") as error:
        checkpoint.newest(world, folder)
    assert stale.strerror in str(error.value)


def test_a_manifest_that_cannot_be_read_is_no_reason_to_remove_the_best(
    sharded, folder, monkeypatch
):
    world, model, optimizer = sharded
    saver = DirectorySaver(world, Saved(model, optimizer), folder, keep=1)
    saver.save(replace(progress(1), eval_loss=0.5))
    monkeypatch.setattr(reader, "read_manifest", unreadable)
    saver.save(replace(progress(2), eval_loss=0.7))
    if world.master:
        assert [path.name[-1] for path in list_checkpoints(folder)] == ["2", "1"]
    with pytest.raises(mntrain.AgreedError, match="Stale file handle"):
        saver.best_score(2, "eval_loss")
    monkeypatch.undo()
    assert saver.best_score(2, "eval_loss") == 0.5


def unreadable(path):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_the_first_save_is_read_back_on_another_node(folder, monkeypatch):
    """A file system that keeps other bytes than a rank wrote, with the checksum of these."""
    with mntrain.init(ranks_per_node=1, device="cpu") as world:
        model = net()
        optimizer = world.optimizer(model, ADAMW, stage=1)
        train(world, model, optimizer, range(1))
        saver, write, reads = (
            DirectorySaver(world, Saved(model, optimizer), folder, keep=3),
            os.pwrite,
            [],
        )
        compare = reader.compare
        monkeypatch.setattr(
            "mntrain.checkpoint.saver.compare", lambda *args: reads.append(1) or compare(*args)
        )

        def write_zeros(file, data, start):
            assert write(file, bytes(len(data)), start) == len(data)
            return len(data)

        with pytest.MonkeyPatch.context() as patch:
            if RANK == RANKS - 1:
                patch.setattr("mntrain.checkpoint.format.os.pwrite", write_zeros)
            with pytest.raises(mntrain.AgreedError, match="was not saved") as error:
                saver.save(progress(1))
            assert "reads otherwise" in str(error.value)
            assert "a file system that keeps what several nodes write" in str(error.value)
            assert list_checkpoints(folder) == []
        for step in (2, 3):
            reads.clear()
            saver.begin(progress(step))
            while saver.saving:
                saver.advance()
            assert bool(reads) == (step == 2)
        assert checkpoint.newest(world, folder).manifest.step == 3
        optimizer.close()


@pytest.mark.parametrize("way", ["at once", "begun"])
def test_a_save_without_a_thread_writes_at_once(sharded, folder, monkeypatch, way):
    world, model, optimizer = sharded
    saver = DirectorySaver(world, Saved(model, optimizer), folder, keep=3)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    if RANK == RANKS - 1:
        monkeypatch.setattr("mntrain.checkpoint.saver.threading.Thread.start", refuse)
    if way == "begun":
        saver.begin(progress(1))
        assert saver.ready() or RANK < RANKS - 1
        saver.finish()
    else:
        saver.save(progress(1))
    assert checkpoint.newest(world, folder).manifest.step == 1


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_directory_that_is_gone_is_not_made_anew_by_a_save(sharded, folder, moved):
    world, model, optimizer = sharded
    run = folder / "run"
    if world.master:
        run.mkdir()
    saver = DirectorySaver(world, Saved(model, optimizer), run, keep=3)
    saver.save(progress(1))
    MPI.COMM_WORLD.Barrier()
    if world.master:
        run.rename(folder / "there") if moved else shutil.rmtree(run)
    with pytest.raises(mntrain.AgreedError, match=r"was not saved: .*No such file or directory"):
        saver.save(progress(2))
    assert not run.exists()
