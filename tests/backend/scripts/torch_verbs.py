"""Every verb of torch's process groups over backend mntrain, beside a result computed here.

Every rank makes the inputs of all ranks. What a result must be is computed in fp64 from these.

    mpirun -n 3 python verbs.py
    mpirun -n 3 python verbs.py cuda        (all ranks may share one GPU)
"""

import functools
import itertools
import operator
import os
import sys
import time
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mntrain.torch_backend  # noqa: F401 - registers the backend
from mntrain.comm import engine
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import tag_count

# Older torch's names.
if not hasattr(dist, "all_gather_single"):
    dist.all_gather_single = dist.all_gather_into_tensor
    dist.reduce_scatter_single = dist.reduce_scatter_tensor
    functional.all_gather_single = functional.all_gather_tensor
    functional.reduce_scatter_single = functional.reduce_scatter_tensor

OPERATIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
BITWISE = {
    dist.ReduceOp.BAND: operator.and_,
    dist.ReduceOp.BOR: operator.or_,
    dist.ReduceOp.BXOR: operator.xor,
}
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool),
]


def values(rank, shape, dtype=torch.float32):
    """The input of a rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    drawn = torch.rand(shape, generator=generator, device="cpu") * 3
    values = drawn > 1 if dtype == torch.bool else drawn.to(dtype)
    return values.to(torch.get_default_device())


def equal(found, expected):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    dtype = found.dtype
    if not dtype.is_floating_point:
        assert torch.equal(found, expected.to(dtype)), (found, expected)
        return
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected.double(), rtol=8 * eps, atol=eps)


def combined(operation, ranks, shape, dtype):
    inputs = [values(rank, shape, dtype) for rank in ranks]
    wide = [it.double() if dtype.is_floating_point else it for it in inputs]
    return functools.reduce(operation, wide)


def test_sums(group, ranks, own):
    for dtype, numel in itertools.product(DTYPES, (0, 1, 5, 1000, 300_001)):
        few = numel < 10_000 or dtype == torch.float32
        for name, operation in OPERATIONS.items() if few else [(dist.ReduceOp.SUM, torch.add)]:
            tensor = values(own, numel, dtype)
            dist.all_reduce(tensor, name, group=group)
            equal(tensor, combined(operation, ranks, numel, dtype))
    for name, operation in BITWISE.items():
        tensor = values(own, 77, torch.int32)
        dist.all_reduce(tensor, name, group=group)
        equal(tensor, combined(operation, ranks, 77, torch.int32))
    for numel in (3, 100_000):
        tensor = values(own, numel)
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        equal(tensor, combined(torch.add, ranks, numel, tensor.dtype) / len(ranks))
    for dtype, factor in ((torch.int64, -7), (torch.uint8, 100)):
        tensor = values(own, 101, dtype) * factor  # up to 200: the sum of bytes needs more
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        total = sum((values(rank, 101, dtype) * factor).long() for rank in ranks)
        equal(tensor, (total.double() / len(ranks)).trunc())
    tensor = values(own, (4, 3), torch.complex64)
    dist.all_reduce(tensor, group=group)
    assert torch.allclose(tensor, sum(values(rank, (4, 3), torch.complex64) for rank in ranks))


def test_layouts(group, ranks, own):
    """Tensors that are not contiguous, and views of others, which keep their neighbors."""
    whole = values(own, (6, 8))
    before = whole.clone()
    dist.all_reduce(whole[:, 2:5], group=group)
    dist.all_reduce(whole.t()[6], group=group)
    total = combined(torch.add, ranks, (6, 8), torch.float32)
    before[:, 2:5], before[:, 6] = total[:, 2:5], total[:, 6]
    equal(whole, before)
    leaf = torch.nn.Parameter(values(own, 9))
    dist.all_reduce(leaf, group=group)
    equal(leaf.detach(), combined(torch.add, ranks, 9, torch.float32))
    transposed = torch.zeros(5, 2 * len(ranks)).t()
    dist.all_gather_single(transposed, values(own, (2, 5)), group=group)
    equal(transposed, torch.cat([values(rank, (2, 5)) for rank in ranks]))


def column(tensor):
    """The same values with a stride of 3, also when they are flattened."""
    return torch.stack([tensor, tensor * 0, tensor * 0], -1)[..., 0]


def negated(tensor):
    """The same values, as a view that negates what is in memory, such as `z.conj().imag`."""
    return torch._neg_view(-tensor)


def conjugated(tensor):
    """Return a complex view that conjugates what is in memory."""
    return torch.complex(tensor, -tensor - 1).conj()


def test_strided_tensors(group, ranks, own):
    """Every verb with inputs and outputs that are views, as with contiguous copies of them.

    Most functions of torch.distributed refuse lazily conjugated ones.
    """
    place, size, root = ranks.index(own), len(ranks), ranks[0]
    for view in (column, negated, conjugated):

        def inputs(rank, *shape, view=view):
            return view(values(rank, shape))

        def outputs(*shape, view=view):
            return view(torch.zeros(shape))

        total = sum(inputs(rank, 2 * size) for rank in ranks)
        dist.reduce(reduced := inputs(own, 2 * size), root, group=group)
        equal_all([reduced], [total if own == root else inputs(own, 2 * size)])
        parts = total.reshape(size, 2)
        output = outputs(2)
        dist.reduce_scatter_single(output, inputs(own, 2 * size), group=group)
        equal_all([output], [parts[place]])
        dist.reduce_scatter(output, list(inputs(own, 2 * size).chunk(size)), group=group)
        equal_all([output], [parts[place]])
        rows = [outputs(5) for _ in ranks]
        dist.gather(inputs(own, 5), rows if own == root else None, dst=root, group=group)
        if own == root:
            equal_all(rows, [inputs(rank, 5) for rank in ranks])
        if view is conjugated:
            continue
        rows, mine = [outputs(6) for _ in ranks], inputs(own, 6)
        dist.all_gather(rows, mine, group=group)
        equal_all(rows, [inputs(rank, 6) for rank in ranks])
        whole = outputs(6 * size)
        dist.all_gather_single(whole, mine, group=group)
        equal_all(whole.chunk(size), rows)
        dist.all_reduce(reduced := inputs(own, 2 * size), group=group)
        equal_all([reduced], [total])
        tensor = inputs(own, 3, 2)
        dist.broadcast(tensor, root, group=group)
        equal_all([tensor], [inputs(root, 3, 2)])
        received = outputs(2 * size)
        dist.all_to_all_single(received, inputs(own, 2 * size), group=group)
        expected = [inputs(rank, 2 * size).chunk(size)[place] for rank in ranks]
        equal_all(received.chunk(size), expected)
        rows = [outputs(2) for _ in ranks]
        dist.all_to_all(rows, list(inputs(own, 2 * size).chunk(size)), group=group)
        equal_all(rows, expected)
        given = [inputs(100 + number, 5) for number in range(size)]
        dist.scatter(received := outputs(5), given if own == root else None, src=root, group=group)
        equal_all([received], [given[place]])
        if size > 1:
            after, before = ranks[(place + 1) % size], ranks[place - 1]
            works = [
                dist.irecv(received := outputs(4), before, group=group),
                dist.isend(inputs(own, 4), after, group=group),
            ]
            for work in works:
                work.wait()
            equal_all([received], [inputs(before, 4)])


def equal_all(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-6), (one, other)


def test_expanded_tensors(group, ranks, own):
    """An element that stands for several: as an input as if copied; as an output one for all."""
    place, size, number = ranks.index(own), len(ranks), own + 1.0
    expanded = torch.full((1, 2), number).expand(size, 2)
    dist.all_reduce(expanded, group=group)
    assert expanded.unique().tolist() == [sum(rank + 1.0 for rank in ranks)]
    dist.broadcast(expanded := torch.full((), number).expand(3), ranks[-1], group=group)
    assert expanded.unique().tolist() == [ranks[-1] + 1.0]
    received = torch.zeros(size, 2)
    dist.all_to_all_single(received, torch.full((1, 2), number).expand(size, 2), group=group)
    assert received[:, 1].tolist() == [rank + 1.0 for rank in ranks]
    rows = [torch.zeros(4) for _ in ranks] if own == ranks[0] else None
    dist.gather(torch.full((), number).expand(4), rows, dst=ranks[0], group=group)
    assert [row[3].item() for row in rows or []] == [rank + 1.0 for rank in ranks if rows]
    if size > 1:
        after, before = ranks[(place + 1) % size], ranks[place - 1]
        for sent, alike in ((torch.tensor(number).expand(3), True), (torch.arange(3.0), False)):
            work = dist.irecv(received := torch.zeros(1).expand(3), before, group=group)
            dist.send(sent, after, group=group)
            refused = pytest.raises(ValueError, match="share memory")
            with nullcontext() if alike else refused:
                work.wait()
            assert not alike or received.tolist() == [before + 1.0] * 3


def test_tensors_are_resized_after_calls(group, ranks, own):
    """FSDP frees and enlarges the memory of what it has communicated."""
    place, size, root = ranks.index(own), len(ranks), ranks[0]
    after, before = ranks[(place + 1) % size], ranks[place - 1]

    def message(tensor):
        if size > 1:
            work = dist.isend(tensor, after, group=group)
            dist.recv(torch.zeros_like(tensor), before, group=group)
            work.wait()

    for numel in (2 * size, 30_000 * size):
        rows = [torch.zeros(numel) for _ in ranks]
        calls = {
            "all_reduce": lambda it: dist.all_reduce(it, group=group),
            "maximum": lambda it: dist.all_reduce(it, dist.ReduceOp.MAX, group=group),
            "reduce": lambda it: dist.reduce(it, root, group=group),
            "broadcast": lambda it: dist.broadcast(it, root, group=group),
            "all_gather": lambda it, rows=rows: dist.all_gather(rows, it, group=group),
            "all_gather_single": lambda it: dist.all_gather_single(
                it, it[: len(it) // size].clone(), group=group
            ),
            "reduce_scatter": lambda it: dist.reduce_scatter_single(
                torch.zeros(len(it) // size), it, group=group
            ),
            "all_to_all": lambda it: dist.all_to_all_single(it, it.clone(), group=group),
            "gather": lambda it, rows=rows: dist.gather(
                it, rows if own == root else None, dst=root, group=group
            ),
            "scatter": lambda it, rows=rows: dist.scatter(
                it, rows if own == root else None, src=root, group=group
            ),
            "message": message,
        }
        for name, call in calls.items():
            call(tensor := torch.ones(numel))
            for each in (tensor, *(rows if name in ("all_gather", "gather", "scatter") else ())):
                try:
                    each.resize_(2 * numel)
                except RuntimeError as error:
                    raise AssertionError(f"{name} of {numel}: {error}") from None
                each.resize_(numel)
            tensor.untyped_storage().resize_(0)


def sparse(rank, shape, dense_dimensions, dtype):
    """A tensor with elements of its own on each rank, and none on rank 0."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randint(n, (2 * rank,), generator=generator, device="cpu") for n in shape]
    indices = torch.stack(drawn[: len(shape) - dense_dimensions])
    numbers = values(rank, (2 * rank, *shape[len(shape) - dense_dimensions :]), dtype)
    options = {"check_invariants": True, "device": numbers.device}
    return torch.sparse_coo_tensor(indices, numbers, shape, **options)


