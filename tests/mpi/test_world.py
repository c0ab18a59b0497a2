import sys
import threading

import pytest
import torch
from mpi4py import MPI
from torch import nn
from worlds import LAYOUTS, RANKS, Worlds, make_world

import mntrain
from mntrain import mpi
from mntrain.failures import AgreedError
from mntrain.topology import Topology

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
LAST = RANKS - 1
SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.1}


@pytest.fixture(scope="module")
def worlds():
    cache = Worlds()
    yield cache
    cache.close()


@pytest.fixture
def world(worlds):
    return worlds("lanes")


def refusal(function, *args, **kwargs):
    """Call what every rank must refuse alike, and return the words."""
    with pytest.raises(AgreedError) as error:
        function(*args, **kwargs)
    words = str(error.value)
    assert COMM.allgather(words) == [words] * RANKS
    return words


def in_turn(words, last):
    """The refusal of two kinds of ranks: all but the last, and the last one."""
    others = ", ".join(map(str, range(LAST)))
    return f"rank{'s' * (LAST > 1)} {others}: {words}; rank {LAST}: {last}"


# Who is where.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_world_knows_its_place(worlds, layout):
    world = worlds("lanes", layout)
    letters = layout if isinstance(layout, str) else "a" * RANKS
    topology = Topology.from_hosts(letters, None if isinstance(layout, str) else layout)
    assert world.topology == topology
    assert (world.rank, world.size) == (COMM.rank, RANKS)
    node, cross = topology.node_group(world.rank), topology.cross_group(world.rank)
    assert (world.local_rank, world.local_size) == (node.index(world.rank), len(node))
    assert (world.cross_rank, world.cross_size) == (cross.index(world.rank), len(cross))
    assert world.master == (world.rank == 0)
    assert (world.collectives.rank, world.collectives.size) == (world.rank, world.size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_knows_where_the_others_run(worlds, layout):
    world = worlds("lanes", layout)
    assert [place.rank for place in world.places] == list(range(RANKS))
    for place in world.places:
        assert place.node == world.topology.node(place.rank)
        assert place.local_rank == world.topology.local_rank(place.rank)
        assert place.host == MPI.Get_processor_name()
        assert place.device == "cpu"
    assert world.places[world.rank].threads == torch.get_num_threads()
    assert world.device == torch.device("cpu")


def test_a_world_names_its_mpi(world):
    assert world.library.name.startswith(MPI.get_vendor()[0])
    assert world.library.threads in ("serialized", "multiple")


def test_this_machine_is_one_node(world):
    assert world.topology.nodes == (tuple(range(RANKS)),)


# What they do together.


def test_gather_hands_everyones_object_to_all_by_rank(world):
    assert world.gather({"rank": world.rank}) == [{"rank": rank} for rank in range(RANKS)]
    assert world.gather(None) == [None] * RANKS


def test_sum_adds_in_double_precision(world):
    tiny = 2.0**-40
    assert world.sum([1.0, world.rank + tiny]) == [RANKS, sum(range(RANKS)) + RANKS * tiny]
    assert world.sum([]) == []


def test_objects_and_tensors_keep_the_order_of_the_program(world):
    tensors = [torch.full((3,), float(step)) for step in range(5)]
    works = []
    for step, tensor in enumerate(tensors):
        works.append(world.collectives.all_reduce(tensor))
        assert world.gather(step) == [step] * RANKS
    for step, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert tensor.tolist() == [step * RANKS] * 3


# Agreement.


def test_nothing_raised_is_nothing_said(world):
    with world.agreement():
        done = True
    assert done


@pytest.mark.parametrize("kind", [ValueError, OSError, ImportError, RuntimeError])
def test_what_all_ranks_refuse_alike_is_said_once(world, kind):
    def refuse():
        with world.agreement():
            raise kind("the file is empty")

    assert refusal(refuse) == "the file is empty"


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_refuses_all_refuse_and_name_it(world):
    def refuse():
        with world.agreement():
            if world.rank == LAST:
                raise ValueError("no such file")

    assert refusal(refuse) == f"rank {LAST}: no such file"
    assert world.gather(1) == [1] * RANKS  # the world is still in order


@pytest.mark.mpi(min_size=2)
def test_different_refusals_are_all_told(world):
    def refuse():
        with world.agreement():
            raise ValueError("two" if world.rank == LAST else "one")

    assert refusal(refuse) == in_turn("one", "two")


def test_a_refusal_without_words_is_named_by_its_kind(world):
    def refuse():
        with world.agreement():
            raise RuntimeError

    assert refusal(refuse) == "RuntimeError"


def test_the_cause_of_a_refusal_is_kept_where_it_happened(world):
    def refuse():
        with world.agreement():
            if world.rank == LAST:
                raise ValueError("here")

    with pytest.raises(AgreedError) as error:
        refuse()
    assert isinstance(error.value.__cause__, ValueError) == (world.rank == LAST)


def test_what_was_agreed_on_is_not_agreed_on_again(world):
    def refuse():
        with world.agreement(), world.agreement():
            raise ValueError("once")

    assert refusal(refuse) == "once"


# Models that differ.


def two_layers(width=3, dtype=torch.float32):
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1)).to(dtype)


