"""Memory that the ranks of a node share: whose it is, how long it lives, where there is none."""

import contextlib
import gc
import os
import resource
import time

import pytest
import torch
from cases import CPU, PIECE_BYTES, RANK, Arena, Way, cases, out_of_reach, run
from mpi4py import MPI
from worlds import RANKS, VIRTUAL, make_world

from mntrain.comm import algorithms, shared_memory

LAST = RANKS - 1


def maps():
    """Return how many parts of shared memory are mapped in this process."""
    with open("/proc/self/maps") as lines:
        return sum("/memfd:mntrain" in line for line in lines)


def descriptors():
    """Return how many descriptors of shared memory are open here, but for those of MPI."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own is closed
            count += "/memfd:mntrain" in os.readlink(f"/proc/self/fd/{descriptor}")
    return count


@contextlib.contextmanager
def nothing_left():
    """Assert that the block gives back what it takes of the process."""
    gc.collect()  # of what came before
    before = maps(), descriptors()
    yield
    gc.collect()
    assert maps() <= before[0]
    assert descriptors() <= before[1]


def shared_bytes(world):
    """Bytes of this rank's parts that are in use."""
    segments = world.collectives.memory._segments.values()
    return sum(segment.nbytes for segment in segments if not segment.own.expired())


def allocate(world, numel, dtype=torch.float32):
    return world.collectives.allocate(numel, dtype, CPU)


def check_collectives(world):
    """Every algorithm, with and without what `allocate` gives, and messages alone."""
    with out_of_reach():
        check_algorithms(world)
    check_algorithms(world)


def check_algorithms(world):
    arena = Arena(world, 1 << 20)
    for algorithm in algorithms.names():
        way = Way(world, algorithm, PIECE_BYTES, arena)
        several = [
            case
            for place in ("plain", "mixed")
            for case in cases(way, [0, 17, 9001], roots=[LAST], place=place)
        ]
        run(world, several)
        arena.clear()


# Whose it is.


def test_it_begins_at_a_page_and_with_zeros():
    with make_world() as world:
        for numel, dtype in [(1, torch.uint8), (5, torch.bfloat16), (70001, torch.float64)]:
            tensor = allocate(world, numel, dtype)
            assert tensor.shape == (numel,)
            assert tensor.dtype == dtype
            assert not tensor.any()
            tensor.fill_(1)  # the next one has zeros again
            if world.local_size > 1:
                assert tensor.data_ptr() % resource.getpagesize() == 0


@pytest.mark.parametrize("layout", VIRTUAL)
def test_ranks_that_share_a_node_share_it_and_others_do_not(layout):
    with nothing_left():
        with make_world("lanes", layout) as world:
            before, other = maps(), shared_bytes(world)
            tensor = allocate(world, 1000)
            several = world.local_size > 1
            assert maps() - before == several * world.local_size  # views of the others' parts too
            assert world.collectives.no_shared_memory_reason == ""
            assert shared_bytes(world) - other == several * 4000
            del tensor
            assert shared_bytes(world) == other
            tensors = [allocate(world, numel) for numel in (1, 1000, 0, 70001)]
            world.collectives.all_reduce(tensors[-1]).wait()
        del world, tensors


def test_only_what_takes_part_in_a_collective_is_read_or_written():
    with make_world() as world:
        everything = allocate(world, 30000).fill_(-7)
        other = allocate(world, 1000).fill_(-8)
        part = everything[9999:20001].fill_(RANK)
        world.collectives.all_reduce(part).wait()
        world.collectives.reduce_scatter(part).wait()
        assert set(everything[:9999].tolist()) == set(everything[20001:].tolist()) == {-7}
        assert set(other.tolist()) == {-8}


# How long it lives.


def test_a_view_of_a_tensor_outlives_its_world():
    with nothing_left():
        with make_world() as world:
            tensor = allocate(world, 80000)[5000:75001]
            tensor.fill_(RANK)
            world.collectives.all_reduce(tensor).wait()
        del world
        gc.collect()
        MPI.COMM_WORLD.Barrier()  # all have let go of the others' parts
        assert set(tensor.tolist()) == {RANKS * LAST / 2}
        tensor.fill_(RANK)
        MPI.COMM_WORLD.Barrier()
        assert set(tensor.tolist()) == {RANK}
        assert maps() >= 1
        del tensor


def test_maps_and_descriptors_are_flat_over_many_allocations():
    with make_world() as world:
        kept = allocate(world, 100)
        tensor = allocate(world, 1)
        counts = []
        for turn in range(60):
            tensor = allocate(world, 1 + 1000 * turn)
            tensor.fill_(1)
            world.collectives.all_reduce(tensor).wait()
            assert tensor[-1] == RANKS
            counts.append((maps(), descriptors()))
        assert len(set(counts[2:])) == 1
        world.collectives.all_reduce(kept).wait()
        assert not kept.any()


