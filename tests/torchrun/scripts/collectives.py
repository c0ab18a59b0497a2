"""Every collective of `zero.TorchCollectives` beside a result computed here.

export PYTHONPATH=tests/helpers:tests/mpi
python -m torch.distributed.run --nproc-per-node 3 tests/torchrun/scripts/collectives.py
mpirun -n 3 python tests/torchrun/scripts/collectives.py        over backend mntrain
"""

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch_ranks import run_tests

from zero import TorchCollectives
from zero.collectives import broadcast_from_rank_0, gather_objects
from zero.kernels import sum_dtype

SIZES = [0, 1, 2, 5, 12, 1003, 70_001]
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
]
MOVED = [*DTYPES, torch.float8_e5m2, torch.uint16]


def values(rank, numel, dtype):
    generator = torch.Generator().manual_seed(100 * rank + numel % 97)
    drawn = torch.randn(numel, generator=generator, dtype=torch.float64) * 3
    if dtype == torch.bool:
        return drawn > 1
    if dtype.is_complex:
        return torch.complex(drawn, drawn.flip(0)).to(dtype)
    if not dtype.is_floating_point:
        return drawn.abs().long().to(dtype)
    return drawn.to(dtype)


def sums(size, numel, dtype, wire=None):
    """The sum of all ranks' values in the order of ranks, rounded once."""
    addends = [values(rank, numel, dtype) for rank in range(size)]
    if wire is not None:
        addends = [addend.to(wire) for addend in addends]
    total = torch.zeros(numel, dtype=sum_dtype(addends[0].dtype))
    for addend in addends:
        total = total + addend
    return total.to(addends[0].dtype).to(dtype)


def all_bounds(numel, size):
    """Equal, unequal and empty shards."""
    cuts = [None, [0] * size + [numel], [0] + [numel] * size]
    cuts.append([0, *sorted((7 * i * i + 3) % (numel + 1) for i in range(size - 1)), numel])
    if numel % size == 0:
        cuts.append([i * numel // size for i in range(size + 1)])
    return cuts


def expect_close(found, expected, exact=False):
    if exact or not (found.is_floating_point() or found.is_complex()):
        assert torch.equal(found, expected), (found, expected)
        return
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=64 * eps, atol=64 * eps)


def shard(bounds, numel, rank, size):
    bounds = bounds or [i * numel // size for i in range(size + 1)]
    return slice(bounds[rank], bounds[rank + 1])


def bits(tensor):
    return hashlib.sha256(bytes(tensor.view(torch.uint8).tolist())).hexdigest()


def test_sums_are_right_and_the_same_bits_on_all_ranks(world):
    collectives = TorchCollectives().named("the test")
    for dtype in DTYPES:
        for numel in SIZES:
            tensor = values(world.rank, numel, dtype)
            work = collectives.all_reduce(tensor)
            work.wait()
            work.wait()
            assert work.done()
            expect_close(tensor, sums(world.size, numel, dtype), exact=dtype.itemsize < 4)
            assert len(set(world.gather(bits(tensor)))) == 1, (dtype, numel)


def test_every_rank_has_the_sum_of_its_shard(world):
    collectives = TorchCollectives()
    for dtype in DTYPES:
        for numel in SIZES[:-1]:
            expected = sums(world.size, numel, dtype)
            for bounds in all_bounds(numel, world.size):
                tensor = values(world.rank, numel, dtype)
                collectives.reduce_scatter(tensor, bounds).wait()
                own = shard(bounds, numel, world.rank, world.size)
                expect_close(tensor[own], expected[own], exact=dtype.itemsize < 4)


def test_addends_are_rounded_to_the_wire_dtype_and_added_in_the_order_of_ranks(world):
    collectives = TorchCollectives()
    for dtype, wire in [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float32),
    ]:
        narrow = wire if wire.itemsize < dtype.itemsize and world.size > 1 else None
        for numel in SIZES:
            expected, exact = sums(world.size, numel, dtype, narrow), narrow is not None
            tensor = values(world.rank, numel, dtype)
            collectives.all_reduce(tensor, wire=wire).wait()
            expect_close(tensor, expected, exact)
            for bounds in all_bounds(numel, world.size):
                tensor = values(world.rank, numel, dtype)
                collectives.reduce_scatter(tensor, bounds, wire=wire).wait()
                own = shard(bounds, numel, world.rank, world.size)
                expect_close(tensor[own], expected[own], exact)


def test_shards_and_tensors_of_every_dtype_are_copied(world):
    collectives = TorchCollectives()
    for dtype in MOVED:
        for numel in SIZES[:-1]:
            for bounds in all_bounds(numel, world.size):
                expected = values(0, numel, torch.float32).to(dtype)
                tensor = torch.zeros(numel).to(dtype)
                own = shard(bounds, numel, world.rank, world.size)
                tensor[own] = expected[own]
                collectives.all_gather(tensor, bounds).wait()
                assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
            for root in range(world.size):
                tensor = values(world.rank, numel, torch.float32).to(dtype)
                collectives.broadcast(tensor, root).wait()
                expected = values(root, numel, torch.float32).to(dtype)
                assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_many_calls_are_in_flight_and_some_are_never_waited_for(world):
    collectives, works = TorchCollectives(), []
    tensors = [values(world.rank, 999 + i, torch.float32) for i in range(20)]
    for i, tensor in enumerate(tensors):
        collectives.all_reduce(torch.ones(3))
        works.append(collectives.all_reduce(tensor) if i % 2 else collectives.all_gather(tensor))
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors[1::2]):
        expect_close(tensor, sums(world.size, 1000 + 2 * i, torch.float32))


