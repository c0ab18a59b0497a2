"""Worlds from `init` to `close`: what they take, what they hold, and what they leave."""

import pytest
import torch
from mpi4py import MPI
from worlds import BUT_LAST, RANKS, communication_threads, make_world, refusal

import mntrain
from mntrain.comm import mpi

COMM = MPI.COMM_WORLD
LAST = RANKS - 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("algorithm", "no such", "Input should be 'flat', 'lanes', 'leader' or 'naive', not 'no s"),
        ("timeout", 0.0, "Input should be greater than 0, not 0.0"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_by_all_ranks(name, value, words):
    words, arguments = f"{name}: {words}", {name: value}
    assert refusal(mntrain.init, **{"device": "cpu", **arguments}).startswith(words)
    one = arguments if COMM.rank == LAST else {}
    said = refusal(mntrain.init, **{"device": "cpu", **one})
    assert said.startswith(f"rank {LAST}: {words}")
    with make_world() as world:  # and nothing is left in the way
        assert world.sum([1.0]) == [RANKS]
    with pytest.raises(TypeError, match="unexpected argument 'algorithms'"):
        mntrain.init(algorithms="lanes")


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [("algorithm", "lanes", "flat"), ("bucket_mb", 25.0, 1.0), ("ranks_per_node", None, 1)],
)
def test_arguments_that_are_good_but_differ_between_ranks_are_refused(name, usual, other):
    said = refusal(mntrain.init, device="cpu", **{name: other if COMM.rank == LAST else usual})
    assert said == f"{name} differs between ranks: {BUT_LAST} {usual}, rank {LAST} has {other}"


@pytest.fixture
def communicators(monkeypatch):
    """Every MPI communicator that a world takes from here on, with the name it gets."""
    taken = []
    original = mpi.Communicator.__init__

    def keep(self, comm, name, *shared):
        original(self, comm, name, *shared)
        taken.append((comm, comm.Get_name()))

    monkeypatch.setattr(mpi.Communicator, "__init__", keep)
    return taken


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_communicators_are_named_and_freed(communicators, count):
    before = communication_threads()
    refusal(mntrain.init, device="cpu", algorithm="no such")
    assert all(comm == MPI.COMM_NULL for comm, _ in communicators)
    communicators.clear()
    for turn in range(count):
        with make_world("lanes", 1 + turn % 2) as world:
            assert world.sum([turn]) == [turn * RANKS]
    assert len(communicators) == 2 * count
    assert {name for _, name in communicators} == {"mntrain world", "mntrain node"}
    assert all(comm == MPI.COMM_NULL for comm, _ in communicators)
    assert communication_threads() == before


def test_the_callers_communicator_stays_the_callers():
    mine = COMM.Split(0, key=-COMM.rank)
    mine.Set_name("mine")
    with mntrain.init(mine, device="cpu", ranks_per_node=2) as world:
        assert world.rank == mine.rank == LAST - COMM.rank
        assert world.gather(COMM.rank) == list(reversed(range(RANKS)))
        tensor = torch.full((5,), float(world.rank))
        world.collectives.broadcast(tensor, root=0).wait()
        world.collectives.all_reduce(tensor).wait()
        assert tensor.tolist() == [0] * 5
        # What the caller sends cannot be taken for what the world sends.
        message = mine.irecv(source=(mine.rank - 1) % RANKS)
        mine.isend("a word", (mine.rank + 1) % RANKS).wait()
        assert world.sum([1.0]) == [RANKS]
        assert message.wait() == "a word"
    assert mine.Get_name() == "mine"
    assert mine.allreduce(1) == RANKS
    mine.Free()


def test_a_world_of_some_ranks():
    part = COMM.Split(COMM.rank % 2, COMM.rank)
    with mntrain.init(part, device="cpu") as world:
        assert world.size == part.size
        assert world.gather(COMM.rank) == list(range(COMM.rank % 2, RANKS, 2))
        assert world.findings["world size"].status == "pass"
    part.Free()


def test_no_communicator_is_not_the_whole_world():
    part = COMM.Split(0 if COMM.rank == 0 else MPI.UNDEFINED)
    if COMM.rank == 0:
        with mntrain.init(part, device="cpu") as world:
            assert world.size == 1
        part.Free()
    else:
        with pytest.raises(ValueError, match="null communicator"):
            mntrain.init(part, device="cpu")


def test_a_world_may_be_closed_within_its_block():
    with make_world() as world:
        optimizer = world.optimizer(torch.nn.Linear(3, 3), torch.optim.SGD, lr=0.5, stage=1)
        world.close()
        world.close()
        assert optimizer.param_groups[0]["lr"] == 0.5
    assert COMM.allreduce(1) == RANKS
