"""Random calls of torch's verbs on process groups of simulated ranks, against closed forms."""

import itertools
import multiprocessing
import random
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate

import pytest
import torch
from drawn_calls import values
from hypothesis import example, given
from hypothesis import strategies as st
from network import NetworkModel
from search import searched
from simulated_worlds import SimulatedWorlds
from test_programs import networks
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp
from virtual_time import Threading, current

from mntrain.comm import mpi

SIZES = [0, 1, 3, 64, 1003, 9000]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
COMBINED = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
}


@pytest.fixture(scope="module")
def process_group():
    """The module of process groups, whose import starts no MPI in a child."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "parent_process", lambda: "a parent")
        from mntrain.torch_backend import process_group, work

        patch.setattr(work, "threading", Threading())
        yield process_group


class Calls:
    """The verbs on one rank of a group. Each method draws a call, makes it, and returns its check.

    All ranks of the group draw the same, by `common`.
    """

    def __init__(self, group, common):
        self.group, self.common = group, common
        self.rank, self.size = group.rank(), group.size()
        self.numel, self.dtype = common.choice(SIZES), common.choice(DTYPES)
        self.root = common.randrange(self.size)
        self.salt = common.randrange(11)
        self.lengths = common.choices(SIZES, k=self.size)
        self.reduced = common.choice(list(COMBINED))

    def given(self, rank, numel):
        """Return what a rank gives: small whole numbers, whose sums are exact in every dtype."""
        return values(numel, self.dtype, 3 * rank + self.salt).clone()

    def empty(self, numel):
        return torch.full((numel,), -77).to(self.dtype)

    def rows(self, numel):
        return torch.stack([self.given(rank, numel) for rank in range(self.size)])

    def combined(self, numel):
        rows = self.rows(numel).to(torch.float64 if self.dtype.is_floating_point else torch.int64)
        return COMBINED[self.reduced](rows).to(self.dtype)

    def options(self, kind):
        made = kind()
        for name, value in (("reduceOp", self.reduced), ("rootRank", self.root)):
            if hasattr(made, name):
                setattr(made, name, value)
        return made

    def all_reduce(self):
        tensor = self.given(self.rank, self.numel)
        work = self.group.allreduce([tensor], self.options(c10d.AllreduceOptions))
        return work, lambda: [(tensor, self.combined(self.numel))]

    def reduce(self):
        tensor = self.given(self.rank, self.numel)
        work = self.group.reduce([tensor], self.options(c10d.ReduceOptions))
        right = self.combined if self.rank == self.root else partial(self.given, self.rank)
        return work, lambda: [(tensor, right(self.numel))]

    def broadcast(self):
        tensor = self.given(self.rank, self.numel)
        work = self.group.broadcast([tensor], self.options(c10d.BroadcastOptions))
        return work, lambda: [(tensor, self.given(self.root, self.numel))]

    def all_gather(self):
        outputs = [self.empty(length) for length in self.lengths]
        own = self.given(self.rank, self.lengths[self.rank])
        work = self.group.allgather([outputs], [own], c10d.AllgatherOptions())
        return work, lambda: [
            (output, self.given(rank, self.lengths[rank])) for rank, output in enumerate(outputs)
        ]

    def all_gather_single(self):
        output = self.empty(self.numel * self.size)
        work = self.group.all_gather_single(output, self.given(self.rank, self.numel))
        return work, lambda: [(output, self.rows(self.numel).view(-1))]

    def reduce_scatter(self):
        output, whole = self.empty(self.lengths[self.rank]), sum(self.lengths)
        bounds = [0, *accumulate(self.lengths)]
        inputs = list(self.given(self.rank, whole).split(self.lengths))
        work = self.group.reduce_scatter(
            [output], [inputs], self.options(c10d.ReduceScatterOptions)
        )
        low, high = bounds[self.rank : self.rank + 2]
        return work, lambda: [(output, self.combined(whole)[low:high])]

    def reduce_scatter_single(self):
        output, whole = self.empty(self.numel), self.given(self.rank, self.numel * self.size)
        options = self.options(c10d.ReduceScatterOptions)
        work = self.group.reduce_scatter_single(output, whole, options)
        own = slice(self.rank * self.numel, (self.rank + 1) * self.numel)
        return work, lambda: [(output, self.combined(self.numel * self.size)[own])]

    def sent(self, source, target):
        return values(self.lengths[(source + target) % self.size], self.dtype, source + 5 * target)

    def all_to_all(self):
        inputs = [self.sent(self.rank, target).clone() for target in range(self.size)]
        expected = [self.sent(source, self.rank) for source in range(self.size)]
        outputs = [self.empty(len(one)) for one in expected]
        work = self.group.alltoall(outputs, inputs, c10d.AllToAllOptions())
        return work, lambda: list(zip(outputs, expected, strict=True))

    def all_to_all_single(self):
        inputs = [self.sent(self.rank, target) for target in range(self.size)]
        expected = [self.sent(source, self.rank) for source in range(self.size)]
        output, lengths = self.empty(sum(map(len, expected))), [list(map(len, expected))]
        lengths.append(list(map(len, inputs)))
        work = self.group.all_to_all_single(output, torch.cat(inputs), *lengths)
        return work, lambda: [(output, torch.cat(expected))]

    def gather(self):
        rows = [[self.empty(self.numel) for _ in range(self.size)]] if self.is_root else []
        own = self.given(self.rank, self.numel)
        work = self.group.gather(rows, [own], self.options(c10d.GatherOptions))
        return work, lambda: [
            (row, self.given(rank, self.numel)) for each in rows for rank, row in enumerate(each)
        ]

    def scatter(self):
        output = self.empty(self.numel)
        inputs = [list(self.rows(self.numel).unbind())] if self.is_root else []
        work = self.group.scatter([output], inputs, self.options(c10d.ScatterOptions))
        return work, lambda: [(output, self.given(self.rank, self.numel))]

    def messages(self):
        """Send to the next rank, and receive from the one before, with a tag."""
        tag, following = self.common.choice([0, 7]), (self.rank + 1) % self.size
        before, output = (self.rank - 1) % self.size, self.empty(self.numel)
        receive = self.group.recv([output], before, tag)
        send = self.group.send([self.given(self.rank, self.numel)], following, tag)

        class Both:
            def wait(self):
                send.wait()
                receive.wait()

        return Both(), lambda: [(output, self.given(before, self.numel))]

    def barrier(self):
        return self.group.barrier(), list

    @property
    def is_root(self):
        return self.rank == self.root


VERBS = ["all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single"]
VERBS += ["reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single"]
VERBS += ["gather", "scatter", "messages", "barrier"]


@dataclass(frozen=True)
class Groups:
    """Calls over the world, and over subgroups by their ranks' order, by name of the group."""

    seed: int
    hosts: tuple[int, ...]
    calls: tuple[str, ...]
    network: NetworkModel

    @property
    def members(self):
        """A subgroup of at least two ranks, in any order."""
        rng, size = random.Random(self.seed), len(self.hosts)
        return rng.sample(range(size), rng.randint(2, size))

    def on_rank(self, world, made):
        meetings = world.messages("meetings")
        groups = {"world": (world.collectives, world.messages("messages"))}
        if world.rank in self.members:
            groups["some"] = world.subgroup(self.members, "some", meetings)
        common, pending = random.Random(self.seed), []
        for number, (collectives, messages) in enumerate(groups.values()):
            group = made(collectives, messages, dist.HashStore(), timedelta(seconds=60))
            for place, verb in enumerate(self.calls):
                if group.size() == 1 and verb == "messages":
                    continue
                drawn = random.Random(f"{self.seed} {number} {place}")
                calls = Calls(group, drawn)
                current().time.sleep(1e-5 * ((world.rank + place) % 3))
                work, check = getattr(calls, verb)()
                pending.append((verb, work, check))
                if common.random() < 0.3:
                    work.wait()
        for verb, work, check in reversed(pending):
            work.wait()
            for found, expected in check():
                assert torch.equal(found, expected), verb


