"""Ranks that call collectives in other orders: across streams they may, else all raise an error."""

import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from mpi4py import MPI
from oracle import assert_close, update
from torch import nn
from worlds import RANKS, VIRTUAL, make_world, refusal

from mntrain.comm import engine, world_collectives
from mntrain.errors import AgreedError

pytestmark = pytest.mark.simulated

COMM = MPI.COMM_WORLD
RANK, LAST = COMM.rank, RANKS - 1
LARGE = 100_000  # elements, in several chunks


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Ranks compare what they call after 0.1 seconds without progress."""
    monkeypatch.setattr(engine, "STALL_S", 0.1)


@pytest.fixture
def world():
    """Its ranks share memory with some others, and send messages to others, if they are three."""
    world = make_world("lanes", VIRTUAL[-1])
    yield world
    with suppress(AgreedError):
        world.close()


@pytest.fixture
def small(monkeypatch):
    """Let worlds made in a test exchange small tensors in one step, as users' worlds do."""
    monkeypatch.setattr(world_collectives, "SMALL_MESSAGE_BYTES", 64 << 10)
    monkeypatch.setattr(world_collectives, "NO_WAKE_BYTES", 128 << 10)


@pytest.mark.parametrize("numel", [3, LARGE])
def test_streams_are_matched_with_their_own_in_any_order(world, numel):
    streams = [world.collectives.add_stream(name) for name in ("one", "two", "three")]
    for turn in range(3):
        order = [(RANK + turn + place) % 3 for place in range(3)]  # each rank has its own
        tensors = [torch.full((numel,), 10.0**which) for which in range(3)]
        works = {which: streams[which].all_reduce(tensors[which]) for which in order}
        for which in order:
            works[which].wait()
        for which, tensor in enumerate(tensors):
            assert set(tensor.tolist()) == {RANKS * 10.0**which}


def models():
    torch.manual_seed(1)
    return [nn.Linear(11, 30), nn.Linear(11, 30)]


def in_threads(function, arguments):
    """Call a function in a thread for each of several arguments; ranks start them in two orders."""
    threads = [threading.Thread(target=function, args=given) for given in arguments]
    for thread in threads if RANK % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()


