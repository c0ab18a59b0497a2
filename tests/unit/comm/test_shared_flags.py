"""The flags of a node's ranks, all in this process."""

import threading
import time

import torch

from mntrain.comm.shared_memory import DEPTH, SharedFlags

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


def test_a_private_tensor_beside_a_shared_one_is_out_of_reach():
    flags, memories = make(2)
    tensors = memories[0].allocate(80), torch.arange(80).byte()
    for view, tensor in zip(flags, tensors, strict=True):
        view.enter(tensor)
    for view, tensor in zip(flags, tensors, strict=True):
        assert view.tensors(0, tensor) is None


def test_data_written_before_entering_are_visible_afterwards():
    flags, memories = make(2)
    tensors = [memory.allocate(4000).view(torch.float32) for memory in memories]
    turns, seen = 300, []

    def play(rank):
        mine, other = flags[rank], 1 - rank
        for number in range(turns):
            mine.enter(tensors[rank].fill_(float(number + rank)))
            end = time.monotonic() + 30
            while not mine.all_entered(number):
                assert time.monotonic() < end
                time.sleep(0)
            theirs = mine.tensors(number, tensors[rank])[other]
            seen.append(set(theirs.tolist()) == {float(number + other)})
            mine.leave()
            while not mine.all_left(number):
                time.sleep(0)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 2 * turns
