"""Process groups of torch on simulated ranks."""

import itertools
import multiprocessing
from datetime import timedelta

import pytest
import torch
from network import NetworkModel
from simulated_worlds import SimulatedWorlds
from torch import distributed as dist
from virtual_time import Threading

from mntrain.comm import mpi


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


def test_a_receive_from_any_rank_waits_for_no_message_of_one(process_group):
    tag = 7

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


def test_a_receive_without_a_message_ends_with_its_group(process_group):
    def program(group):
        works = [group.recv([torch.zeros(1)], 1 - group.rank(), 7) for _ in range(2)]
        group.barrier().wait()
        group.shutdown()
        for work in works:
            with pytest.raises(RuntimeError, match="this process group was destroyed"):
                work.wait()

    run(process_group, program, hosts=(0, 1))


def test_a_message_of_several_parts_leaves_none_to_the_next_receive(process_group, monkeypatch):
    """A part has four numbers at most."""
    numbers = torch.arange(9.0)

    def program(group):
        group.barrier().wait()  # the worlds are made
        monkeypatch.setattr(mpi, "MESSAGE_BYTES", 16)
        for sent, received in itertools.product((0, 1, 4, 5, 8, 9), repeat=2):
            if group.rank() == 0:
                for numel in (sent, received, 3):
                    group.send([numbers[:numel]], 1).wait()
                continue
            outputs = [torch.zeros(numel) for numel in (received, received, 3)]
            first, *works = [group.recv([output], 0) for output in outputs]
            if sent == received:
                first.wait()
                assert torch.equal(outputs[0], numbers[:sent])
            else:
                wrong = f"sent {4 * sent} bytes with tag 0, and this rank receives {4 * received}:"
                with pytest.raises(RuntimeError, match=wrong):
                    first.wait()
            for output, work in zip(outputs[1:], works, strict=True):
                work.wait()
                assert torch.equal(output, numbers[: len(output)])

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