def test_two_collectives_need_no_order_between_them(world):
    first, second = TorchCollectives(), TorchCollectives()
    for tensors in [torch.ones(2, 5), torch.ones(2, 90_000)]:
        calls = [(first, tensors[0], 1.0), (second, tensors[1], 2.0)]
        works = []
        for collectives, tensor, value in calls if world.rank % 2 else reversed(calls):
            tensor.fill_(value)
            works.append(collectives.all_reduce(tensor))
        for work in works:
            work.wait()
        assert tensors.mean(1).tolist() == [world.size, 2 * world.size]


def test_objects_and_mixed_tensors(world):
    collectives = TorchCollectives()
    found = gather_objects(collectives, ["x" * world.rank, world.rank])
    assert found == [["x" * rank, rank] for rank in range(world.size)]
    tensors = [values(world.rank, 7, dtype) for dtype in (torch.float32, torch.bool, torch.int64)]
    broadcast_from_rank_0(collectives, tensors)
    for tensor in tensors:
        assert torch.equal(tensor, values(0, 7, tensor.dtype))


def test_parts_of_the_ranks_have_collectives_of_their_own(world):
    for part in [[world.size - 1], list(range(world.size))[1:], list(range(0, world.size, 2))]:
        group = dist.new_group(part) if part else None
        if world.rank in part:
            collectives = TorchCollectives(group)
            assert (collectives.rank, collectives.size) == (part.index(world.rank), len(part))
            tensor = torch.full((4 * len(part),), float(world.rank))
            collectives.all_gather(tensor).wait()
            assert tensor.tolist() == [rank for rank in part for _ in range(4)]
            tensor = torch.full((5,), float(world.rank))
            collectives.broadcast(tensor, len(part) - 1).wait()
            assert tensor.tolist() == [part[-1]] * 5
            collectives.reduce_scatter(tensor).wait()
            own = tensor[
                collectives.rank * 5 // len(part) : (collectives.rank + 1) * 5 // len(part)
            ]
            assert own.eq(part[-1] * len(part)).all()
        elif part:
            refused(lambda group=group: TorchCollectives(group), "is no rank of the group")


def test_wrong_arguments_are_one_sentence(world):
    collectives = TorchCollectives()
    for call, words in [
        (lambda: collectives.all_reduce(torch.ones(2, 2)), "takes a flat contiguous tensor"),
        (lambda: collectives.all_gather(torch.ones(4)[::2]), "takes a flat contiguous tensor"),
        (lambda: collectives.all_gather(torch.ones(4).cfloat().conj()), "takes no lazily conjug"),
        (lambda: collectives.all_reduce(torch.ones(4).cfloat(), torch.half), "does not travel in"),
        (lambda: collectives.reduce_scatter(torch.ones(4), [0, 4, 3]), "do not cut 4 elements"),
        (lambda: collectives.all_gather(torch.ones(4), [0]), "do not cut 4 elements"),
        (lambda: collectives.broadcast(torch.ones(4), 9), "root 9 is no rank of this group"),
    ]:
        refused(call, words)
    group = dist.new_group(backend="cuda:gloo")
    refused(lambda: TorchCollectives(group), "by gloo on cuda alone, and small messages are on the")


def refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


if __name__ == "__main__":
    run_tests(globals())
