"""Tensors of devices, on devices that live on the host: by every transport, late and in order."""

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch
from devices import HostGroup, LateDevice, PromptDevice
from mpi4py import MPI

import mntrain
from mntrain import transport
from mntrain.comm.algorithm_table import AlgorithmTable
from mntrain.comm.collectives import Devices, WorldCollectives
from mntrain.transport import probe
from mntrain.transport.node_group import NodeGroupFactory
from zero.kernels import TorchKernels
from zero.layout import split

pytestmark = pytest.mark.mpi
COMM = MPI.COMM_WORLD
several = pytest.mark.skipif(COMM.size == 1, reason="nothing travels in a world of one")
SLOT_BYTES = 4096
SIZES = (0, 1, 17, 1000, 5003)
TRANSPORTS = ("host", "cuda-aware", "nccl")
# With as many ranks a node as these, and the rest on the last one.
LAYOUTS = (1, 2, 4)


class Rig:
    """Collectives of a world whose ranks have a device each."""

    def __init__(self, ranks_per_node, device, *, mixed=False):
        self.world = mntrain.init(ranks_per_node=ranks_per_node, tune=False)
        self.device, self.progress = device, self.world._progress
        self.devices = Devices(
            torch.device("cpu"), device, TorchKernels(), mixed=mixed, slot_bytes=SLOT_BYTES
        )
        self.comm = self.on_thread(lambda: self.world._world.split(0, self.world.rank, "test"))
        self.collectives = self.on_thread(
            lambda: WorldCollectives(
                self.comm, self.world._node, self.world.topology, self.progress, self.devices
            )
        )
        self.near = NodeGroupFactory(
            self.comm,
            self.world._node,
            self.world.topology,
            self.progress,
            self.devices,
            group=HostGroup,
            check=lambda: None,
        )

    def on_thread(self, function):
        return self.progress.call(function).wait()

    def use(self, name):
        sizes = {len(node) for node in self.world.topology.nodes}
        if name == "nccl":
            if len(sizes) > 1:
                pytest.skip("nodes of different sizes, which this transport refuses")
            self.near.connect()
            self.collectives = self.collectives.replace(node_first=self.near.join())
        self.collectives = self.collectives.replace(transport=name)
        return self.collectives

    def site(self, **changes):
        gpus = [f"gpu {rank}" for rank in range(self.world.size)]
        given = {"gpus": gpus, "near": self.near, "tensor": self.device.tensor}
        given |= {"takes": lambda device: ""} | changes
        return transport.Site(
            self.comm,
            self.world.topology,
            self.progress,
            self.collectives,
            self.devices,
            library="an MPI",
            **given,
        )

    def close(self):
        self.near.close()
        self.on_thread(self.comm.free)
        self.world.close()
        self.device.close()