def batch(rank, which):
    return torch.randn(4, 11, generator=torch.Generator().manual_seed(10 * rank + which))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_optimizers_of_two_threads_train_as_one_process_does(world, stage):
    made = models()
    optimizers = [world.optimizer(model, torch.optim.SGD, lr=0.1, stage=stage) for model in made]

    def train(which):
        for step in range(3):
            time.sleep(0.05 * ((RANK + which + step) % 2))  # ranks call in other orders
            update(optimizers[which], made[which](batch(RANK, which)).square().mean())

    in_threads(train, [(0,), (1,)])
    for which, (model, alone) in enumerate(zip(made, models(), strict=True)):
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(3):
            losses = [alone(batch(rank, which)).square().mean() for rank in range(RANKS)]
            update(optimizer, torch.stack(losses).mean())
        assert_close(model, alone, 1e-5, 1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_backward_passes_in_opposite_orders_raise_one_error_since_each_waits(world, stage):
    made = models()
    optimizers = [world.optimizer(model, torch.optim.SGD, lr=0.1, stage=stage) for model in made]

    def train():
        for which in [0, 1] if RANK == LAST else [1, 0]:
            made[which](batch(RANK, which)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    text = refusal(train)
    assert text.startswith("ranks wait for each other")
    assert "of optimizer 1 (SGD)), called at" in text
    assert "of optimizer 2 (SGD)), called at" in text


def reducing(numel, dtype=torch.float32, name="", **given):
    """A call of all_reduce, and what is said of it."""

    def call(collectives):
        named = collectives.named(name) if name else collectives
        return named.all_reduce(torch.ones(numel, dtype=dtype), **given)

    purpose = f"{name}: " if name else ""
    return call, f"{purpose}all_reduce of {numel} {str(dtype).removeprefix('torch.')}"


def other(verb, argument, words):
    """A call of another verb with its argument, and what is said of it."""
    return lambda c: getattr(c, verb)(torch.ones(1000), argument), words


CALLS = {
    "other sizes": (reducing(1000), reducing(1001)),
    "large sizes": (reducing(LARGE), reducing(LARGE // 2)),
    "one small": (reducing(3), reducing(LARGE)),
    "other verbs": (reducing(1000), other("all_gather", None, "all_gather of 1000 float32")),
    "other dtypes": (reducing(1000), reducing(1000, torch.int32)),
    "other roots": (
        other("broadcast", 0, "broadcast of 1000 float32 [root 0], called"),
        other("broadcast", 1, "broadcast of 1000 float32 [root 1], called"),
    ),
    "other bounds": (
        other("all_gather", [0] * RANKS + [1000], "all_gather of 1000 float32 [bounds (0, 0"),
        other("all_gather", [0] + [1000] * RANKS, "all_gather of 1000 float32 [bounds (0, 1000"),
    ),
    "other wire dtypes": (
        (reducing(1000, wire=torch.bfloat16)[0], "wire dtype bfloat16"),
        (reducing(1000)[0], "wire dtype that of the tensor"),
    ),
    "other purposes": (reducing(1000, name="bucket 1"), reducing(1000, name="bucket 2")),
}


@pytest.mark.parametrize("layout", [*VIRTUAL, "small"])
@pytest.mark.parametrize("case", CALLS)
def test_calls_that_differ_raise_one_error_on_all_ranks(request, case, layout):
    calls, words = zip(*CALLS[case], strict=True)
    if layout == "small":
        request.getfixturevalue("small")
    world = make_world("lanes", None if layout == "small" else layout)
    assert world.sum([1.0]) == [RANKS]
    number = world._engine.main.begun

    def call():
        calls[RANK == LAST](world.collectives).wait()
        world.sum([1.0])  # a broadcast may have ended: its root waits for nobody

    text = refusal(call)
    assert text.startswith(f"ranks disagree about collective {number} of the world")
    assert all(word in text for word in words), text
    assert f"  rank {LAST}: " in text
    assert text.count(f"called at {__file__}:") == 2
    with pytest.raises(ValueError, match="ranks disagree"):
        world.sum([1.0])
    assert refusal(world.close) == text  # waits for nobody
    world.close()  # does nothing the second time


@pytest.mark.parametrize(
    ("calls", "stream"),
    [
        *[
            (calls, name)
            for calls in ("roots", "long", "more")
            for name in ("the world", "another")
        ],
        ("many more", "another"),
    ],
)
def test_calls_that_differ_and_wait_for_nobody_raise_one_error_at_the_close(small, calls, stream):
    """Broadcasts on their roots. Without other calls, nobody misses anything."""
    world = make_world("lanes")
    collectives = (
        world.collectives if stream == "the world" else world.collectives.add_stream(stream)
    )
    tensor = torch.ones(LARGE if calls == "long" else 3)
    root, times = RANK, 1
    if "more" in calls:
        root, times = 0, 0 if RANK else (70 if "many" in calls else 3)
    works = [collectives.broadcast(tensor, root) for _ in range(times)]
    for work in works if calls != "long" else ():
        work.wait()
    text = refusal(world.close)
    if "many" not in calls:
        assert text.startswith("ranks disagree about collective ")
        assert f" of {stream}:" in text
        assert f"rank 0: broadcast of {len(tensor)} float32" in text
    else:
        assert "ranks have made unlike calls in another, " in text
    with pytest.raises(ValueError, match="ranks "):
        world.sum([1.0])
    world.close()


def test_ranks_that_disagree_leave_each_others_memory_alone():
    world = make_world("lanes")
    tensor = world.collectives.allocate(1000, torch.float32, torch.device("cpu")).fill_(RANK)
    part = tensor[: 999 if RANK else 1000]
    refusal(lambda: world.collectives.all_reduce(part).wait())
    assert set(tensor.tolist()) == {RANK}
    refusal(world.close)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_sum_that_one_rank_alone_calls_in_training_raises_one_error(small, stage):
    world, model = make_world("lanes"), nn.Linear(11, 30)
    optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1, stage=stage)

    def train():
        for step in range(3):
            model(batch(RANK, step)).square().mean().backward()
            if RANK == LAST and step == 1:
                world.sum([1.0])
            optimizer.step()
            optimizer.zero_grad()
        world.sum([1.0])

    text = refusal(train)
    assert f"rank {LAST}: world.sum: all_reduce of 1 float64" in text
    assert "of optimizer 1 (SGD)" in text
    assert f"called at {__file__}:" in text
    assert refusal(world.close) == text


def test_a_step_that_one_rank_alone_takes_before_the_end_raises_one_error(small):
    world, model = make_world("lanes"), nn.Linear(11, 30)
    optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)

    def train():
        with world:
            for step in range(2 + (RANK == LAST)):
                update(optimizer, model(batch(RANK, step)).square().mean())

    text = refusal(train)
    assert "rank 0: world.close" in text or "ranks 0, 1" in text
    assert f"rank {LAST}: gradient bucket 0: " in text


@pytest.mark.parametrize("one", [0, LAST])
def test_a_sum_against_a_close_raises_one_error(small, one):
    world = make_world("lanes")

    def end():
        with world:
            if one == RANK:
                world.sum([1.0])

    text = refusal(end)
    assert "world.close, called at" in text
    assert f"rank {one}: world.sum" in text


def agree(world):
    with world.agreement():
        pass


CALLS_BESIDE_A_GATHER = {
    "world.sum: all_reduce of 1 float64": lambda world: world.sum([1.0]),
    "world.barrier": lambda world: world.barrier(),
    "world.broadcast": lambda world: world.broadcast(1),
    "a check on all ranks": agree,
    "a gather in mntrain.alike.values": lambda world: list(world.shard([torch.ones(2, 1)])),
}


@pytest.mark.parametrize("other", CALLS_BESIDE_A_GATHER)
def test_a_gather_against_another_call_raises_one_error(world, other):
    call = CALLS_BESIDE_A_GATHER[other]
    text = refusal(partial(world.gather, 1) if RANK else partial(call, world))
    assert "world.gather, called at" in text
    assert f"rank 0: {other}, called at" in text


@pytest.mark.parametrize("verb", ["sum", "mean"])
def test_shapes_of_as_many_elements_that_differ_raise_one_error(world, verb):
    rows = torch.ones(2, 3) if RANK else torch.ones(3, 2)
    text = refusal(getattr(world, verb), rows)
    assert f"rank 0: world.{verb} of shape (3, 2)" in text


def test_ranks_of_a_group_that_disagree_raise_an_error_on_all_ranks():
    world = make_world("lanes", 1)
    numel = 1000 if RANK else 999
    text = refusal(lambda: world.cross_collectives.all_reduce(torch.ones(numel)).wait())
    assert "of the cross group of rank 0" in text
    assert refusal(world.close) == text


@pytest.mark.both
def test_blocking_calls_of_two_streams_in_other_orders_raise_one_error(world):
    streams = [world.collectives.add_stream(name) for name in ("one", "two")]
    order = streams if RANK == LAST else streams[::-1]

    def call():
        for stream in order:
            stream.all_reduce(torch.ones(LARGE)).wait()

    text = refusal(call)
    assert text.startswith("ranks wait for each other")
    assert "(collective 0 of one)" in text
    assert "(collective 0 of two)" in text


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.thorough), LAST])
def test_a_rank_that_is_late_is_waited_for(world, late):
    stream = world.collectives.add_stream("one")
    for turn in range(2):
        if late == RANK:
            time.sleep(0.4)  # in which the others report what they call
        assert world.sum([turn]) == [RANKS * turn]
        tensor = torch.ones(LARGE)
        work = stream.all_reduce(tensor)
        if late == RANK:
            time.sleep(0.4)
        work.wait()
        assert set(tensor.tolist()) == {RANKS}


