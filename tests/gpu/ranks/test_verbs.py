"""The transport of a world, and every verb on device memory, against the naive oracle, too."""

from itertools import product

import pytest
import torch
from cases import RANK, UNIT, Case, bits, check_bits, cuts, run, shard
from worlds import RANKS

import mntrain
from gpu.place import CUDA, ON, gpu
from gpu.ranks.transports import TRANSPORTS, transports
from mntrain.bench.candidates import Pattern, library_candidate
from mntrain.comm import algorithms
from mntrain.comm.ticket import AlgorithmChoice
from zero.layout import MIB

pytestmark = [pytest.mark.mpi, *gpu]

SIZES = [0, 1, 2, 7, 1003, 9001, 70001]
LARGE = 45 * MIB  # more than the host transport stages at once
SUMS = ["all_reduce", "reduce_scatter"]
VERBS = [*SUMS, "all_gather", "broadcast"]
PLACES = {"plain": 0, "odd": 1, "odder": 3}  # elements before the tensor, in its memory
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float64: 1e-15}


class DeviceArena:
    """Device memory to lay tensors into."""

    def __init__(self, world):
        self._world = world

    def tensor(self, numel, dtype, place):
        """A tensor of any content; "allocated" is collective."""
        device = self._world.device
        if place == "allocated":
            return self._world.collectives.allocate(numel, dtype, device)
        start = PLACES[place]
        return torch.empty(start + numel, dtype=dtype, device=device)[start:]


class DeviceWay:
    """The collectives of a world on a GPU by one algorithm, as `Case` takes them."""

    def __init__(self, world, algorithm):
        self.arena = DeviceArena(world)
        self.collectives = world.collectives.replace(choice=AlgorithmChoice(algorithm))


class OnDevice(Case):
    """A case whose tensor is looked at on the CPU."""

    def check(self):
        self.tensor = self.tensor.cpu()
        super().check()


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("algorithm", algorithms.names())
@transports
def test_every_verb_at_sizes_that_do_not_divide(worlds, transport, algorithm, dtype):
    world = worlds(transport)
    way = DeviceWay(world, algorithm)
    for place in (*PLACES, "allocated"):
        several = [
            OnDevice(way, verb, numel, dtype, place=place)
            for verb, numel in product(VERBS[:3], SIZES)
        ]
        several += [
            OnDevice(way, "broadcast", numel, dtype, root=root, place=place)
            for root, numel in product({0, RANKS - 1}, SIZES)
        ]
        run(world, several)


@pytest.mark.parametrize("algorithm", algorithms.names())
@transports
def test_shards_wherever_the_caller_cuts(worlds, transport, algorithm):
    world = worlds(transport)
    way = DeviceWay(world, algorithm)
    several = [
        OnDevice(way, verb, numel, bounds=bounds)
        for verb, numel in product(["reduce_scatter", "all_gather"], [7, 9001])
        for bounds in cuts(numel)
    ]
    run(world, several)


@pytest.mark.parametrize("dtype", ROUNDING)
@transports
def test_sums_of_any_numbers_are_those_of_the_naive_oracle(worlds, transport, dtype):
    world = worlds(transport)
    generator = torch.Generator().manual_seed(RANK)
    for numel in (5, 20011, 500_009):
        values = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
        naive = values.to(world.device)
        world.collectives.replace(choice=AlgorithmChoice("naive")).all_reduce(naive).wait()
        for verb, algorithm in product(SUMS, algorithms.names()[:3]):
            collectives = world.collectives.replace(choice=AlgorithmChoice(algorithm))
            ours = values.to(world.device)
            getattr(collectives, verb)(ours).wait()
            own = shard(collectives, numel) if verb == "reduce_scatter" else slice(None)
            limit = 2 * RANKS * ROUNDING[dtype]
            torch.testing.assert_close(ours[own], naive[own], rtol=limit, atol=limit)
            if verb == "all_reduce":
                check_bits(world, [ours.cpu()])


@transports
def test_a_sum_is_the_same_bits_every_time(worlds, transport):
    world = worlds(transport)
    values = torch.randn(70001, generator=torch.Generator().manual_seed(RANK))
    found = []
    for _ in range(3):
        tensor = values.to(world.device)
        world.collectives.all_reduce(tensor).wait()
        found.append(bits(tensor.cpu()))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("verb", VERBS)
@transports
def test_a_tensor_larger_than_what_is_staged_at_once(worlds, transport, verb, dtype):
    world = worlds(transport)
    numel = LARGE // dtype.itemsize + 3
    tensor = torch.empty(numel + 1, dtype=dtype, device=world.device)[1:]
    pattern = Pattern(RANK, RANKS, tensor)
    candidate = library_candidate(transport, verb, world.collectives, tensor, pattern)
    for _ in range(2):
        candidate.prepare()
        candidate.run()
        assert candidate.is_correct()


@transports
def test_a_16_bit_wire_sums_exactly_what_16_bits_hold(worlds, transport):
    world = worlds(transport)
    for numel in (3, 70001):
        tensor = torch.arange(numel, device=world.device).remainder(11).float() + RANK
        expected = RANKS * tensor - RANKS * RANK + sum(range(RANKS))
        world.collectives.all_reduce(tensor, wire=torch.bfloat16).wait()
        assert torch.equal(tensor, expected)


@transports
def test_a_world_has_the_requested_transport(worlds, transport):
    world = worlds(transport)
    assert world.device.type == ON
    chosen = transport if CUDA and world.size > 1 else ""
    assert world.gather(world.transport) == [chosen] * world.size


@pytest.mark.skipif(not CUDA, reason="the CPU has no transports to select")
def test_auto_selects_a_working_transport_the_same_on_all_ranks():
    with mntrain.init(device=ON) as world:
        assert world.transport in (TRANSPORTS if world.size > 1 else [""])
        assert len(set(world.gather(world.transport))) == 1
        tensor = torch.full((1_000_003,), float(world.rank), device=world.device)
        world.collectives.all_reduce(tensor).wait()
        assert (tensor == sum(range(world.size))).all()
