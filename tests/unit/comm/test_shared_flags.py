"""The flags of a node's ranks, all in this process."""

import threading
import time

import pytest
import torch

from mntrain.comm.shared_memory import DEPTH, INLINE_BYTES, SharedFlags

SIZE = 1 << 20


class Memory:
    """The shared memory of a node, as one rank sees it: a segment 0 of every rank."""

    def __init__(self, parts, rank):
        self._parts, self._rank = parts, rank
        self._used = 0

    def allocate(self, nbytes):
        self._used += nbytes
        return self._parts[self._rank][self._used - nbytes : self._used]

    def locate(self, tensor):
        start = tensor.data_ptr() - self._parts[self._rank].data_ptr()
        return (0, start) if 0 <= start < SIZE else None

    def view(self, local_rank, place, numel, dtype):
        part = self._parts[local_rank][place[1] : place[1] + numel * dtype.itemsize]
        return part.view(dtype)


def make(size):
    parts = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(size)]
    memories = [Memory(parts, rank) for rank in range(size)]
    return [SharedFlags(memory, rank, size) for rank, memory in enumerate(memories)], memories


def same_memory(a, b):
    return (a.data_ptr(), len(a), a.dtype) == (b.data_ptr(), len(b), b.dtype)


def test_a_collective_is_entered_or_left_when_all_ranks_have():
    flags, _ = make(3)
    for number in range(3 * DEPTH):
        for view in flags:
            assert not any(b.all_entered(number) for b in flags if b is not view)
            view.enter(torch.zeros(1))
        assert all(view.all_entered(number) for view in flags)
        for view in flags:
            assert not any(b.all_left(number) for b in flags if b is not view)
            view.leave()
        assert all(view.all_left(number) for view in flags)
    assert all(view.all_entered(0) and view.all_left(0) for view in flags)


def test_without_shared_memory_no_rank_is_waited_for():
    class NoMemory:
        def allocate(self, nbytes):
            return torch.zeros(nbytes, dtype=torch.uint8)

        def locate(self, tensor):
            return None

    view = SharedFlags(NoMemory(), 0, 2)
    view.enter(torch.zeros(1))
    assert view.all_entered(0)
    assert view.tensors(0, torch.zeros(1)) is None
    view.leave()
    assert view.all_left(0)


def test_a_collective_with_unequal_digests_is_never_entered_by_all():
    flags, _ = make(3)
    for number, digests in enumerate([(7, 7, 7), (7, 8, 7)]):
        for view, digest in zip(flags, digests, strict=True):
            view.enter(torch.zeros(1), digest)
        assert [view.all_entered(number) for view in flags] == [number == 0] * 3


def test_every_rank_sees_the_other_ranks_tensors():
    flags, memories = make(3)
    tensors = [memory.allocate(4096).view(torch.float32) for memory in memories]
    for offset, (view, tensor) in enumerate(zip(flags, tensors, strict=True)):
        view.enter(tensor[offset : offset + 7])  # each where it likes
    for rank, view in enumerate(flags):
        found = view.tensors(0, tensors[rank][rank : rank + 7])
        for offset, (theirs, tensor) in enumerate(zip(found, tensors, strict=True)):
            assert same_memory(theirs, tensor[offset : offset + 7])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_small_private_tensors_are_copied_to_inline_slots(dtype):
    flags, _ = make(2)
    numel = INLINE_BYTES // dtype.itemsize
    for turn in range(2):
        numbers = range(turn * DEPTH, (turn + 1) * DEPTH)  # as many as may be in flight
        sent = [[torch.full((numel,), n % 10 + 10 * r).to(dtype) for n in numbers] for r in (0, 1)]
        for view, tensors in zip(flags, sent, strict=True):
            for tensor in tensors:
                view.enter(tensor)
        for number, tensors in zip(numbers, zip(*sent, strict=True), strict=True):
            for rank, view in enumerate(flags):
                found = view.tensors(number, tensors[rank])
                assert all(map(torch.equal, found, tensors))
                assert same_memory(found[rank], view._inline_slot(rank, number, tensors[rank]))
                assert not same_memory(found[rank], tensors[rank])
        for view in flags:
            for _ in numbers:
                view.leave()


@pytest.mark.parametrize(("nbytes", "reached"), [(80, True), (INLINE_BYTES + 8, False)])
def test_a_private_tensor_beside_a_shared_one_is_reached_where_it_is_small(nbytes, reached):
    flags, memories = make(2)
    shared, own = memories[0].allocate(nbytes), torch.arange(nbytes).byte()
    for view, tensor in zip(flags, (shared, own), strict=True):
        view.enter(tensor)
    for view, tensor in zip(flags, (shared, own), strict=True):
        found = view.tensors(0, tensor)
        assert (found is not None) == reached
        if reached:
            assert same_memory(found[0], shared)
            assert torch.equal(found[1], own)


def test_data_written_before_entering_are_visible_afterwards():
    flags, _ = make(2)
    turns, seen = 300, []

    def play(rank):
        mine, other = flags[rank], 1 - rank
        for number in range(turns):
            mine.enter(torch.full((1000,), float(number + rank)))
            end = time.monotonic() + 30
            while not mine.all_entered(number):
                assert time.monotonic() < end
                time.sleep(0)
            slot = mine.tensors(number, torch.empty(1000))[other]
            seen.append(set(slot.tolist()) == {float(number + other)})
            mine.leave()
            while not mine.all_left(number):
                time.sleep(0)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 2 * turns
