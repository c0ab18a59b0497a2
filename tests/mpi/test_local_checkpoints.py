"""Checkpoints in the nodes' memory: what is restored when nodes are lost. A rank is a node."""

import copy
import errno
import os
import resource
import shutil
import socket
import threading
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest
import torch
from damages import flip
from mpi4py import MPI
from states import assert_same_slices, gather_slices
from torch import nn
from waiting import until
from worlds import RANKS, hosts, meet, refusal

import mntrain
from mntrain import AgreedError
from mntrain.checkpoint import partner_copies, saver
from mntrain.checkpoint.format import FILE, OPTIMIZER
from mntrain.checkpoint.partner_copies import partner_nodes
from mntrain.recorder.launch_notes import VARIABLE, LaunchNotes
from mntrain.run import local_saving

COMM = MPI.COMM_WORLD
LAST = 8


class Run:
    """An own loop that saves in the nodes' memory after every second step, and in its directory."""

    def __init__(self, world, folder, stage=0, **options):
        torch.manual_seed(3)
        self.world = world
        self.model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3)).double()
        options = {"every": 0, "local": folder / "local", "local_every": 2, **options}
        self.optimizer = world.optimizer(self.model, torch.optim.AdamW, lr=0.05, stage=stage)
        self.checkpoints = world.checkpoints(
            folder / options.pop("run", "run"),
            model=self.model,
            optimizer=self.optimizer,
            **options,
        )
        self.done = self.checkpoints.restore()
        self.losses = {}

    def train(self, last):
        """Train to a step; each save in the nodes' memory is complete before the next step."""
        for step in range(self.done + 1, last + 1):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
            low, high = (12 * (self.world.rank + i) // self.world.size for i in (0, 1))
            loss = (self.model(x[low:high]) - x[low:high, :3]).square().mean()
            self.optimizer.backward(loss, weight=high - low)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses[step] = self.world.mean(loss.item(), weight=high - low)
            self.checkpoints.save(step)
            self.complete()
        self.done = last
        return self.losses

    def complete(self):
        local = self.checkpoints._local
        while local.saver.saving:
            if sum(self.world.gather(local.saver.ready())) >= self.world.size:
                local._advance()

    def state(self):
        return gather_slices(self.optimizer), copy.deepcopy(self.model.state_dict())


@contextmanager
def running(folder, *, killed=False, **options):
    """A run, which all ranks leave as by a kill."""
    try:
        with mntrain.init(device="cpu", ranks_per_node=1) as world:
            yield Run(world, folder, **options)
            if killed:
                raise AgreedError("killed", world.rank)
    except AgreedError as error:
        if str(error) != "killed":
            raise
    meet()


def assert_state(run, state):
    """Compare a run with what `Run.state` returned, on rank 0 or all."""
    gathered = gather_slices(run.optimizer)
    if COMM.rank == 0:
        assert_same_slices(gathered, state[0])
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, state[1][name])


def once(function, *args):
    """Call a function on rank 0 alone."""
    meet()
    if COMM.rank == 0:
        function(*args)
    meet()


def lose(folder, nodes):
    for node in nodes:
        for path in (folder / "local").glob(f"*/node-{node}"):
            shutil.rmtree(path)


def slices_of(folder, node, name=OPTIMIZER):
    """The files of a node, the newest step's first."""
    return sorted((folder / "local").glob(f"*/node-{node}/*/step-*/{name}"), reverse=True)


def steps_of(folder):
    """The names of the steps on this rank's node, the newest first."""
    return [path.parent.name for path in slices_of(folder, COMM.rank)]