def test_sparse_sums(group, ranks, own):
    for dtype, dense in itertools.product((torch.float64, torch.bfloat16, torch.int64), (0, 1)):
        tensor = sparse(own, (5, 7), dense, dtype)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert tensor.is_sparse
        inputs = [sparse(rank, (5, 7), dense, dtype).to_dense() for rank in ranks]
        equal(tensor.to_dense(), functools.reduce(torch.add, [it.double() for it in inputs]))


def test_gathers(group, ranks, own):
    for dtype, numel in itertools.product((torch.float32, torch.bool, torch.bfloat16), (1, 20_001)):
        rows = [torch.zeros(numel, dtype=dtype) for _ in ranks]
        dist.all_gather(rows, values(own, numel, dtype), group=group)
        for rank, row in zip(ranks, rows, strict=True):
            equal(row, values(rank, numel, dtype))
        output = torch.zeros(numel * len(ranks), dtype=dtype)
        dist.all_gather_single(output, values(own, numel, dtype), group=group)
        equal(output, torch.cat(rows))
    outputs = [[torch.zeros(3), torch.zeros(2, 2)] for _ in ranks]
    with warnings.catch_warnings(action="ignore"):  # torch may remove it
        dist.all_gather_coalesced(outputs, [values(own, 3), values(own, (2, 2))], group=group)
    for rank, (three, four) in zip(ranks, outputs, strict=True):
        equal(three, values(rank, 3))
        equal(four, values(rank, (2, 2)))
    found = [None] * len(ranks)
    dist.all_gather_object(found, {"rank": own, "text": "x" * own}, group=group)
    assert found == [{"rank": rank, "text": "x" * rank} for rank in ranks]
    objects = [own, "a"]
    dist.broadcast_object_list(objects, ranks[-1], group=group)
    assert objects == [ranks[-1], "a"]


