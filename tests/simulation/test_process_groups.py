"""Process groups of torch on simulated ranks."""

import multiprocessing
from datetime import timedelta

import pytest
import torch
from network import NetworkModel
from simulated_worlds import SimulatedWorlds
from torch import distributed as dist
from virtual_time import Threading


@pytest.fixture(scope="module")
def process_group():
    """The module of process groups, whose import starts no MPI in a child."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "parent_process", lambda: "a parent")
        from mntrain.torch_backend import process_group, work

        patch.setattr(work, "threading", Threading())
        yield process_group


def run(process_group, program, hosts=(0, 1, 2)):
    """Run a program that gets the world's group, on simulated ranks; none leaves a message."""

    def on_rank(world):
        messages = world.messages("messages")
        store, timeout = dist.HashStore(), timedelta(seconds=60)
        program(process_group.MpiProcessGroup(world.collectives, messages, store, timeout))

    worlds = SimulatedWorlds(hosts=hosts)
    worlds.run(on_rank)
    assert not worlds.job.unreceived()


def test_ranks_that_make_a_group_wait_for_no_message_of_each_other(process_group):
    """Messages are not sent before their receives are posted."""

    def on_rank(world):
        meetings = world.messages("meetings")
        collectives, _ = world.subgroup([1, 0], "some", meetings)
        tensor = torch.full([3], world.rank + 1.0)
        collectives.all_reduce(tensor).wait()
        assert tensor.tolist() == [3.0] * 3

    worlds = SimulatedWorlds(hosts=(0, 0), network=NetworkModel(eager_bytes=0))
    worlds.run(on_rank)
    assert not worlds.job.unreceived()


@pytest.mark.parametrize("tag", [7, 1 << 30])
def test_a_receive_from_any_rank_waits_for_no_message_of_one(process_group, tag):
    def program(group):
        if group.rank() == 0:
            first, second = torch.zeros(1), torch.zeros(1)
            of_one = group.recv([first], 1, tag)
            group.recv_anysource([second], tag).wait()
            group.send([first], 1).wait()
            of_one.wait()
            assert (first, second) == (1, 2)
        else:
            if group.rank() == 1:
                group.recv([torch.zeros(1)], 0).wait()
            group.send([torch.full([1], group.rank()).float()], 0, tag).wait()

    run(process_group, program)


@pytest.mark.parametrize("tag", [7, 1 << 30])
def test_a_receive_without_a_message_ends_with_its_group(process_group, tag):
    def program(group):
        works = [group.recv([torch.zeros(1)], 1 - group.rank(), tag) for _ in range(2)]
        group.barrier().wait()
        group.shutdown()
        for work in works:
            with pytest.raises(RuntimeError, match="this process group was destroyed"):
                work.wait()

    run(process_group, program, hosts=(0, 1))


def test_sparse_sums_of_16_bits_are_rounded_once(process_group):
    def program(group):
        values = torch.tensor([1.0 if group.rank() else 256.0], dtype=torch.bfloat16)
        place = torch.tensor([[2]])
        tensor = torch.sparse_coo_tensor(place, values, [4], check_invariants=True)
        group.allreduce([tensor]).wait()
        assert tensor.dtype == torch.bfloat16
        assert tensor.to_dense().tolist() == [0, 0, 258, 0]

    run(process_group, program)
