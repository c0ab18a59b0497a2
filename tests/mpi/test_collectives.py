import functools
import hashlib
import random
import re
import time
from itertools import product

import numpy as np
import pytest
import torch
from mpi4py import MPI
from worlds import EVERY_WORLD, RANKS, VIRTUAL, Worlds

from mntrain import mpi
from mntrain.collectives import ALGORITHMS, messages

pytestmark = pytest.mark.mpi

RANK = MPI.COMM_WORLD.rank
SIZES = [0, 1, 2, 3, 5, 17, 1000, 70001]
FASTER = ["flat", "leader", "lanes"]  # than the oracle

# Multiples of these, up to 68 of them, are exact in the dtype and in none that is narrower.
UNIT = {
    torch.float16: 1,
    torch.bfloat16: 1,
    torch.float32: 4099,
    torch.float64: 2**40 + 1,
    torch.int64: 2**56 + 1,
}


@pytest.fixture(scope="module")
def worlds():
    cache = Worlds()
    yield cache
    cache.close()


@functools.cache
def ramp(rank, numel, dtype=torch.float32):
    """What `rank` puts into a sum: another small multiple of the unit at every place."""
    index = torch.arange(numel)
    return (((index * 40503 // 64 + 5 * rank) % 29 - 11) * UNIT[dtype]).to(dtype)


@functools.cache
def total(numel, dtype=torch.float32):
    wide = torch.int64 if dtype == torch.int64 else torch.float64
    exact = torch.stack([ramp(rank, numel, dtype) for rank in range(RANKS)]).sum(0, dtype=wide)
    assert torch.equal(exact.to(dtype).to(wide), exact)
    return exact.to(dtype)


def junk(numel, dtype=torch.float32):
    """Make what must not be looked at."""
    return torch.full((numel,), float("nan") if dtype.is_floating_point else -7, dtype=dtype)


def shard(world, numel, bounds=None):
    """Where this rank's shard of a tensor lies."""
    slot = world.collectives.slot(world.rank)
    cut = bounds or [i * numel // world.size for i in range(world.size + 1)]
    return slice(cut[slot], cut[slot + 1])


def cuts(numel):
    """Bounds of every kind: all in one slot, whichever it is, and at random, some shards empty."""
    generator = random.Random(numel)
    choices = [range(numel + 1), range(numel + 1), [0, numel // 2, numel]]
    inner = [sorted(generator.choices(choice, k=RANKS - 1)) for choice in choices]
    one_slot = [[0] * (slot + 1) + [numel] * (RANKS - slot) for slot in range(RANKS)]
    return one_slot + [[0, *indices, numel] for indices in inner]


def check_bits(world, tensors):
    """Assert that all ranks hold the same bits."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        digest.update(tensor.view(torch.uint8).numpy())
    assert len(set(world.gather(digest.hexdigest()))) == 1


class Case:
    """One collective: fills its tensor, launches, and says whether the result is right."""

    def __init__(self, world, verb, numel, dtype=torch.float32, *, root=None, bounds=None):
        self.world, self.verb, self.root, self.bounds = world, verb, root, bounds
        self.tensor = torch.empty(numel, dtype=dtype)
        self.everywhere = verb != "reduce_scatter"  # whether all ranks end with the same

    def launch(self):
        numel, dtype = self.tensor.numel(), self.tensor.dtype
        if self.verb in ("all_reduce", "reduce_scatter"):
            self.tensor.copy_(ramp(RANK, numel, dtype))
        else:
            self.tensor.copy_(junk(numel, dtype))
        if self.verb == "all_gather":
            mine = shard(self.world, numel, self.bounds)
            self.tensor[mine] = ramp(0, numel, dtype)[mine]
        if self.verb == "broadcast":
            if self.root == RANK:
                self.tensor.copy_(ramp(RANK, numel, dtype))
            return self.world.collectives.broadcast(self.tensor, self.root)
        given = {"bounds": self.bounds} if self.bounds else {}
        return getattr(self.world.collectives, self.verb)(self.tensor, **given)

    def check(self):
        numel, dtype = self.tensor.numel(), self.tensor.dtype
        if self.verb in ("all_reduce", "reduce_scatter"):
            expected = total(numel, dtype)
        else:
            expected = ramp(self.root or 0, numel, dtype)
        mine = slice(None) if self.everywhere else shard(self.world, numel, self.bounds)
        where = f"{self.verb} of {numel} {dtype} from {self.root} in {self.bounds}"
        assert torch.equal(self.tensor[mine], expected[mine]), where


def cases(world, sizes, dtype=torch.float32, roots=()):
    verbs = ["all_reduce", "reduce_scatter", "all_gather"]
    return [
        *(Case(world, verb, numel, dtype) for verb, numel in product(verbs, sizes)),
        *(
            Case(world, "broadcast", numel, dtype, root=root)
            for root, numel in product(roots, sizes)
        ),
    ]


def run(world, several):
    """Launch all before any is waited for, the last one first; check; compare between ranks."""
    works = [case.launch() for case in several]
    for work in reversed(works):
        work.wait()
    for case in several:
        case.check()
    check_bits(world, [case.tensor for case in several if case.everywhere])


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_every_verb_at_every_size_twice(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    several = cases(world, SIZES) + [
        Case(world, "broadcast", numel, root=root)
        for root, numel in product(range(RANKS), (0, 2, 1000))
    ]
    run(world, several)
    run(world, several)  # on the same tensors


@pytest.mark.parametrize("dtype", UNIT, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_dtype(worlds, algorithm, dtype):
    for layout in VIRTUAL:
        world = worlds(algorithm, layout)
        run(world, cases(world, [2, 5003], dtype, roots=[RANKS - 1]))


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_reduce_scatter_then_all_gather_is_all_reduce(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    tensors = [ramp(RANK, numel).clone() for numel in (1, 2, 17, 70001)]
    for tensor in tensors:
        world.collectives.reduce_scatter(tensor)
    for work in [world.collectives.all_gather(tensor) for tensor in tensors]:
        work.wait()
    for tensor in tensors:
        assert torch.equal(tensor, total(len(tensor)))


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_shards_lie_where_the_caller_cuts(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    several = [
        Case(world, verb, numel, bounds=bounds)
        for numel in (0, 17, 1003)
        for bounds in cuts(numel)
        for verb in ("reduce_scatter", "all_gather")
    ]
    run(world, several)
    run(world, several)  # on the same tensors


def test_bounds_are_the_callers_again_at_once(worlds):
    world = worlds("lanes", VIRTUAL[-1])
    tensor = junk(70001)
    bounds = cuts(len(tensor))[-1]
    mine = shard(world, len(tensor), bounds)
    tensor[mine] = ramp(0, len(tensor))[mine]
    work = world.collectives.all_gather(tensor, bounds)
    bounds.clear()
    work.wait()
    assert torch.equal(tensor, ramp(0, len(tensor)))


@pytest.mark.parametrize("verb", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize(
    "bounds",
    [
        (),
        (7,),
        (*[0] * (RANKS - 1), 7),
        (*[0] * (RANKS + 1), 7),
        (*[0] * RANKS, 6),
        (*[0] * RANKS, 8),
        (1, *[7] * RANKS),
        (-1, *[7] * RANKS),
        (0, *[8] * (RANKS - 1), 7) if RANKS > 1 else (7, 0),
        (0, *range(RANKS - 1, 0, -1), 7) if RANKS > 2 else (7, *[0] * RANKS),
    ],
    ids=str,
)
def test_bounds_that_do_not_cut_the_tensor_are_refused(worlds, verb, bounds):
    words = (
        f"bounds {bounds} do not cut 7 elements into {RANKS} shards: give {RANKS + 1} indices "
        "that never decrease, from 0 to 7"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        getattr(worlds().collectives, verb)(torch.zeros(7), bounds)


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_every_rank_knows_whose_shard_lies_where(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    slots = [world.collectives.slot(rank) for rank in range(RANKS)]
    assert sorted(slots) == list(range(RANKS))
    assert world.gather(slots) == [slots] * RANKS


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_a_sum_is_rounded_once_a_level(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    levels = 2 if algorithm in ("leader", "lanes") and len(world.topology.nodes) > 1 else 1
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        everyone = torch.randn(RANKS, 1003, generator=generator).to(dtype)
        tensor = everyone[RANK].clone()
        world.collectives.all_reduce(tensor).wait()
        check_bits(world, [tensor])
        exact, absolute = everyone.double().sum(0), everyone.double().abs().sum(0)
        half_ulp = torch.finfo(dtype).eps / 2
        # The last rounding is of the sum, one before it of the nodes' parts; and each addition
        # rounds in the wide dtype.
        tolerance = half_ulp * (exact.abs() + (levels - 1) * absolute) * (1 + 2 * half_ulp)
        tolerance += RANKS * min(half_ulp, torch.finfo(torch.float32).eps) * absolute
        assert bool(((tensor.double() - exact).abs() <= tolerance).all()), dtype


def signed_powers(numel, dtype):
    """What every rank adds, by rank: far apart in size, often cancelling."""
    generator = torch.Generator().manual_seed(11)
    exponents = 30 * torch.randint(-1, 2, (RANKS, numel), generator=generator)
    signs = 2 * torch.randint(0, 2, (RANKS, numel), generator=generator) - 1
    return (signs * torch.pow(2.0, exponents.double())).to(dtype)


def in_order(tensors):
    """The sum of one level, first to last, in fp32 or wider and rounded once."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return functools.reduce(torch.add, [t.to(wide) for t in tensors]).to(tensors[0].dtype)


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_sums_are_made_in_the_order_of_members_wherever_the_cut(
    worlds, monkeypatch, algorithm, layout
):
    monkeypatch.setattr(messages, "PIECE_BYTES", 200)  # a rank's part is several, of its own length
    world = worlds(algorithm, layout)
    nodes = [range(RANKS)] if algorithm in ("naive", "flat") else world.topology.nodes
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        everyone = signed_powers(1003, dtype)
        if RANKS > 2:
            assert not torch.equal(in_order([*everyone]), in_order([*everyone.flip(0)]))
        expected = in_order([in_order([everyone[rank] for rank in node]) for node in nodes])
        whole = everyone[RANK].clone()
        sharded = [(everyone[RANK].clone(), bounds) for bounds in (None, *cuts(1003)[-4:])]
        works = [world.collectives.all_reduce(whole)]
        works += [world.collectives.reduce_scatter(*each) for each in sharded]
        for work in works:
            work.wait()
        assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8)), dtype
        for tensor, bounds in sharded:
            mine = shard(world, 1003, bounds)
            assert torch.equal(tensor[mine].view(torch.uint8), whole[mine].view(torch.uint8)), (
                bounds
            )


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_16_bit_sums_accumulate_in_32_bits(worlds, algorithm):
    # In bf16, 256 + 1 is 256 again; in fp16, 60000 + 60000 is infinite.
    small = [256.0] + [1.0] * (RANKS - 1)
    large = [60000.0, 60000.0, -60000.0] + [0.0] * (RANKS - 3)
    world = worlds(algorithm)
    nodes = [range(RANKS)] if algorithm in ("naive", "flat") else world.topology.nodes
    for values, dtype in [(small, torch.bfloat16), (large, torch.float16)]:
        mine = torch.tensor([values[RANK]], dtype=dtype)
        world.collectives.all_reduce(mine).wait()
        # Rounded once a level: on each node, then over the nodes.
        sums = [torch.tensor(sum(values[rank] for rank in node)).to(dtype) for node in nodes]
        expected = torch.stack(sums).sum(0, dtype=torch.float32).to(dtype)
        assert torch.equal(mine, expected[None])


def test_auto_is_one_of_them_and_sums(worlds):
    world = worlds("auto")
    assert world.algorithm in ALGORITHMS
    run(world, cases(world, [1000], roots=[0]))


@pytest.mark.parametrize("algorithm", FASTER)
def test_a_tensor_of_many_pieces(worlds, algorithm):
    # Every rank's part is more than all pieces in flight, and neither divides.
    numel = RANKS * (messages.PIECES_IN_FLIGHT + 1) * messages.PIECE_BYTES // 4 + 4321
    collectives = worlds(algorithm, VIRTUAL[-1]).collectives
    once = torch.arange(numel, dtype=torch.int32).remainder_(100003).float()
    tensor = once * (RANK + 1)
    collectives.all_reduce(tensor).wait()
    assert torch.equal(tensor, once * (RANKS * (RANKS + 1) // 2))


@pytest.mark.parametrize("piece_bytes", [8, 24, 200])
@pytest.mark.parametrize(
    ("algorithm", "layout"), [("flat", None), *product(["leader", "lanes"], VIRTUAL[-2:])]
)
def test_any_length_of_a_piece(worlds, monkeypatch, algorithm, layout, piece_bytes):
    monkeypatch.setattr(messages, "PIECE_BYTES", piece_bytes)
    world = worlds(algorithm, layout)
    run(
        world,
        [case for dtype in (torch.float32, torch.int64) for case in cases(world, [99], dtype)],
    )


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_a_message_that_is_longer_than_mpi_can_count(worlds, monkeypatch, algorithm, layout):
    monkeypatch.setattr(mpi, "MESSAGE_BYTES", 333)  # cuts through elements
    world = worlds(algorithm, layout)
    run(world, cases(world, [1003], roots=[0, RANKS - 1]))


def available_memory():
    """Bytes that processes may still take on this host."""
    with open("/proc/meminfo") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)


def test_more_bytes_than_a_32_bit_int_counts(worlds):
    if RANKS != 2:
        pytest.skip("two ranks are enough, and memory for more is not")
    world = worlds("naive")  # sends a tensor whole
    if min(world.gather(available_memory())) < 8 * 2**30:
        pytest.skip("needs 8 GiB of memory")
    # Memory from NumPy is not touched before it is used: all that takes time is what arrives.
    tensor = torch.from_numpy(np.zeros(2**31 + 5, dtype=np.uint8))
    marked = tensor[:: 2**26 + 1]
    marks = torch.arange(1, len(marked) + 1).byte()
    if RANK == 1:
        marked.copy_(marks)
        tensor[-1] = 7
    world.collectives.broadcast(tensor, root=1).wait()
    assert torch.equal(marked, marks)
    assert tensor[-1] == 7
    assert tensor.count_nonzero() == len(marks) + 1


@pytest.mark.parametrize("algorithm", FASTER)
def test_many_under_way_arrive_in_any_order_of_waiting(worlds, algorithm):
    world = worlds(algorithm, VIRTUAL[-1])
    several = [case for numel in range(12) for case in cases(world, [numel], roots=[0])]
    works = [case.launch() for case in several]
    order = torch.randperm(len(works), generator=torch.Generator().manual_seed(RANK))
    for index in order.tolist():
        works[index].wait()
        several[index].check()
        works[index].wait()  # again: it returns at once


def test_they_go_on_while_the_caller_computes(worlds):
    world = worlds("lanes", VIRTUAL[-1])
    several = cases(world, [1000, 70001], roots=[0])
    works = [case.launch() for case in several]
    checksum, end = 0, time.perf_counter() + 0.1
    while time.perf_counter() < end:
        checksum += sum(range(1000))
    for work in works:
        work.wait()
    for case in several:
        case.check()


def test_a_rank_that_comes_late_is_waited_for(worlds):
    world = worlds("lanes", VIRTUAL[-1])
    if RANK == RANKS - 1:
        time.sleep(0.2)
    run(world, cases(world, [17, 70001], roots=[0]))


def test_a_parameter_that_requires_grad_is_reduced_in_place(worlds):
    tensor = torch.nn.Parameter(torch.ones(3))
    worlds().collectives.all_reduce(tensor).wait()
    assert tensor.tolist() == [RANKS] * 3


def test_allocated_memory_is_flat_and_zero(worlds):
    tensor = worlds().collectives.allocate(5, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(tensor, torch.zeros(5, dtype=torch.bfloat16))


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 3), torch.zeros(()), torch.zeros(6)[::2], torch.zeros(1).expand(3)],
    ids=["2-D", "0-D", "strided", "expanded"],
)
def test_what_is_not_flat_and_contiguous_is_refused(worlds, verb, tensor):
    words = r"a flat contiguous tensor, not one of shape .*use tensor\.view\(-1\)"
    with pytest.raises(ValueError, match=words):
        getattr(worlds().collectives, verb)(tensor)


@pytest.mark.parametrize("root", [-1, RANKS])
def test_a_root_outside_the_world_is_refused(worlds, root):
    with pytest.raises(ValueError, match=f"root {root} is no rank of this world: 0 to {RANKS - 1}"):
        worlds().collectives.broadcast(torch.zeros(1), root)