def test_tensors_of_two_dtypes_are_refused(group, ranks, own):
    """No verb with inputs and outputs casts; each rank that sees both refuses them."""
    size, verbs = len(ranks), group or dist.group.WORLD
    rooted = type("Options", (), {"rootRank": ranks.index(own), "asyncOp": False})

    def coalesced(start, *tensors):
        with dist._coalescing_manager(group):
            start(*tensors, group=group)

    for one, other in ((torch.int64, torch.float32), (torch.float32, torch.int32)):

        def ones(length, dtype=one):
            return torch.ones(length, dtype=dtype)

        calls = [
            (verbs.all_gather_single, ones(3 * size), ones(3, other)),
            (verbs.all_gather_single_coalesced, [ones(3 * size)], [ones(3, other)]),
            (coalesced, dist.all_gather_single, ones(3 * size), ones(3, other)),
            (verbs.allgather, [[ones(3) for _ in ranks]], [ones(3, other)]),
            (verbs.allgather_coalesced, [[ones(3)] for _ in ranks], [ones(3, other)]),
            (verbs.reduce_scatter_single, ones(3), ones(3 * size, other)),
            (verbs.reduce_scatter_single_coalesced, [ones(3)], [ones(3 * size, other)]),
            (coalesced, dist.reduce_scatter_single, ones(3), ones(3 * size, other)),
            (verbs.reduce_scatter, [ones(3)], [[ones(3, other) for _ in ranks]]),
            (verbs.alltoall, [ones(3) for _ in ranks], [ones(3, other) for _ in ranks]),
            (verbs.all_to_all_single, ones(size), ones(size, other), [], []),
            (verbs.gather, [[ones(3) for _ in ranks]], [ones(3, other)], rooted),
            (verbs.scatter, [ones(3)], [[ones(3, other) for _ in ranks]], rooted),
        ]
        if size > 1:  # tensors of other ranks alone that differ
            mixed = [ones(3, one if rank == own else other) for rank in ranks]
            calls += [
                (verbs.allgather, [mixed], [ones(3)]),
                (verbs.allgather_coalesced, [[it] for it in mixed], [ones(3)]),
                (verbs.reduce_scatter, [ones(3)], [mixed]),
                (verbs.alltoall, mixed, [ones(3) for _ in ranks]),
                (verbs.alltoall, [ones(3) for _ in ranks], mixed),
                (verbs.gather, [mixed], [ones(3)], rooted),
                (verbs.scatter, [ones(3)], [mixed], rooted),
            ]
        for verb, *tensors in calls:
            with pytest.raises(ValueError, match="outputs and inputs of one dtype") as error:
                verb(*tensors)
            assert all(str(dtype) in str(error.value) for dtype in (one, other))
    # Each tensor of a coalesced call may have its own.
    wholes = [torch.zeros(size), torch.zeros(size, dtype=torch.int64)]
    with dist._coalescing_manager(group):
        for whole in wholes:
            dist.all_gather_single(whole, torch.full((1,), own + 1).to(whole.dtype), group=group)
    assert all(whole.tolist() == [rank + 1 for rank in ranks] for whole in wholes)