def test_what_one_rank_has_let_go_of_the_others_may_use():
    with make_world() as world:
        first, second = allocate(world, 20011), allocate(world, 20011)
        if RANK == 0:
            del first
            first = torch.zeros(20011)
        third = allocate(world, 20011)  # here the others learn of it
        for turn, tensor in enumerate((first, second, third)):
            tensor.fill_(RANK + turn)
            world.collectives.all_reduce(tensor).wait()
            assert set(tensor.tolist()) == {RANKS * LAST / 2 + turn * RANKS}


def test_memory_that_takes_the_place_of_what_is_gone_is_not_taken_for_it():
    with make_world() as world:
        for _ in range(5):
            tensor = allocate(world, 1 << 20)
            world.collectives.all_reduce(tensor).wait()
            del tensor
            plain = torch.empty(1 << 20).fill_(RANK)  # from the same place, perhaps
            world.collectives.all_reduce(plain).wait()
            assert plain[0] == plain[-1] == RANKS * LAST / 2


def test_private_memory_lives_until_all_ranks_have_left_it():
    with make_world() as world:
        if not all(world.gather(bool(world.collectives.memory.pids))):
            pytest.skip("the kernel lets no process copy from another's memory")
        flags = world.collectives._host.flags
        tensor = torch.zeros(20011)
        number = flags.enter(tensor)
        del tensor
        while not flags.all_entered(number):
            time.sleep(1e-3)
        gc.collect()
        assert flags._lent[number].untyped_storage().nbytes() == 4 * 20011
        flags.leave()
        while not flags.all_left(number):
            time.sleep(1e-3)
        assert not flags._lent
        world.collectives.all_reduce(torch.zeros(20011)).wait()
        assert not flags._lent


# Where there is none.


def reason_of_all(world):
    why = world.collectives.no_shared_memory_reason
    assert world.gather(why) == [why] * RANKS
    return why


def refuse_files(monkeypatch):
    refusal = -1, None, "there is none, today"
    monkeypatch.setattr(shared_memory, "_create", lambda nbytes, token: refusal)


def refuse_maps(monkeypatch):
    original = shared_memory._map

    def refuse(path, nbytes, token):
        if not path.startswith("/proc/self"):
            raise OSError("not that of others")
        return original(path, nbytes, token)

    monkeypatch.setattr(shared_memory, "_map", refuse)


def be_somebody_else(monkeypatch):
    """Give the id of another process, as in another namespace of process ids."""
    monkeypatch.setattr(os, "getpid", lambda: 1)


REASONS = [
    (refuse_files, "there is none, today"),
    (refuse_maps, f"local rank {LAST} cannot map a peer's memory: not that of others"),
    (be_somebody_else, "local rank 0 cannot map a peer's memory"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "words"), REASONS)
def test_what_one_rank_cannot_have_all_do_without(monkeypatch, way, words):
    with nothing_left():
        before = maps()  # other tests may keep tensors
        if RANK == LAST:
            way(monkeypatch)
        with make_world() as world:
            monkeypatch.undo()
            assert reason_of_all(world).startswith(words)
            assert shared_bytes(world) == 0
            check_collectives(world)
            assert maps() == before
        del world


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "words"), REASONS)
def test_what_one_rank_cannot_have_any_more_later_on(monkeypatch, way, words):
    with nothing_left():
        with make_world() as world:
            before = allocate(world, 20011).fill_(RANK)
            if RANK == LAST:
                way(monkeypatch)
            after = allocate(world, 20011).fill_(RANK)
            monkeypatch.undo()
            assert world.collectives.no_shared_memory_reason.startswith(words)
            assert not allocate(world, 3).any()
            for tensor in (before, after):
                messages = sum(rank.node_messages for rank in world.usage())
                with out_of_reach():
                    world.collectives.all_reduce(tensor).wait()
                sent = sum(rank.node_messages for rank in world.usage()) - messages
                assert (sent > 0) == (tensor is after)  # what was shared still is
                assert set(tensor.tolist()) == {RANKS * LAST / 2}
            check_collectives(world)
        del world, before, after, tensor


def test_one_node_does_without_and_the_others_do_not(monkeypatch):
    if RANK == LAST:
        refuse_files(monkeypatch)
    with make_world("lanes", max(2, RANKS // 2)) as world:
        monkeypatch.undo()
        last = RANK in world.topology.node_group(LAST) and world.local_size > 1
        assert world.collectives.no_shared_memory_reason == ("there is none, today" if last else "")
        check_collectives(world)