def test_a_root_that_is_ahead_is_no_disagreement(world):
    tensors = [torch.full((1000,), float(RANK)) for _ in range(20)]
    if RANK == LAST:
        time.sleep(0.4)
    for tensor in tensors:
        world.collectives.broadcast(tensor, 0).wait()
    assert all(set(tensor.tolist()) == {0.0} for tensor in tensors)


needs_thread_multiple = pytest.mark.skipif(
    MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="this MPI runs one thread at a time"
)


@pytest.mark.processes
@needs_thread_multiple
def test_each_of_several_threads_may_have_a_world_of_its_own():
    several, wrong = [make_world("lanes") for _ in range(3)], []

    def use(number, world):
        for turn in range(20):
            tensor = torch.full((5000 * (number + 1),), float(turn))
            world.collectives.all_reduce(tensor).wait()
            if set(tensor.tolist()) != {RANKS * float(turn)} or world.sum([number]) != [
                RANKS * number
            ]:
                wrong.append((number, turn))

    in_threads(use, enumerate(several))
    assert wrong == []
    for world in several:
        world.close()


@pytest.mark.processes
@needs_thread_multiple
def test_the_users_own_mpi_calls_do_not_meet_those_of_a_world(world):
    for turn in range(10):
        tensors = [torch.ones(LARGE), torch.ones(LARGE)]
        works = [world.collectives.all_reduce(tensor) for tensor in tensors]
        assert COMM.allreduce(turn) == RANKS * turn
        message = COMM.irecv(source=(RANK - 1) % RANKS, tag=turn)
        COMM.send(turn, (RANK + 1) % RANKS, tag=turn)
        assert message.wait() == turn
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert set(tensor.tolist()) == {RANKS}