def test_outputs_that_are_inputs(group, ranks, own):
    """The content at the call is sent."""
    place, size = ranks.index(own), len(ranks)
    tensor = values(own, (2 * size, 30_000))
    dist.all_to_all_single(tensor, tensor, group=group)
    inputs = [values(r, (2 * size, 30_000))[2 * place : 2 * place + 2] for r in ranks]
    equal(tensor, torch.cat(inputs))
    whole = values(own, (size, 4))
    dist.all_gather(list(whole), whole[place], group=group)
    equal(whole, torch.stack([values(r, (size, 4))[i] for i, r in enumerate(ranks)]))
    whole = values(own, (size, 4))
    dist.reduce_scatter_single(whole[:1], whole, group=group)
    equal(whole[0], combined(torch.add, ranks, (size, 4), torch.float32)[place])
    rows = list(values(ranks[0], (size, 4)))
    mine, expected = (rows[-1] if place == 0 else torch.zeros(4)), rows[place].clone()
    dist.scatter(mine, rows if place == 0 else None, src=ranks[0], group=group)
    equal(mine, expected)
    rows = list(values(own, (size, 4)))
    dist.gather(rows[-1], rows if place == 0 else None, dst=ranks[0], group=group)
    for rank, row in zip(ranks, rows if place == 0 else [], strict=False):
        equal(row, values(rank, (size, 4))[-1])


