"""Transports of device tensors: staging chunks, the probe process, the rule for NCCL."""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from mntrain.comm.staging import chunks
from mntrain.comm.topology import Topology
from mntrain.comm.transport import (
    child_environment,
    probe_device_memory,
    send_to_self,
    why_not_nccl,
)
from zero.layout import split


def test_chunks_hold_every_element_once_and_fit():
    for numel, shards, whole in product([0, 1, 999, 1024, 4097], [1, 3, 7], [True, False]):
        some_empty = (0, *split(numel, shards - 1)) if shards > 1 else (0, numel)
        check_chunks(numel, shards, (split(numel, shards), some_empty), whole=whole)


def check_chunks(numel, shards, several, *, whole):
    for bounds in several:
        cut = chunks(bounds, 4, 1024, whole=whole)
        seen = [i for spans in cut for low, high in spans for i in range(low, high)]
        assert sorted(seen) == list(range(numel))
        for spans in cut:
            assert 4 * sum(high - low for low, high in spans) <= 1024
            assert len(spans) == (1 if whole else shards)


# The probe process: real children, some of which are made to crash.


@pytest.mark.thorough
def test_an_mpi_that_can_use_the_memory_passes():
    """Host memory, which every MPI can use; each rank starts a world of its own."""
    assert probe_device_memory("cpu") == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "print('64', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            "fails with device memory, after messages of 64 bytes: exit code -11",
        ),
        ("os.abort()", "after messages of no bytes: exit code -6"),
        ("print('64')", "after messages of 64 bytes: exit code 0, no message"),
        ("sys.exit('no such device')", "exit code 1, no such device"),
        ("print('64', flush=True); time.sleep(60)", "timed out after 0.5 seconds"),
    ],
)
def test_the_failure_of_a_probe_is_explained(code, reason):
    child = (sys.executable, "-c", f"import os, signal, sys, time\n{code}")
    timeout_s = 0.5 if "sleep" in code else 60.0
    assert reason in probe_device_memory("cuda:0", child, timeout_s)
    assert "No such file" in probe_device_memory("cuda:0", ("/nowhere/python",))


def test_a_message_that_arrives_with_other_bytes_fails_the_probe(monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda one, other: False)
    with pytest.raises(SystemExit, match="a message of 64 bytes arrives with other bytes"):
        send_to_self(torch.device("cpu"))


def test_the_probe_process_does_not_inherit_the_launchers_variables():
    launched = {"SLURM_NTASKS": "4", "PMI_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}
    environment = child_environment(
        {**os.environ, **launched, "OMPI_MCA_btl": "self", "HOME": "/h"}
    )
    assert "SLURM_NTASKS" not in environment
    launcher = ("PMI", "OMPI_COMM", "OMPI_MCA_ess")
    assert not [name for name in environment if name.startswith(launcher)]
    assert (environment["OMPI_MCA_btl"], environment["HOME"]) == ("self", "/h")
    size = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    child = subprocess.run(
        [sys.executable, "-c", size], env=environment, capture_output=True, text=True, check=True
    )
    assert child.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("nodes", "gpus", "reason"),
    [
        (((0, 1), (2, 3)), ["a", "b", "a", "b"], ""),  # GPUs of two hosts may have one name
        (((0, 1), (2, 3)), ["a", "b", "c", "c"], "ranks of a node share a GPU"),
        (((0, 1), (2,)), ["a", "b", "c"], "different numbers of ranks"),
        (((0,), (1,)), ["a", "b"], "one rank only"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank_and_equal_nodes(nodes, gpus, reason):
    found = why_not_nccl(Topology(nodes), gpus)
    assert bool(found) == bool(reason)
    assert reason in found