def test_damaged_slices_are_taken_from_the_copy(folder, capfd):
    def damage(node):
        path = slices_of(folder, node)[0]
        size = path.stat().st_size
        for at in range(size - size // 4, size, 64):  # in the region of the last rank, at stage 1
            flip(path, at)

    with running(folder, stage=1, killed=True) as run:
        run.train(4)
        state = run.state()
    last, partner = RANKS - 1, partner_nodes([""] * RANKS)[RANKS - 1]
    once(damage, last)
    once(os.truncate, slices_of(folder, 0, FILE)[0], 7)
    with running(folder, stage=1, killed=True) as run:
        assert run.done == 4
        assert_state(run, state)
        run.train(6)
        run.checkpoints.save(6, now=True)
        run.train(8)
    for node in (last, partner):
        once(damage, node)
    capfd.readouterr()
    with running(folder, stage=1) as run:
        assert run.done == 6
    if COMM.rank == 0:
        assert "step-00000008 was passed over: in the nodes' memory, " in capfd.readouterr().err


def test_a_restart_without_room_is_one_error_that_leaves_the_whole_step(folder, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with running(folder, killed=True) as run:
        run.train(4)
        state = run.state()
        run.complete = lambda: None
        run.train(6)
    assert steps_of(folder) == ["step-00000006", "step-00000004"]
    said = r"step-00000004 is whole in the nodes' memory, .* \(.*No space left.*\): free space in"
    once(lose, folder, [0])
    if COMM.rank == 0:
        monkeypatch.setattr(partner_copies, "write_at", full)
    with pytest.raises(AgreedError, match=said), running(folder):
        pass
    meet()
    assert "step-00000006" not in steps_of(folder)  # what is not taken has made room
    monkeypatch.undo()
    with running(folder, killed=True) as run:
        assert run.done == 4
        assert_state(run, state)


def test_a_restored_step_survives_the_loss_of_a_node(folder):
    with running(folder, killed=True) as run:
        run.train(4)
        state = run.state()
    once(lose, folder, [0])
    with running(folder, killed=True) as run:
        assert run.done == 4
    once(lose, folder, [1])
    with running(folder, killed=True) as run:
        assert run.done == 4
        assert_state(run, state)


def test_a_restart_that_finds_nothing_says_why(folder, capfd):
    with running(folder, killed=True) as run:
        run.train(2)
        run.complete = lambda: None
        run.train(4)
    os.truncate(folder / slices_of(folder, COMM.rank)[1], 0)
    meet()
    with running(folder, killed=True) as run:
        assert run.done == 0
    if COMM.rank == 0:
        told = capfd.readouterr()
        assert "restored nothing: no step is whole" in told.out
        why = "was passed over: in the nodes' memory,"
        assert f"step-00000004 {why} not all ranks had written it" in told.err
        assert f"step-00000002 {why} " in told.err


def test_two_runs_at_a_time_share_a_folder_on_each_node(folder):
    with running(folder, killed=True) as one:
        other = Run(one.world, folder, stage=1, run="other")
        for last in (2, 4):
            one.train(last)
            other.train(last + 2)
        states = one.state(), other.state()
    once(lose, folder, [0])
    with running(folder) as one:
        other = Run(one.world, folder, stage=1, run="other")
        assert (one.done, other.done) == (4, 6)
        assert_state(one, states[0])
        assert_state(other, states[1])
        one.train(5)
        one.checkpoints.save(5, now=True)
        one.checkpoints.close()
        meet()
        assert len(list((folder / "local").iterdir())) == 1  # the other's
        other.train(7)
        other.checkpoints.save(7, now=True)
    assert not list((folder / "local").iterdir())


def test_steps_that_the_run_directory_lacks_stay_in_memory_at_the_end_of_a_loop(
    folder, capfd, monkeypatch
):
    monkeypatch.setenv(VARIABLE, str(folder / "notes"))
    (folder / "notes").mkdir(exist_ok=True)
    with running(folder, every=5) as run:
        run.train(4)
        run.complete = lambda: None
        run.train(7)
    if COMM.rank == 0:
        told = "step 7 is not saved in the run directory, so checkpoints stay in the nodes' memory"
        assert told in capfd.readouterr().err
        assert LaunchNotes(folder / "notes").local is None  # which `mntrain launch` would remove
    with running(folder) as run:
        assert run.done == 6  # which was being written at the end
        run.train(7)
        run.checkpoints.save(7, now=True)
    assert not list((folder / "local").iterdir())
    if COMM.rank == 0:
        assert LaunchNotes(folder / "notes").local is not None
        assert "is not saved in" not in capfd.readouterr().err


def test_saves_in_memory_go_on_while_the_run_directory_hangs(folder, monkeypatch):
    answers = threading.Event()

    def hang(save, *given):
        assert folder / "run" not in save.folder.parents or answers.wait(60)
        return written(save, *given)

    written = saver._write
    monkeypatch.setattr(saver, "_write", hang)
    with running(folder, killed=True, every=3) as run:
        run.train(5)
        assert run.checkpoints._saver.saving
        assert not list((folder / "run" / "checkpoints").glob("step-*"))
        state = run.state()
        answers.set()
    with running(folder, killed=True, every=0) as run:
        assert run.done == 4
        run.train(5)
        assert_state(run, state)


def test_a_run_is_rolled_back_to_the_last_step_in_memory(folder):
    with running(folder, killed=True, every=0) as run:
        run.train(4)
        state = run.state()
        run.train(5)
        assert run.checkpoints.restore() == 4
        assert_state(run, state)
        run.done = 4
        run.train(6)
    with running(folder, killed=True, every=0) as run:
        assert run.done == 6


@pytest.mark.parametrize("every", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_step_is_saved_in_memory_also_if_it_is_saved_in_the_run_directory(folder, every):
    with running(folder, killed=True, every=every) as run:
        run.train(9)
        saves = run.checkpoints.summary()["checkpoints"]
        assert (saves["local"]["saved"], saves["local"]["late"]) == (4, 0)
        assert saves["failed"] == 0
    assert steps_of(folder)[0] == "step-00000008"


def test_a_folder_that_cannot_be_used_is_refused_on_all_ranks(folder, monkeypatch):
    world = mntrain.init(device="cpu")
    model = nn.Linear(2, 2)
    optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)

    def words(local, **options):
        given = {"model": model, "optimizer": optimizer, "every": 0}
        name = f"run{next(numbers)}"
        return refusal(world.checkpoints, folder / name, **given, local=local, **options)

    numbers = iter(range(9))
    assert "cannot be made (No such file or directory)" in words(folder / "a" / "b")
    assert "local_every: must be a number of steps, or auto" in words(folder, local_every=0)
    if COMM.rank == 1:
        monkeypatch.setattr(local_saving, "free_bytes", lambda path: 0)
    said = words(folder / "small")
    assert "has room for 0 GB on" in said
    monkeypatch.undo()
    world.close()
    with hosts("abcd"[:RANKS]), mntrain.init(device="cpu") as world:
        model = nn.Linear(2, 2)
        optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)
        assert "is one that several nodes share" in words(folder / "shared")


@contextmanager
def no_room_for_files(here):
    """Let this process write files of a few bytes alone, if it is the one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (99, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_or_copy_that_fails_is_told_once_and_training_goes_on(folder, capfd, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def failing_copies():
        with monkeypatch.context() as patch:
            if COMM.rank == 1:
                patch.setattr(partner_copies, "_pieces", full)
            yield

    with running(folder, killed=True) as run:
        with failing_copies():
            run.train(2)
        with no_room_for_files(COMM.rank == 1):
            run.train(4)
        errors = capfd.readouterr().err
        assert errors.count("in the nodes' memory, ") == (COMM.rank == 0)
        assert ("No space left on device" in errors) == (COMM.rank == 0)
        # Without a copy, and whole while no node is lost; the room for the next one is free again.
        assert steps_of(folder) == ["step-00000002"]
        copies = run.checkpoints._local.saver.copies
        address = copies._addresses[copies.partner]
        with socket.create_connection(address) as stranger:
            stranger.sendall(bytes(99))
        with pytest.raises(AuthenticationError):
            Client(address, authkey=b"guessed")
        run.train(6)
        until(lambda: steps_of(folder) == ["step-00000006"])
        with failing_copies():
            run.train(8)
        assert steps_of(folder) == ["step-00000008", "step-00000006"]  # the latter with copies
        assert all(path.stat().st_mode & 0o77 == 0 for path in (folder / "local").rglob("*"))
    once(lose, folder, [1])
    with running(folder, killed=True) as run:
        assert run.done == 6
        run.train(8)
        until(lambda: steps_of(folder) == ["step-00000008"])