def test_messages(group, ranks, own):
    place, size = ranks.index(own), len(ranks)
    if size == 1:
        return
    after, before = ranks[(place + 1) % size], ranks[place - 1]
    for shape in ((0,), (3,), (5, 4), (400_000,)):
        received = torch.zeros(shape[::-1]).permute(*reversed(range(len(shape))))
        works = [
            dist.irecv(received, before, group=group, tag=3),
            dist.isend(values(own, shape), after, group=group, tag=3),
        ]
        for work in works:
            work.wait()
        equal(received, values(before, shape))
    operations = [
        dist.P2POp(dist.isend, values(own, 9), after, group),
        dist.P2POp(dist.irecv, received := torch.zeros(9), before, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    equal(received, values(before, 9))
    if place:
        dist.send(values(own, 5), ranks[0], group=group, tag=7)
        return
    sources = []
    for _ in ranks[1:]:
        received = torch.zeros(5)
        sources.append(dist.recv(received, None, group=group, tag=7))
        equal(received, values(sources[-1], 5))
    assert sorted(sources) == sorted(ranks[1:])


def test_a_message_wakes_the_thread_for_a_caller_that_goes_on(group, ranks, own):
    """And not for `send` and `recv`, which wait at once."""
    place, woken, submit = ranks.index(own), [], ProgressEngine.submit
    before, after = ranks[place - 1], ranks[(place + 1) % len(ranks)]

    def watched(*arguments, **options):
        woken.append(options["wake"])
        return submit(*arguments, **options)

    if len(ranks) == 1:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressEngine, "submit", watched)
        dist.send(values(own, 5), after, group=group)
        dist.recv(received := torch.zeros(5), before, group=group)
        works = [dist.isend(values(own, 7), after, group=group)]
        works += [dist.irecv(torch.zeros(7), before, group=group)]
    for work in works:
        work.wait()
    assert woken == [False, False, True, True]
    assert torch.equal(received, values(before, 5))


def test_tags(group, ranks, own):
    place, size = ranks.index(own), len(ranks)
    if size == 1:
        return
    after, before = ranks[(place + 1) % size], ranks[place - 1]
    # Two tags cross: the later one is waited for first.
    tags = 1, tag_count() - 1
    found = {tag: torch.zeros(2, dtype=torch.int64) for tag in tags}
    works = [dist.irecv(found[tag], before, group=group, tag=tag) for tag in tags]
    sent = [torch.full((2,), tag) for tag in reversed(tags)]
    works += [dist.isend(it, after, group=group, tag=int(it[0])) for it in sent]
    for work in reversed(works):
        work.wait()
    assert [it[0].item() for it in found.values()] == list(tags)
    # Many of one tag, which arrive while their receives look for them.
    numbered = [torch.full((2,), -1.0) for _ in range(300)]
    works = [dist.irecv(it, before, group=group) for it in numbered]
    sent = [torch.full((2,), 1.0 * number) for number in range(300)]
    works += [dist.isend(it, after, group=group) for it in sent]
    for work in works:
        work.wait()
    assert [int(it[0]) for it in numbered] == list(range(300))
    for call in (dist.isend, dist.irecv):
        with pytest.raises(ValueError, match=f"give one from 0 to {tags[1]}, which MPI has"):
            call(torch.zeros(2), after, group=group, tag=tags[1] + 1)


def test_works(group, ranks, own):
    """Works that are waited for late, twice, by a future, or not at all."""
    tensors = [values(own, numel) for numel in (4, 200_000, 7)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dropped = values(own, 50_000).view(1000, 50).t()
    dist.all_reduce(dropped, group=group, async_op=True)
    seen = []
    future = works[1].get_future().then(lambda it: seen.append(it.value()[0].clone()))
    for work in (works[2], works[0], works[0], works[1]):
        work.wait()
    future.wait()
    for tensor in (*tensors, seen[0]):
        equal(tensor, combined(torch.add, ranks, tensor.shape, tensor.dtype))
    assert all(work.is_completed() and work.is_success() for work in works)
    dist.barrier(group=group)
    equal(dropped.t().reshape(-1), combined(torch.add, ranks, 50_000, torch.float32))
    with dist.distributed_c10d._coalescing_manager(group=group):
        for tensor in (coalesced := [values(own, numel) for numel in (3, 5)]):
            dist.all_reduce(tensor, group=group)
    for tensor in coalesced:
        equal(tensor, combined(torch.add, ranks, tensor.shape, tensor.dtype))


def test_profiles(group, ranks, own):
    """The profiler sees a call once, by the verb that was called, until its end."""
    place, over = ranks.index(own), group or dist.group.WORLD
    before = over._get_sequence_number_for_group()
    # What torch.profiler records with, which imports the compiler for an option of its own.
    with torch.autograd.profiler.profile() as profile:
        work = dist.all_reduce(values(own, 5), group=group, async_op=True)
        dist.barrier(group=group)
        if own == ranks[0]:
            time.sleep(0.2)
        dist.all_reduce(values(own, 5), dist.ReduceOp.MAX, group=group)
        dist.reduce_scatter_single(values(own, 3), values(own, 3 * len(ranks)), group=group)
        dist.send(values(own, 3), ranks[place ^ 1], group=group) if place == 0 < len(
            ranks
        ) - 1 else ()
        dist.recv(values(own, 3), ranks[0], group=group) if place == 1 else ()
        work.wait()
    found = {it.key: it for it in profile.key_averages() if it.key.startswith("mntrain:")}
    message = [["mntrain:send"] * (len(ranks) > 1), ["mntrain:recv"]][place] if place < 2 else []
    verbs = ["mntrain:all_reduce", "mntrain:barrier", "mntrain:reduce_scatter_single"]
    assert sorted(found) == sorted(verbs + message), sorted(found)
    assert found["mntrain:all_reduce"].count == 2
    if place:
        assert found["mntrain:all_reduce"].cpu_time_total > 0.1e6  # microseconds: it has waited
    if len(ranks) > 1:  # a rank alone calls nobody
        assert over._get_sequence_number_for_group() == before + 4
    over.get_group_store().set("a key", b"")


def test_functional_collectives(group, ranks, own):
    """Those of DTensor and compiled code, which call the group from C++."""
    place, size, over = ranks.index(own), len(ranks), group or dist.group.WORLD
    total = combined(torch.add, ranks, (2 * size, 3), torch.float32)
    mine = values(own, (2 * size, 3))
    equal(functional.all_reduce(mine, "sum", over), total)
    equal(functional.reduce_scatter_single(mine, "sum", 0, over), total[2 * place : 2 * place + 2])
    rows = functional.all_gather_single(mine, 0, over)
    equal(rows, torch.cat([values(rank, (2 * size, 3)) for rank in ranks]))
    swapped = functional.all_to_all_single(mine, None, None, over)
    expected = [values(rank, (2 * size, 3))[2 * place : 2 * place + 2] for rank in ranks]
    equal(swapped, torch.cat(expected))
    equal(functional.broadcast(mine, size - 1, over), values(ranks[-1], (2 * size, 3)))


def test_results_that_are_on_their_way(group, ranks, own):
    """Tensors of functional collectives, which wait when they are used."""
    place, size, over = ranks.index(own), len(ranks), group or dist.group.WORLD
    for numel in (size, 50_000 * size):
        total = combined(torch.add, ranks, numel, torch.float32)
        found = functional.all_reduce(values(own, numel), "sum", over)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        equal(found, total)
        swapped = torch.zeros(numel)
        dist.all_to_all_single(
            swapped, functional.all_reduce(values(own, numel), "sum", over), group=group
        )
        equal(swapped, total.view(size, -1)[place].repeat(size))


def test_calls_of_a_backward_pass_within_one_do_not_gather(group, ranks, own):
    """Nobody waits at its end, and the thread would leave them alone for longer than this test."""
    model = torch.nn.Linear(3, 2)
    model = DistributedDataParallel(model, process_group=group, static_graph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "GATHER_S", 1000.0)
        for _ in range(2):
            given = torch.full((4, 3), float(own), requires_grad=True)
            checkpoint(model, given, use_reentrant=True).sum().backward()
    assert model.module.weight.grad.eq(2 * 4 * sum(ranks) / len(ranks)).all()


def test_inference(group, ranks, own):
    """Tensors of inference mode, contiguous and not, of which an evaluation has some."""
    with torch.inference_mode():
        dist.barrier(group=group)
        tensor, strided = values(own, 40_000), values(own, (3, 4)).t()
        rows = [torch.zeros(2, 3).t() for _ in ranks]
        works = [dist.all_reduce(it, group=group, async_op=True) for it in (tensor, strided)]
        dist.all_gather(rows, values(own, (3, 2)), group=group)
        for work in works:
            work.wait()
        equal(tensor, combined(torch.add, ranks, 40_000, torch.float32))
        equal(strided, combined(torch.add, ranks, (3, 4), torch.float32).t())
        equal(rows[-1], values(ranks[-1], (3, 2)))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("mntrain")
    if os.environ.get("LEFT_OVER"):  # variables of another job were in the environment
        numbers = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        assert numbers == [dist.get_rank(), dist.get_world_size(), dist.get_rank()], numbers
    torch.set_default_device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    own, size = dist.get_rank(), dist.get_world_size()
    everything = list(range(size))
    groups = [everything, everything[1:]] if size > 1 else [everything]
    groups += [[*everything[2:], 0]] if size > 1 else []  # from 3 on, not in the order of ranks
    tests = [test for name, test in globals().items() if name.startswith("test_")]
    for ranks in groups:
        if len(set(ranks)) < len(ranks):
            continue
        unsorted = {"sort_ranks": False} if ranks != sorted(ranks) else {}
        group = None if ranks == everything else dist.new_group(ranks, **unsorted)
        if own not in ranks:
            continue
        for test in tests:
            test(group, ranks, own)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {own}: {len(tests)} tests passed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
