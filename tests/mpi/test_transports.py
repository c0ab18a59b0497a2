"""Tensors on emulated devices, by every transport: results, stream order, selection."""

import contextlib
import os
import random
from pathlib import Path

import pytest
import torch
from devices import GlooGroup, LateDevice
from mpi4py import MPI
from rig import BUFFER_BYTES, TRANSPORTS

import mntrain
from mntrain.comm import nccl
from mntrain.comm.nccl import shared_store
from mntrain.comm.shared_memory import DEPTH
from mntrain.comm.ticket import AlgorithmChoice
from zero.layout import split

COMM = MPI.COMM_WORLD
SIZES = (0, 1, 17, 1000, 5003)
# Ranks per node; the last node may have fewer. Of few cases, those of NCCL, the last transport,
# have the last layout, which is of several nodes of several ranks where there are four.
LAYOUTS = (1, 4, 2)


def ramp(numel, dtype=torch.float32):
    return (torch.arange(numel) % 23).to(dtype)


def expected_sum(numel, dtype, size):
    return (ramp(numel, torch.float64) * size + size * (size - 1) // 2).to(dtype)


ALGORITHMS = ("lanes", "leader", "flat", "naive", "gathered")
WAYS = [*((name, algorithm) for name in ("host", "nccl") for algorithm in ALGORITHMS)]
EVERY_VERB = [
    *((*way, 2, torch.float32) for way in WAYS),
    *((name, "lanes", 4, torch.float32) for name in TRANSPORTS),
    ("host", "lanes", 1, torch.float32),
    ("host", "lanes", 2, torch.float64),
    ("cuda-aware", "lanes", 2, torch.bfloat16),
    ("nccl", "lanes", 2, torch.int64),
]


@pytest.mark.parametrize("case", EVERY_VERB, ids=lambda case: "-".join(map(str, case)))
def test_every_verb_gives_its_result(rig, case):
    name, algorithm, ranks_per_node, dtype = case
    one = rig(ranks_per_node)
    device, size, rank = one.device, COMM.size, COMM.rank
    collectives = one.use(name).replace(
        small_message_bytes=1 << 30 if algorithm == "gathered" else 0,
        choice=AlgorithmChoice(algorithm.replace("gathered", "lanes"), 1 << 10),
    )
    for numel in SIZES:
        bounds = uneven(numel, size)
        slot = collectives.slot(rank)
        mine = slice(bounds[slot], bounds[slot + 1])
        total = expected_sum(numel, dtype, size)
        tensor = device.tensor(numel, dtype)

        own, whole = torch.full_like(total, -1), slice(None)
        own[mine] = total[mine]
        ours, last = ramp(numel, dtype) + rank, ramp(numel, dtype) + size - 1
        for verb, given, filled, expected, part in (
            ("all_reduce", (), ours, total, whole),
            ("reduce_scatter", (bounds,), ours, total, mine),
            ("all_gather", (bounds,), own, total, whole),
            ("broadcast", (size - 1,), ours, last, whole),
        ):
            tensor.copy_(filled)
            getattr(collectives, verb)(tensor, *given).wait()
            device.synchronize()
            assert torch.equal(tensor[part], expected[part]), (numel, verb)


def uneven(numel, size):
    """Return bounds of shards of which the first is empty, if there are several."""
    return (0, *split(numel, size - 1)) if size > 1 else (0, numel)


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


@pytest.mark.parametrize("ranks_per_node", LAYOUTS)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_collective_runs_in_the_order_of_the_callers_stream(rig, name, ranks_per_node):
    """Only streams order the work: the host never waits for the device in between."""
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


def test_only_the_elements_a_verb_needs_are_copied(rig):
    one = rig(2, LateDevice())
    collectives, device = one.use("host"), one.device
    size, numel = COMM.size, 10_007
    tensor = device.tensor(numel)
    low, high = split(numel, size)[collectives.slot(COMM.rank) :][:2]
    root = COMM.rank == 0
    for start, to_host, to_device in (
        (collectives.all_reduce, numel, numel),
        (collectives.reduce_scatter, numel, high - low),
        (collectives.all_gather, high - low, numel - (high - low)),
        (collectives.broadcast, numel * root, numel * (not root)),
    ):
        before = device.to_host, device.to_device
        start(tensor).wait()
        device.synchronize()
        copied = device.to_host - before[0], device.to_device - before[1]
        assert copied == (to_host, to_device)


def test_slots_are_pinned_until_the_collectives_are_freed(rig):
    one = rig(2)
    assert one.device.pinned_bytes == DEPTH * BUFFER_BYTES
    stream = one.collectives.add_stream("another")
    assert one.device.pinned_bytes == 2 * DEPTH * BUFFER_BYTES
    one.collectives = stream = None  # noqa: F841 - it is freed
    assert one.device.pinned_bytes == 0


@pytest.mark.parametrize(
    ("name", "numel", "alike"),
    [("host", 100, True), ("host", 5003, False), ("cuda-aware", 9, False)],
)
def test_ranks_compare_how_a_tensor_of_a_device_travels_where_one_of_the_host_does_not(
    rig, name, numel, alike
):
    """A long one is staged in chunks, and MPI takes a small one in other steps."""
    one = rig(2)
    collectives, calls = one.use(name).replace(small_message_bytes=4096), []
    for tensor in (one.device.tensor(numel), torch.zeros(numel)):
        collectives.all_reduce(tensor).wait()
        one.device.synchronize()
        calls.append(one.progress.main.history[-1].signature)
    assert (calls[0] == calls[1]) == alike
    assert (calls[0].details == calls[1].details) == alike


# Selection.


def test_the_leader_of_each_node_probes_for_cuda_aware_mpi(rig):
    one = rig(1 if COMM.size < 3 else 2)
    probed = []
    one.select("cuda-aware", probe=lambda device: probed.append(device) or "")
    assert len(probed) == (one.world.local_rank == 0)


def test_a_transport_that_cannot_work_is_not_chosen_and_refused_on_all_ranks(rig):
    one, gpus = rig(COMM.size), ["the only one"] * COMM.size
    assert one.select("auto") == "nccl: each rank has a GPU of its own"
    assert one.collectives.transport == "nccl"
    shared = "ranks of a node share a GPU, which NCCL does not allow"
    assert one.select("auto", gpus=gpus).startswith(f"host; not nccl: {shared}")
    assert one.collectives.transport == "host"
    with pytest.raises(ValueError, match=r"transport nccl: ranks of a node share a GPU"):
        one.select("nccl", gpus=gpus)
    said = r"transport cuda-aware: rank 0: its MPI .*choose host"
    with pytest.raises(ValueError, match=said):
        one.select("cuda-aware", probe=lambda device: "its MPI crashed (SIGSEGV)")


def fail_on_rank_1(node, device):
    if node.rank == 1:
        raise RuntimeError("NCCL error: unhandled system error")
    return GlooGroup.__new__(GlooGroup)


def test_a_group_that_one_rank_cannot_make_is_refused_on_all_ranks(rig):
    one = rig(COMM.size)
    reason, used = "rank 1: NCCL error: unhandled system error", []

    def use(group, device):
        used.append(group)
        if COMM.rank == 1:
            raise RuntimeError("NCCL error: unhandled system error")

    assert one.select("auto", connect=fail_on_rank_1, use=use) == f"host; not nccl: {reason}"
    assert used == []  # the others would wait for rank 1
    assert one.select("auto", use=use) == f"host; not nccl: {reason}"
    assert len(used) == 1
    with pytest.raises(ValueError, match=f"transport nccl: {reason}; choose host"):
        one.select("nccl", connect=fail_on_rank_1)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files in memory, as NCCL's GPUs")
def test_the_store_of_a_node_is_shared_and_opens_no_port(rig):
    one = rig(COMM.size)
    before = own_ports()
    store, file = one.on_thread(lambda: shared_store(one.world._node))
    store.set(str(COMM.rank), b"of rank %d" % COMM.rank)
    assert store.get(str(COMM.size - 1)) == b"of rank %d" % (COMM.size - 1)
    assert own_ports() <= before
    COMM.Barrier()
    os.close(file)


def own_ports():
    """The sockets at which this process listens, by number."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            own |= {os.readlink(descriptor)}
    tables = (Path("/proc/net", name).read_text().splitlines() for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    return {fields[9] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own}


def test_a_store_that_one_rank_cannot_open_is_refused_on_all(rig, monkeypatch):
    one = rig(COMM.size)
    if COMM.rank == 1:
        monkeypatch.setattr(nccl, "_identity", lambda file: (0, 0))
    with pytest.raises(RuntimeError, match="cannot share a store: its file is another process's"):
        one.on_thread(lambda: shared_store(one.world._node))
    COMM.Barrier()


def test_closing_a_transport_shuts_its_group_down(rig):
    one = rig(COMM.size)
    groups = []

    def connect(node, device):
        groups.append(GlooGroup(node, device))
        return groups[-1]

    one.select("nccl", connect=connect)
    one.resources.close()
    assert [group.closed for group in groups] == [True]


def test_a_job_without_gpus_refuses_transports_of_gpus():
    with pytest.raises(ValueError, match="transport nccl: no rank of this job has a GPU"):
        mntrain.init(device="cpu", transport="nccl")
    with pytest.raises(ValueError, match="transport: Input should be 'auto', 'cuda-aware'"):
        mntrain.init(device="cpu", transport="ib")
    with mntrain.init(device="cpu", transport="host") as world:
        assert world.transport == ""


def test_a_rank_without_a_gpu_among_others_is_refused_on_all_ranks(monkeypatch):
    visible = ["a GPU"] if COMM.rank == 0 else []
    monkeypatch.setattr("mntrain.device.visible_gpus", lambda wanted: visible)
    with pytest.raises(mntrain.AgreedError, match="rank 1 sees no GPU, but others do"):
        mntrain.init()