def test_models_alike_make_an_optimizer_and_take_rank_0s_weights(world):
    torch.manual_seed(world.rank)
    model = two_layers()
    world.optimizer(model, **SGD).close()
    weights = model[0].weight.tolist()
    assert world.gather(weights) == [weights] * RANKS


def test_buffers_are_taken_from_rank_0(world):
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    model[1].running_mean += world.rank + 1
    world.optimizer(model, **SGD).close()
    assert model[1].running_mean.item() == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda odd: two_layers(4 if odd else 3),
            "rank 0 has 0.weight (3, 2) float32, rank {last} has 0.weight (4, 2) float32",
        ),
        (
            lambda odd: two_layers(dtype=torch.float64 if odd else torch.float32),
            "rank 0 has 0.weight (3, 2) float32, rank {last} has 0.weight (3, 2) float64",
        ),
        (
            lambda odd: nn.Sequential(nn.Linear(2, 3, bias=odd)),
            "only rank {last} has 0.bias (3,) float32",
        ),
        (
            lambda odd: nn.Sequential(nn.Linear(2, 3, bias=not odd)),
            "only rank 0 has 0.bias (3,) float32",
        ),
        (
            lambda odd: two_layers().requires_grad_(not odd),
            "rank 0 has 0.weight (3, 2) float32, rank {last} has 0.weight (3, 2) float32 frozen",
        ),
        (
            lambda odd: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3) if odd else nn.ReLU()),
            "rank {last} has 1.weight (3,) float32",
        ),
    ],
    ids=["shape", "dtype", "one more", "one fewer", "frozen", "another layer"],
)
def test_models_that_differ_are_refused_by_all_ranks(world, build, words):
    said = refusal(world.optimizer, build(world.rank == LAST), **SGD)
    assert said.startswith("the model differs between ranks: ")
    assert words.format(last=LAST) in said


@pytest.mark.mpi(min_size=2)
def test_what_one_ranks_optimizer_refuses_all_refuse(world):
    said = refusal(world.optimizer, two_layers(), torch.optim.SGD, lr=-1.0 if world.rank else 0.1)
    assert "Invalid learning rate: -1.0" in said
    assert said.startswith("rank")
    # No rank has begun what the refusing ones never join: the next collective meets nothing else.
    tensor = torch.ones(1000)
    world.collectives.all_reduce(tensor).wait()
    assert set(tensor.tolist()) == {RANKS}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "usual", "other"), [("stage", 0, 1), ("max_grad_norm", 1.0, None)]
)
def test_optimizers_that_differ_are_refused_by_all_ranks(world, name, usual, other):
    given = {name: other if world.rank == LAST else usual}
    said = refusal(world.optimizer, two_layers(), **given, **SGD)
    assert said == f"{name} differs between ranks: rank 0 has {usual}, rank {LAST} has {other}"


def test_an_unknown_stage_is_refused(world):
    assert "3" in refusal(world.optimizer, two_layers(), stage=3, **SGD)


def test_a_tensor_of_another_model_in_a_group_is_refused(world):
    groups = [{"params": [nn.Parameter(torch.zeros(1))]}]
    said = refusal(world.optimizer, two_layers(), groups=groups, **SGD)
    assert said == "a parameter group holds a tensor that is no parameter of the model"


