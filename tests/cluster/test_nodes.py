"""Emulated nodes are nodes: MPI finds them, their links carry the traffic, nothing outlives them.

The MPI library is the running environment's.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

SECONDS = 60  # for a job that takes one or two
MIB = 1 << 20

WHERE = """
import json, os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
mine = socket.gethostname(), node.size, node.rank, os.getcwd(), os.environ["TMPDIR"]
everyone = world.gather(mine)
if world.rank == 0:
    print(json.dumps(everyone))
"""

# Sends 8 MiB from one rank to another, which answers with one byte: seconds until that is here.
SEND = """
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
source, destination = map(int, sys.argv[1:])
data, answer = bytearray(8 << 20), bytearray(1)
world.Barrier()
start = MPI.Wtime()
if world.rank == source:
    world.Send(data, destination)
    world.Recv(answer, destination)
    print(MPI.Wtime() - start)
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


def output(cluster, program, *arguments):
    started = job(cluster, program, *arguments)
    return subprocess.check_output(**started, timeout=SECONDS)


@contextlib.contextmanager
def background(args, **options):
    """A process with its output in a pipe, which is gone at the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(args, **pipes, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def left(pid, *words):
    """What there is of the clusters of a process: interfaces, directories, processes."""
    interfaces = [name for name in os.listdir("/sys/class/net") if name.startswith(f"mn{pid}-")]
    directories = Path(tempfile.gettempdir()).glob(f"mntrain-nodes-{pid}-*")
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
        except OSError:  # it has ended meanwhile
            continue
        if int(process.name) != pid and any(w in command for w in (f"nodes-{pid}-", *words)):
            commands.append(command.replace("\0", " "))
    return interfaces, [str(directory) for directory in directories], commands


def processes():
    """The network namespace of every process, by its id and start time: ids are used again."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            start = (process / "stat").read_text().rpartition(")")[2].split()[19]
            found[process.name, start] = os.readlink(process / "ns/net")
    return found


def processes_in(cluster, *hosts):
    link = ["readlink", "/proc/self/ns/net"]
    inside = [subprocess.check_output([*cluster.enter(h), *link], text=True).strip() for h in hosts]
    return {process for process, network in processes().items() if network in inside}


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "ranks",
    [(2, 2), (1, 1, 1), *(pytest.param(r, marks=pytest.mark.thorough) for r in [(3, 1), (2,)])],
)
def test_mpi_finds_the_declared_ranks_on_each_node(make_cluster, ranks):
    with make_cluster(ranks=ranks, link=None) as cluster:
        found = json.loads(output(cluster, WHERE))
    places = [(host, size, rank) for host, size, rank, _, _ in found]
    hosts = zip(cluster.hosts, ranks, strict=True)
    assert places == [(host, size, rank) for host, size in hosts for rank in range(size)]
    assert {directory for *_, directory, _ in found} == {os.getcwd()}
    assert len({tmp for *_, tmp in found}) == len(ranks)


def test_traffic_crosses_the_link_between_nodes_only(make_cluster):
    with make_cluster(ranks=(2, 2), link=None) as cluster:
        for source, destination, across in [(0, 1, False), (3, 2, False), (0, 2, True)]:
            before = [cluster.sent(host) for host in cluster.hosts]
            output(cluster, SEND, source, destination)
            after = [cluster.sent(host) for host in cluster.hosts]
            sent = [b - a for a, b in zip(before, after, strict=True)]
            # Starting a job takes some 50 kB.
            assert sent[0] >= 8 * MIB if across else max(sent) < MIB


@pytest.mark.thorough
@pytest.mark.parametrize("ends", [(0, 1), (1, 0)], ids=["n1 to n2", "n2 to n1"])
def test_link_is_not_faster_than_declared(make_cluster, ends):
    with make_cluster(ranks=(1, 1), link="100mbit") as cluster:
        seconds = float(output(cluster, SEND, *ends))
    assert seconds >= 0.9 * 8 * MIB * 8 / 100e6


@pytest.mark.thorough
def test_job_stalls_while_a_link_is_down_and_goes_on_after(make_cluster, tmp_path):
    with (
        make_cluster(ranks=(1, 1), link=None) as cluster,
        background(**job(cluster, TALK, tmp_path / "stop")) as running,
    ):
        running.stdout.readline()
        cluster.link("n2", up=False)
        before = cluster.sent("n2")
        time.sleep(0.3)
        assert cluster.sent("n2") == before
        assert running.poll() is None
        cluster.link("n2", up=True)
        wait_until(lambda: cluster.sent("n2") > before + 10_000)
        (tmp_path / "stop").touch()
        assert running.wait(SECONDS) == 0


@pytest.mark.thorough
def test_losing_a_node_ends_the_job(make_cluster, tmp_path):
    with (
        make_cluster(ranks=(2, 2), link=None) as cluster,
        background(**job(cluster, TALK, tmp_path / "stop")) as running,
    ):
        library = running.stdout.readline().strip()
        cluster.crash("n2", soft=True)
        code = running.wait(SECONDS)
    # Open MPI 5.0.11 reports success: only what the ranks leave says whether a job was completed.
    assert code != 0 or library == "Open"


@pytest.mark.thorough
def test_crashed_node_is_gone_and_the_others_stay(make_cluster):
    with make_cluster(ranks=(1, 1), link=None) as cluster:
        sleeper = subprocess.Popen([*cluster.enter("n2"), "sleep", "1000"])
        inside = processes_in(cluster, "n2")
        assert inside
        cluster.crash("n2")
        assert sleeper.wait(SECONDS) != 0
        assert not inside & processes().keys()
        assert subprocess.check_output([*cluster.enter("n1"), "hostname"]) == b"n1\n"


@pytest.mark.thorough
def test_nodes_share_files_but_neither_memory_nor_names(make_cluster, tmp_path):
    machine = Path("/etc/hosts").read_bytes()
    with make_cluster(ranks=(1, 1), link=None) as cluster:
        one, two = (cluster.enter(host) for host in cluster.hosts)
        file, memory = tmp_path / "file", Path("/dev/shm", f"test-nodes-{os.getpid()}")
        subprocess.run([*one, "touch", file, memory], check=True)
        assert subprocess.run([*two, "test", "-e", file], check=False).returncode == 0
        assert subprocess.run([*two, "test", "-e", memory], check=False).returncode == 1
        assert not memory.exists()
        assert subprocess.check_output([*two, "hostname"]) == b"n2\n"
        assert b"n1" in subprocess.check_output([*two, "getent", "hosts", "n1"])
        assert Path("/etc/hosts").read_bytes() == machine


@pytest.mark.thorough
@pytest.mark.parametrize("failure", [None, KeyboardInterrupt])
def test_nothing_is_left_of_a_cluster(make_cluster, tmp_path, failure):
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(KeyboardInterrupt), make_cluster(ranks=(2, 1)) as cluster:
            started = job(cluster, TALK, tmp_path / "stop")
            running = stack.enter_context(background(**started))
            running.stdout.readline()
            inside = processes_in(cluster, "n1", "n2")
            assert len(inside) > 3  # the ranks, and what started them
            assert all(left(os.getpid()))
            if failure is not None:
                raise failure
        # A namespace without a process and without a name on disk does not exist.
        assert not inside & processes().keys()
        running.wait(SECONDS)
        assert left(os.getpid(), str(tmp_path)) == ([], [], [])
