"""Transports of device tensors: staging chunks, the probe process, the rule for NCCL."""

import re
import sys

import pytest

from mntrain.comm.probe_process import probe_device_memory
from mntrain.comm.staging import chunks
from mntrain.comm.topology import Topology
from mntrain.comm.transport import why_not_nccl
from zero.layout import split


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("numel", [0, 1, 999, 1024, 4097])
@pytest.mark.parametrize("shards", [1, 3, 7])
def test_chunks_hold_every_element_once_and_fit(numel, shards, whole):
    for bounds in (
        split(numel, shards),
        (0, *split(numel, shards - 1)) if shards > 1 else (0, numel),
    ):
        cut = chunks(bounds, 4, 1024, whole=whole)
        seen = [i for chunk in cut for low, high in chunk.runs for i in range(low, high)]
        assert sorted(seen) == list(range(numel))
        for chunk in cut:
            assert 4 * chunk.bounds[-1] <= 1024
            assert len(chunk.runs) == (1 if whole else shards)
            if not whole:
                for (low, high), start, stop in zip(
                    chunk.runs, bounds[:-1], bounds[1:], strict=True
                ):
                    assert start <= low <= high <= stop


# The probe process: real children, some of which are made to crash.


def test_an_mpi_that_can_use_the_memory_passes():
    """Host memory, which every MPI can use; each rank starts a world of its own."""
    assert probe_device_memory("cpu") == ""


def child(code):
    return (sys.executable, "-c", f"import os, signal, sys, time\n{code}")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "print('64 right', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            r"crashed with device memory \(SIGSEGV\) at 4096 bytes",
        ),
        ("os.abort()", r"crashed with device memory \(SIGABRT\) at 64 bytes"),
        ("print('64 right'); print('4096 wrong')", "corrupts messages in .* of 4096 bytes"),
        ("print('64 right')", "ended before the probe was complete"),
        ("sys.exit('no such device')", "failed with device memory at 64 bytes: no such device"),
        ("print('64 right', flush=True); time.sleep(60)", "hung with device memory at 4096 bytes"),
    ],
)
def test_the_failure_of_a_probe_is_explained(code, reason):
    found = probe_device_memory("cuda:0", child(code), timeout_s=3.0)
    assert re.search(reason, found), found


def test_a_probe_that_cannot_start_is_a_reason_not_an_error():
    assert "cannot start" in probe_device_memory("cuda:0", ("/nowhere/python",))


@pytest.mark.parametrize(
    ("nodes", "gpus", "reason"),
    [
        (((0, 1), (2, 3)), ["a", "b", "a", "b"], ""),  # GPUs of two hosts may have one name
        (((0, 1), (2, 3)), ["a", "b", "c", "c"], "rank 2 and rank 3 share a GPU"),
        (((0, 1), (2, 3)), ["a", "b", "c", ""], "rank 3 has no GPU"),
        (((0, 1), (2,)), ["a", "b", "c"], "different numbers of ranks"),
        (((0,), (1,)), ["a", "b"], "one rank only"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank_and_equal_nodes(nodes, gpus, reason):
    found = why_not_nccl(Topology(nodes), gpus)
    assert bool(found) == bool(reason)
    assert reason in found