# What `init` takes.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"algorithm": "ring"},
            "unknown algorithm 'ring': choose auto, naive, flat, leader, lanes",
        ),
        ({"ranks_per_node": 0}, "ranks per node is 0: it must be at least 1"),
        ({"ranks_per_node": -2}, "ranks per node is -2: it must be at least 1"),
        ({"bucket_mb": 0}, "bucket_mb is 0: "),
        ({"bucket_mb": -1.5}, "bucket_mb is -1.5: "),
        ({"bucket_mb": float("nan")}, "bucket_mb is nan: "),
        ({"bucket_mb": float("inf")}, "bucket_mb is inf: "),
        ({"device": "tpu"}, "device 'tpu' is unknown: choose auto, cpu or cuda"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_by_all_ranks(arguments, words):
    assert refusal(mntrain.init, **{"device": "cpu", **arguments}).startswith(words)
    if RANKS > 1:  # of the last rank alone
        one = arguments if COMM.rank == LAST else {}
        said = refusal(mntrain.init, **{"device": "cpu", **one})
        assert said.startswith(f"rank {LAST}: {words}")
    with make_world() as world:  # and nothing is left in the way
        assert world.sum([1.0]) == [RANKS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none_is_refused():
    assert refusal(mntrain.init, device="cuda").startswith("device cuda was asked for, but torch")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [("algorithm", "lanes", "flat"), ("bucket_mb", 25.0, 1.0), ("ranks_per_node", None, 1)],
)
def test_arguments_that_are_good_but_differ_between_ranks_are_refused(name, usual, other):
    said = refusal(mntrain.init, device="cpu", **{name: other if COMM.rank == LAST else usual})
    assert said == f"{name} differs between ranks: rank 0 has {usual}, rank {LAST} has {other}"


# Communicators, from `init` to `close`.


@pytest.fixture
def communicators(monkeypatch):
    """Every MPI communicator that a world takes from here on, with the name it gets."""
    taken = []
    original = mpi.Communicator.__init__

    def keep(self, comm, name):
        original(self, comm, name)
        taken.append((comm, comm.Get_name()))

    monkeypatch.setattr(mpi.Communicator, "__init__", keep)
    return taken


def threads():
    """How many threads of worlds live: others, such as timers of the test session, may end."""
    return [thread.name for thread in threading.enumerate()].count("mntrain communication")


def test_communicators_are_named_and_freed(communicators):
    for layout in (None, 1):
        make_world("lanes", layout).close()
    assert {name for _, name in communicators} == {"mntrain world", "mntrain node", "mntrain cross"}
    assert all(comm == MPI.COMM_NULL for comm, _ in communicators)


@pytest.mark.parametrize("arguments", [{"algorithm": "ring"}, {"device": "tpu"}], ids=str)
def test_a_world_that_could_not_be_made_leaves_nothing(communicators, arguments):
    before = threads()
    refusal(mntrain.init, **{"device": "cpu", **arguments})
    assert all(comm == MPI.COMM_NULL for comm, _ in communicators)
    assert threads() == before


def test_fifty_worlds_one_after_the_other(communicators):
    before = threads()
    for turn in range(50):
        with make_world("lanes", 1 + turn % 2) as world:
            assert world.sum([turn]) == [turn * RANKS]
    assert len(communicators) == 150
    assert all(comm == MPI.COMM_NULL for comm, _ in communicators)
    assert threads() == before


def test_two_worlds_at_a_time_do_not_meet(worlds):
    first, second = worlds("lanes"), worlds("flat")
    ones, twos = torch.ones(1000), torch.full((1000,), 2.0)
    if first.rank % 2:
        works = [second.collectives.all_reduce(twos), first.collectives.all_reduce(ones)]
    else:
        works = [first.collectives.all_reduce(ones), second.collectives.all_reduce(twos)]
    for work in works:
        work.wait()
    assert set(ones.tolist()) == {RANKS}
    assert set(twos.tolist()) == {2 * RANKS}


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


@pytest.mark.mpi(min_size=2)
def test_a_world_of_some_ranks():
    part = COMM.Split(COMM.rank % 2, COMM.rank)
    with mntrain.init(part, device="cpu") as world:
        assert world.size == part.size
        assert world.gather(COMM.rank) == list(range(COMM.rank % 2, RANKS, 2))
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_no_communicator_is_not_the_whole_world():
    part = COMM.Split(0 if COMM.rank == 0 else MPI.UNDEFINED)
    if COMM.rank == 0:
        with mntrain.init(part, device="cpu") as world:
            assert world.size == 1
        part.Free()
    else:
        with pytest.raises(ValueError, match="null communicator"):
            mntrain.init(part, device="cpu")


def test_a_closed_world_says_so():
    with make_world() as world:
        pass
    with pytest.raises(RuntimeError, match="this world is closed"):
        world.collectives.all_reduce(torch.zeros(1))
    with pytest.raises(RuntimeError, match="this world is closed"):
        world.gather(None)
    with pytest.raises(RuntimeError, match="this world is closed"):
        world.sum([1.0])


def test_what_is_under_way_is_finished_by_close():
    tensor = torch.ones(70001)
    with make_world() as world:
        work = world.collectives.all_reduce(tensor)
    work.wait()
    assert set(tensor.tolist()) == {RANKS}


def test_a_world_gives_the_hooks_back(monkeypatch):
    def mine(*_):
        pass

    monkeypatch.setattr(sys, "excepthook", mine)
    monkeypatch.setattr(threading, "excepthook", mine)
    with make_world():
        assert sys.excepthook is not mine
    assert sys.excepthook is mine
    assert threading.excepthook is mine