programs = st.builds(
    Groups,
    seed=st.integers(0, 1 << 32),
    hosts=st.lists(st.integers(0, 3), min_size=2, max_size=6).map(tuple),
    calls=st.lists(st.sampled_from(VERBS), min_size=1, max_size=6).map(tuple),
    network=networks,
)


# No message is sent before its receive is posted: ranks that made a group waited for each other.
NONE_EAGER = Groups(0, (0, 0), ("all_reduce",), NetworkModel(eager_bytes=0))


@pytest.mark.thorough
@searched(20)
@example(program=NONE_EAGER)
@given(program=programs)
def test_every_rank_of_a_group_has_what_torch_promises(process_group, program):
    worlds = SimulatedWorlds(
        hosts=program.hosts,
        seed=program.seed,
        network=program.network,
        switches=0.1 * (program.seed % 4),
    )
    worlds.run(partial(program.on_rank, made=process_group.MpiProcessGroup))
    assert not worlds.job.unreceived()


def run(process_group, program, hosts=(0, 1, 2)):
    """Run a program that gets the world's group, on simulated ranks; none leaves a message."""

    def on_rank(world):
        messages = world.messages("messages")
        store, timeout = dist.HashStore(), timedelta(seconds=60)
        program(process_group.MpiProcessGroup(world.collectives, messages, store, timeout))

    worlds = SimulatedWorlds(hosts=hosts)
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
