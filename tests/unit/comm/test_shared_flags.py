"""Boards of a node's ranks, all in this process."""

import threading
import time

import pytest
import torch

from mntrain.comm.shared_flags import DEPTH, INLINE_BYTES, SharedFlags
from mntrain.comm.shared_memory import SegmentOffset

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
        return SegmentOffset(0, start) if 0 <= start < SIZE else None

    def view(self, local_rank, place, numel, dtype):
        part = self._parts[local_rank][place.start : place.start + numel * dtype.itemsize]
        return part.view(dtype)


class NoMemory:
    def allocate(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def locate(self, tensor):
        return None


def make(size):
    parts = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(size)]
    memories = [Memory(parts, rank) for rank in range(size)]
    return [SharedFlags(memory, rank, size) for rank, memory in enumerate(memories)], memories


def same_memory(a, b):
    return (a.data_ptr(), len(a), a.dtype) == (b.data_ptr(), len(b), b.dtype)


def test_a_collective_is_entered_when_all_have_entered_and_left_when_all_have_left():
    boards, _ = make(3)
    for number in range(3 * DEPTH):
        for board in boards:
            assert not any(b.everyone_entered(number) for b in boards if b is not board)
            board.enter(torch.zeros(1))
        assert all(board.everyone_entered(number) for board in boards)
        for board in boards:
            assert not any(b.everyone_left(number) for b in boards if b is not board)
            board.leave()
        assert all(board.everyone_left(number) for board in boards)
    assert all(board.everyone_entered(0) and board.everyone_left(0) for board in boards)


def test_every_rank_finds_the_others_tensors_in_shared_memory():
    boards, memories = make(3)
    tensors = [memory.allocate(4096).view(torch.float32) for memory in memories]
    for offset, (board, tensor) in enumerate(zip(boards, tensors, strict=True)):
        board.enter(tensor[offset : offset + 7])  # each where it likes
    for rank, board in enumerate(boards):
        found = board.tensors(0, tensors[rank][rank : rank + 7])
        for offset, (theirs, tensor) in enumerate(zip(found, tensors, strict=True)):
            assert same_memory(theirs, tensor[offset : offset + 7])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_small_tensors_of_ones_own_lie_in_trays(dtype):
    boards, _ = make(2)
    numel = INLINE_BYTES // dtype.itemsize
    for number in range(2 * DEPTH):
        tensors = [torch.full((numel,), 10 * rank + number % 10).to(dtype) for rank in range(2)]
        for board, tensor in zip(boards, tensors, strict=True):
            board.enter(tensor)
        for rank, board in enumerate(boards):
            found = board.tensors(number, tensors[rank])
            assert all(map(torch.equal, found, tensors))
            assert same_memory(found[rank], board.tray(number, tensors[rank]))
            assert not same_memory(found[rank], tensors[rank])
        for board in boards:
            board.leave()


def test_trays_of_collectives_under_way_together_do_not_meet():
    boards, _ = make(2)
    numel = INLINE_BYTES // 4
    for number in range(DEPTH):
        for board in boards:
            board.enter(torch.full((numel,), number, dtype=torch.int32))
    for number in range(DEPTH):
        for theirs in boards[0].tensors(number, torch.empty(numel, dtype=torch.int32)):
            assert set(theirs.tolist()) == {number}


def test_a_large_tensor_of_ones_own_is_out_of_reach_for_all():
    boards, memories = make(2)
    shared, own = memories[0].allocate(INLINE_BYTES + 8), torch.zeros(INLINE_BYTES + 8).byte()
    boards[0].enter(shared)
    boards[1].enter(own)
    assert boards[0].tensors(0, shared) is None
    assert boards[1].tensors(0, own) is None


def test_a_tray_meets_a_tensor_in_shared_memory():
    boards, memories = make(2)
    shared, own = memories[0].allocate(80).view(torch.float32), torch.arange(20.0)
    boards[0].enter(shared)
    boards[1].enter(own)
    for rank, board in enumerate(boards):
        found = board.tensors(0, (shared, own)[rank])
        assert same_memory(found[0], shared)
        assert torch.equal(found[1], own)


def test_empty_tensors_can_be_reached():
    boards, _ = make(2)
    for board in boards:
        board.enter(torch.zeros(0))
    assert [len(tensor) for tensor in boards[0].tensors(0, torch.zeros(0))] == [0, 0]


def test_without_shared_memory_there_is_nobody_to_wait_for():
    board = SharedFlags(NoMemory(), 0, 2)
    board.enter(torch.zeros(1))
    assert board.everyone_entered(0)
    assert board.tensors(0, torch.zeros(1)) is None
    board.leave()
    assert board.everyone_left(0)


def test_a_rank_alone_has_its_own_tensor():
    board = SharedFlags(NoMemory(), 0, 1)
    mine = torch.zeros(1)
    board.enter(mine)
    (found,) = board.tensors(0, mine)
    assert found is mine


def test_who_sees_a_rank_enter_sees_what_it_wrote_before():
    boards, _ = make(2)
    turns, seen = 300, []

    def play(rank):
        mine, other = boards[rank], 1 - rank
        for number in range(turns):
            mine.enter(torch.full((1000,), float(number + rank)))
            end = time.monotonic() + 30
            while not mine.everyone_entered(number):
                assert time.monotonic() < end
                time.sleep(0)
            tray = mine.tensors(number, torch.empty(1000))[other]
            seen.append(set(tray.tolist()) == {float(number + other)})
            mine.leave()
            while not mine.everyone_left(number):
                time.sleep(0)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 2 * turns
