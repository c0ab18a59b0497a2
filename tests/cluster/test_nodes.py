"""Emulated nodes are nodes: MPI finds them, and their links carry the traffic.

The MPI library is the running environment's.
"""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest
from waiting import until

pytestmark = pytest.mark.cluster

SECONDS = 200  # for a job that takes one or two
MIB = 1 << 20

# Prints where every rank is, and for how many seconds 8 MiB travel from one rank to another, which
# answers with one byte.
SEND = """
import json, os, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
mine = socket.gethostname(), node.size, node.rank, os.getcwd(), os.environ["TMPDIR"]
source, destination = map(int, sys.argv[1:])
data, answer = bytearray(8 << 20), bytearray(1)
everyone = world.gather(mine, source)
start = MPI.Wtime()
if world.rank == source:
    world.Send(data, destination)
    world.Recv(answer, destination)
    print(json.dumps([everyone, MPI.Wtime() - start]))
elif world.rank == destination:
    world.Recv(data, source)
    world.Send(answer, source)
"""

# Says so when it is under way, then adds up all ranks again and again until the file is there.
TALK = """
import pathlib, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
for step in range(100_000):
    if world.allreduce(pathlib.Path(sys.argv[1]).exists()):
        break
    if step == 10 and world.rank == 0:
        print(MPI.Get_library_version().split()[0], flush=True)
    time.sleep(0.01)
"""


def job(cluster, program, *arguments):
    command, environment = cluster.mpirun([sys.executable, "-c", program, *map(str, arguments)])
    return {"args": command, "env": environment, "text": True}


def send(cluster, source, destination):
    """Return the places of the ranks, the seconds, and the bytes that each node has sent."""
    before = [cluster.sent(host) for host in cluster.hosts]
    command = job(cluster, SEND, source, destination)
    found, seconds = json.loads(subprocess.check_output(**command, timeout=SECONDS))
    after = [cluster.sent(host) for host in cluster.hosts]
    return found, seconds, [b - a for a, b in zip(before, after, strict=True)]


@contextlib.contextmanager
def talking(cluster, stop):
    """A job that goes on until there is a file, and its MPI library; killed at the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(**job(cluster, TALK, stop), **pipes) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize(
    "ranks",
    [(3, 1), *(pytest.param(r, marks=pytest.mark.exhaustive) for r in [(2, 2), (1, 1, 1), (2,)])],
)
def test_mpi_finds_the_ranks_on_each_node_and_traffic_crosses_the_links_between(
    make_cluster, ranks
):
    with make_cluster(ranks=ranks, link=None) as cluster:
        # To the next rank, and to the last one. Starting a job takes some 50 kB.
        for source, destination in {(0, 1), (0, sum(ranks) - 1)}:
            found, _, sent = send(cluster, source, destination)
            across = found[source][0] != found[destination][0]
            assert sent[0] >= 8 * MIB if across else max(sent) < MIB
    places = [(host, size, rank) for host, size, rank, _, _ in found]
    hosts = zip(cluster.hosts, ranks, strict=True)
    assert places == [(host, size, rank) for host, size in hosts for rank in range(size)]
    assert {directory for *_, directory, _ in found} == {os.getcwd()}
    assert len({tmp for *_, tmp in found}) == len(ranks)


@pytest.mark.thorough
def test_a_link_is_not_faster_than_declared_and_a_job_waits_while_it_is_down(
    make_cluster, tmp_path
):
    with make_cluster(ranks=(1, 1), link="100mbit") as cluster:
        for ends in ((0, 1), (1, 0)):
            assert send(cluster, *ends)[1] >= 0.9 * 8 * MIB * 8 / 100e6
        with talking(cluster, tmp_path / "stop") as (running, _):
            cluster.link("n2", up=False)
            before = cluster.sent("n2")
            time.sleep(0.3)
            assert cluster.sent("n2") == before
            assert running.poll() is None
            cluster.link("n2", up=True)
            until(lambda: cluster.sent("n2") > before + 10_000)
            (tmp_path / "stop").touch()
            assert running.wait(SECONDS) == 0