@pytest.fixture
def rig():
    made = []

    def make(ranks_per_node=2, device=None, **options):
        made.append(Rig(ranks_per_node, device or PromptDevice(COMM.rank), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ramp(numel, dtype=torch.float32):
    return (torch.arange(numel) % 23).to(dtype)


def expected_sum(numel, dtype, size):
    return (ramp(numel, torch.float64) * size + size * (size - 1) // 2).to(dtype)


@several
@pytest.mark.parametrize(
    ("ranks_per_node", "dtype"),
    [
        *((layout, torch.float32) for layout in LAYOUTS),
        *((2, dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64)),
    ],
)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_verb_gives_what_it_promises(rig, name, ranks_per_node, dtype):
    one = rig(ranks_per_node)
    collectives, device = one.use(name), one.device
    size, rank = COMM.size, COMM.rank
    every = ranks_per_node == 2 and dtype == torch.float32
    algorithms = ("lanes", "leader", "flat", "naive", "gathered") if every else ("lanes",)
    for algorithm, numel in itertools.product(algorithms, SIZES):
        collectives = collectives.replace(
            small_message_bytes=1 << 30 if algorithm == "gathered" else 0,
            table=AlgorithmTable.always(algorithm.replace("gathered", "lanes"), 1 << 10),
        )
        bounds = uneven(numel, size)
        slot = collectives.slot(rank)
        mine = slice(bounds[slot], bounds[slot + 1])
        total = expected_sum(numel, dtype, size)
        tensor = device.tensor(numel, dtype)

        tensor.copy_(ramp(numel, dtype) + rank)
        collectives.all_reduce(tensor).wait()
        device.synchronize()
        assert torch.equal(tensor, total), (algorithm, numel)

        tensor.copy_(ramp(numel, dtype) + rank)
        collectives.reduce_scatter(tensor, bounds).wait()
        device.synchronize()
        assert torch.equal(tensor[mine], total[mine]), (algorithm, numel)

        tensor.fill_(-1)
        tensor[mine] = total[mine]
        collectives.all_gather(tensor, bounds).wait()
        device.synchronize()
        assert torch.equal(tensor, total), (algorithm, numel)

        tensor.copy_(ramp(numel, dtype) + rank)
        collectives.broadcast(tensor, size - 1).wait()
        device.synchronize()
        assert torch.equal(tensor, ramp(numel, dtype) + size - 1), (algorithm, numel)


def uneven(numel, size):
    """Bounds of shards of which the first is empty, if there are several."""
    return (0, *split(numel, size - 1)) if size > 1 else (0, numel)


@several
@pytest.mark.parametrize("ranks_per_node", LAYOUTS)
@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_sums_have_the_bits_of_host_tensors(rig, name, ranks_per_node, wire):
    one = rig(ranks_per_node)
    collectives = one.use(name)
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        values = torch.randn(5003, generator=torch.Generator().manual_seed(COMM.rank + 9 * seed))
        on_host = values.to(dtype)
        on_device = one.device.tensor(5003, dtype)
        on_device.copy_(on_host)
        wired = wire if wire != dtype else None
        one.world.collectives.all_reduce(on_host, wired).wait()
        collectives.all_reduce(on_device, wired).wait()
        one.device.synchronize()
        assert torch.equal(on_device, on_host)


@several
@pytest.mark.parametrize("ranks_per_node", LAYOUTS)
@pytest.mark.parametrize("name", ["host", "cuda-aware"])
def test_a_collective_comes_after_what_the_caller_gave_the_device_and_before_what_it_gives_next(
    rig, name, ranks_per_node
):
    """Nothing but the order of streams: the host never waits for the device in between."""
    one = rig(ranks_per_node, LateDevice(COMM.rank))
    collectives, device = one.use(name), one.device
    draws = random.Random(0)  # the same everywhere
    seen, under_way = [], []

    def begin():
        numel = draws.choice((3, 100, 1024, 5000))
        tensor, offset = device.tensor(numel), draws.randrange(50)
        device.run(lambda: tensor.copy_(ramp(numel) + COMM.rank + offset))
        under_way.append((tensor, offset, collectives.all_reduce(tensor)))

    def end():
        tensor, offset, work = under_way.pop(0)
        work.wait()
        device.run(lambda: seen.append((offset, tensor.clone())))
        device.run(lambda: tensor.fill_(float("nan")))

    for _ in range(40):
        begin()
        if len(under_way) > draws.randrange(6):
            end()
    while under_way:
        end()
    device.synchronize()
    assert len(seen) == 40
    for offset, result in seen:
        total = expected_sum(len(result), torch.float32, COMM.size) + COMM.size * offset
        assert torch.equal(result, total)


@several
def test_only_what_a_verb_needs_is_copied(rig):
    one = rig(2, LateDevice())
    collectives, device = one.use("host"), one.device
    size, numel = COMM.size, 10_007
    tensor = device.tensor(numel)
    low, high = split(numel, size)[collectives.slot(COMM.rank) :][:2]
    root = COMM.rank == 0
    for start, fetched, brought in (
        (collectives.all_reduce, numel, numel),
        (collectives.reduce_scatter, numel, high - low),
        (collectives.all_gather, high - low, numel - (high - low)),
        (collectives.broadcast, numel * root, numel * (not root)),
    ):
        before = device.fetched, device.brought
        start(tensor).wait()
        device.synchronize()
        assert (device.fetched - before[0], device.brought - before[1]) == (fetched, brought)


@several
def test_ranks_with_and_without_a_device_work_together(rig):
    one = rig(2, mixed=True)
    collectives, size = one.use("host"), COMM.size
    for numel in SIZES:
        tensor = one.device.tensor(numel) if COMM.rank % 2 else torch.zeros(numel)
        tensor.copy_(ramp(numel) + COMM.rank)
        collectives.all_reduce(tensor).wait()
        one.device.synchronize()
        assert torch.equal(tensor, expected_sum(numel, torch.float32, size))
        slot = collectives.slot(COMM.rank)
        low, high = split(numel, size)[slot : slot + 2]
        tensor[:low], tensor[high:] = -1, -1
        collectives.all_gather(tensor).wait()
        one.device.synchronize()
        assert torch.equal(tensor, expected_sum(numel, torch.float32, size))


@several
def test_slots_are_pinned_until_the_collectives_are_gone(rig):
    one = rig(2)
    assert one.device.pinned == 1
    one.collectives = one.devices = None
    one.near.devices = None
    assert one.device.pinned == 0


# Which transport.


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """One for all ranks, which nobody else has."""
    monkeypatch.setenv("XDG_CACHE_HOME", COMM.bcast(str(tmp_path)))


@several
@pytest.mark.parametrize("wanted", TRANSPORTS)
def test_a_transport_that_is_asked_for_is_used(rig, own_cache, wanted):
    one = rig(COMM.size)
    line = transport.choose(one.site(), wanted, 1 << 16)
    assert one.collectives.transport == wanted
    assert line == f"{wanted}: as asked for"
    tensor = one.device.tensor(100).fill_(1)
    one.collectives.all_reduce(tensor).wait()
    one.device.synchronize()
    assert (tensor == COMM.size).all()


@several
def test_auto_is_one_that_works_and_says_what_it_measured(rig, own_cache):
    one = rig(COMM.size)
    asked = []
    site = one.site(takes=lambda device: asked.append(device) or "")
    line = transport.choose(site, "auto", 1 << 16)
    first = one.collectives.transport
    assert set(COMM.allgather(first)) == {first}
    assert line.startswith(f"{first} (host ")
    assert all(f"{name} " in line for name in TRANSPORTS)
    assert len(asked) == (COMM.rank == 0)  # one rank a node asks
    again = transport.choose(site, "auto", 1 << 16)
    assert one.collectives.transport == first
    assert again.startswith(line)
    assert " (tried 2" in again
    assert len(asked) == (COMM.rank == 0)  # and but once


@several
def test_auto_is_host_where_nothing_else_works_and_says_why(rig, own_cache):
    one = rig(COMM.size)
    gpus = ["the only one"] * COMM.size
    site = one.site(gpus=gpus, takes=lambda device: "its MPI crashed (SIGSEGV)")
    line = transport.choose(site, "auto", 1 << 16)
    assert one.collectives.transport == "host"
    assert "not cuda-aware: rank 0: its MPI crashed (SIGSEGV)" in line
    assert "not nccl: rank 0 and rank 1 share a GPU" in line
    with pytest.raises(ValueError, match=r"transport cuda-aware: rank 0: its MPI .*choose host"):
        transport.choose(site, "cuda-aware", 1 << 16)
    with pytest.raises(ValueError, match=r"transport nccl: rank 0 and rank 1 share a GPU"):
        transport.choose(site, "nccl", 1 << 16)


class WrongGroup(HostGroup):
    """Loses what one rank is sent."""

    def exchange(self, sends, receives):
        super().exchange(sends, receives)
        if self.rank == 1:
            for _, tensor in receives:
                tensor.zero_()


@several
def test_a_transport_that_gives_wrong_results_is_not_used(rig, own_cache):
    one = rig(COMM.size)
    one.near.group = WrongGroup
    line = transport.choose(one.site(), "auto", 1 << 16)
    assert one.collectives.transport != "nccl"
    assert "not nccl: rank 0 (and" in line
    assert "came out wrong" in line


class NoGroup:
    def __init__(self, node, devices):
        if node.rank == 1:
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")
        self.close = lambda: None


@several
def test_a_group_that_cannot_be_made_on_one_rank_is_given_up_by_all(rig, own_cache):
    one = rig(COMM.size)
    one.near.group = NoGroup
    line = transport.choose(one.site(), "auto", 1 << 16)
    assert "not nccl: rank 1: NCCL_ERROR_SYSTEM_ERROR: unhandled system error" in line
    assert one.collectives.transport in ("host", "cuda-aware")


@several
def test_a_job_without_gpus_refuses_transports_of_gpus():
    with pytest.raises(ValueError, match="transport nccl: no rank of this job has a GPU"):
        mntrain.init(device="cpu", transport="nccl")
    with pytest.raises(ValueError, match="transport 'ib' is unknown: choose auto, host, cuda-"):
        mntrain.init(device="cpu", transport="ib")
    with mntrain.init(device="cpu", transport="host", tune=False) as world:
        assert world.transport == ""


def test_the_child_is_told_nothing_of_this_job():
    told = probe.alone({**os.environ, "SLURM_NTASKS": "4", "OMPI_MCA_btl": "self", "HOME": "/h"})
    assert "SLURM_NTASKS" not in told
    assert not [name for name in told if name.startswith(("PMI", "OMPI_COMM", "OMPI_MCA_ess"))]
    assert (told["OMPI_MCA_btl"], told["HOME"]) == ("self", "/h")
    size = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    said = subprocess.run(
        [sys.executable, "-c", size], env=told, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["1"]
