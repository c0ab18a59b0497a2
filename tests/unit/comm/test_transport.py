"""Transports of devices' tensors: what goes through slots, and what a child process finds out."""

import re
import sys

import pytest

from mntrain.comm.staging import chunks
from mntrain.comm.topology import Topology
from mntrain.transport import probe, selection
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


# The child that may crash: real ones, of which some are made to.


def test_an_mpi_that_takes_the_memory_passes():
    """With memory of the host, which every MPI takes; each rank starts a world of its own."""
    assert probe.takes_device_memory("cpu") == ""


def child(code):
    return (sys.executable, "-c", f"import os, signal, sys, time\n{code}")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "print('64 right', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            r"crashed \(SIGSEGV\) at 4096 bytes",
        ),
        ("os.abort()", r"crashed \(SIGABRT\) at 64 bytes"),
        ("print('64 right'); print('4096 wrong')", "arrives wrong, at 4096 bytes"),
        ("print('64 right')", "ended before all was tried"),
        ("sys.exit('no such device')", "failed at 64 bytes: no such device"),
        ("print('64 right', flush=True); time.sleep(60)", "hung at 4096 bytes"),
    ],
)
def test_what_becomes_of_a_child_is_said(code, why):
    found = probe.takes_device_memory("cuda:0", child(code), seconds=3.0)
    assert re.search(why, found), found


def test_a_child_that_cannot_start_is_no_error():
    assert "could not be tried" in probe.takes_device_memory("cuda:0", ("/nowhere/python",))


@pytest.mark.parametrize(
    ("nodes", "gpus", "why"),
    [
        (((0, 1), (2, 3)), ["a", "b", "a", "b"], ""),  # names of other hosts may be the same
        (((0, 1), (2, 3)), ["a", "b", "c", "c"], "rank 2 and rank 3 share a GPU"),
        (((0, 1), (2, 3)), ["a", "b", "c", ""], "rank 3 has no GPU"),
        (((0, 1), (2,)), ["a", "b", "c"], "different numbers of ranks"),
        (((0,), (1,)), ["a", "b"], "one rank a node"),
    ],
)
def test_where_nccl_can_be_used(nodes, gpus, why):
    said = selection.why_no_nccl(Topology(nodes), gpus)
    assert bool(said) == bool(why)
    assert why in said


def test_host_stays_unless_another_is_faster_by_more_than_noise():
    assert selection.fastest({"host": 1.0, "cuda-aware": 0.97}) == "host"
    assert selection.fastest({"host": 1.0, "cuda-aware": 0.9, "nccl": 0.5}) == "nccl"
    assert selection.fastest({"host": 1.0}) == "host"


def test_the_line_has_the_times_and_the_reasons():
    line = selection.line("nccl", {"host": 0.02, "nccl": 0.01}, {"cuda-aware": "it crashed"})
    assert line == "nccl (host 20.0 ms, nccl 10.0 ms a bucket); not cuda-aware: it crashed"
    assert selection.line("host", {"host": 0.02}, {}) == "host"
