"""Emulated nodes on one machine: what `mpirun` sees is a cluster, what runs is a few processes.

    the machine                  switch (a namespace)       nodes (namespaces of every kind)
    mpirun, mn<pid>-0 ========== uplink -.
            10.x.y.254                   br0 -- v1 ======== eth0 in n1, 10.x.y.1
                                          '---- v2 ======== eth0 in n2, 10.x.y.2

Each node has its own interfaces, host name, process ids, /dev/shm, /sys and /etc/hosts; everything
else of the file system is shared, as on a cluster with a parallel file system. The bridge lies in a
namespace of its own because a firewall of the machine may drop what a bridge of its own forwards.

    python tests/cluster/nodes.py --ranks 2,2 --link 1gbit -- python -m mntrain
"""

import argparse
import contextlib
import fcntl
import functools
import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from namespaces import TOOLS, Namespaces, run

_DIRECTORY = "mntrain-nodes-"  # then the owner's pid: in the temporary directory
_INTERFACE = "mn"  # then the owner's pid: at most 15 characters in all


_serial = itertools.count()  # of the clusters of this process

# In place of ssh: [option]... HOST COMMAND..., the command joined and given to a shell as ssh does.
# It waits for ever, as ssh does, for a node whose link is down.
# TMPDIR is per node because prted names its directory after its pid, and pids repeat across nodes.
_AGENT = """#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
case $1 in
{cases}
*) echo "no node named $1" >&2; exit 255 ;;
esac
shift
while [ -e "$tmp.down" ]; do sleep 0.2; done
exec nsenter -t "$pid" -m -u -i -n -p -- env -C "$PWD" TMPDIR="$tmp" sh -c "$*"
"""


class Cluster:
    """Emulated nodes, up inside `with`. Needs root; `available()` says whether it can be had.

    ranks: how many ranks `mpirun` puts on each node, e.g. (2, 2) or (3, 1).
    link: the rate of each node's link, each way, as `tc` writes it, e.g. "1gbit", or a rate for
        each node; None: no limit.

    Several clusters can be up side by side. ValueError for ranks that make no cluster;
    RuntimeError where the system refuses.
    """

    def __init__(self, ranks: Sequence[int], link: str | Sequence[str] | None = "1gbit") -> None:
        if not 1 <= len(ranks) <= 253 or min(ranks) < 1:
            raise ValueError(
                f"ranks are {tuple(ranks)}: give 1 to 253 nodes at least one rank each, e.g. (2, 2)"
            )
        self.ranks = tuple(ranks)
        self.rates = [link] * len(ranks) if link is None or isinstance(link, str) else list(link)
        if len(self.rates) != len(ranks):
            raise ValueError(f"{len(ranks)} nodes have links of {link}: give one rate for each")
        self.hosts = [f"n{number}" for number in range(1, len(ranks) + 1)]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._directory = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY}{os.getpid()}-"))
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            hosts = self._directory / "hosts"
            hosts.touch()
            started: list[Namespaces] = []
            stack.callback(_end, started)
            # The switch lingers so that dying nodes can still close their connections to mpirun,
            # which does not notice otherwise.
            started.append(Namespaces("switch", hosts, linger=1))
            for name in self.hosts:
                started.append(Namespaces(name, hosts))  # noqa: PERF401 (a failure ends the first)
            self._switch, *nodes = started
            self._nodes = dict(zip(self.hosts, nodes, strict=True))
            self._uplink = f"{_INTERFACE}{os.getpid()}-{next(_serial)}"
            self._plug_machine(stack)
            self._plug_nodes()
            lines = ["127.0.0.1 localhost", f"{self._net}.254 {socket.gethostname()}"]
            lines += [f"{self._net}.{i} {host}" for i, host in enumerate(self.hosts, 1)]
            hosts.write_text("\n".join(lines) + "\n")
            self._agent = self._write_agent()
            stack.callback(_end, nodes)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def _plug_machine(self, stack: contextlib.ExitStack) -> None:
        """Join the switch and the machine, with an address in a network that nobody else uses."""
        peer = ["peer", "name", "uplink", "netns", str(self._switch.pid)]
        run(["ip", "link", "add", self._uplink, "type", "veth", *peer])
        stack.callback(run, ["ip", "link", "delete", self._uplink])
        run(["ip", "link", "set", self._uplink, "up"])
        self._switch.network(
            "ip",
            "link add br0 type bridge forward_delay 0",
            "link set br0 up",
            "link set uplink master br0 up",
        )
        with _alone():
            for attempt in range(64):
                number = (os.getpid() + 97 * attempt) % (1 << 15)
                self._net = f"10.{128 + number // 256}.{number % 256}"  # to 10.255.255
                if not run(["ip", "-4", "route", "show", "root", f"{self._net}.0/24"]):
                    run(["ip", "address", "add", f"{self._net}.254/24", "dev", self._uplink])
                    return
        raise RuntimeError("found no free network in 10.128.0.0/9")

    def _plug_nodes(self) -> None:
        """Join the nodes and the switch, and shape both ends of each link."""
        for i, (node, rate) in enumerate(zip(self._nodes.values(), self.rates, strict=True), 1):
            self._switch.network(
                "ip",
                f"link add v{i} type veth peer name eth0 netns {node.pid}",
                f"link set v{i} master br0 up",
            )
            node.network(
                "ip",
                f"address add {self._net}.{i}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            )
            if rate is not None:
                shape = f"root tbf rate {rate} burst 128kb latency 50ms"
                self._switch.network("tc", f"qdisc add dev v{i} {shape}")
                node.network("tc", f"qdisc add dev eth0 {shape}")

    def _write_agent(self) -> Path:
        cases = []
        for i, (host, node) in enumerate(self._nodes.items(), 1):
            tmp = self._directory / host
            tmp.mkdir()
            cases.append(f"{host}|{self._net}.{i}) pid={node.pid} tmp={shlex.quote(str(tmp))} ;;")
        agent = self._directory / "agent"
        agent.write_text(_AGENT.format(cases="\n".join(cases)))
        agent.chmod(0o755)
        return agent

    def enter(self, host: str) -> list[str]:
        """The command line to put before a command to run it in the node, in this directory."""
        directory = self._directory / host
        return [*self._nodes[host].enter(), "env", "-C", os.getcwd(), f"TMPDIR={directory}"]

    def pid(self, host: str) -> int:
        """The node's first process, as the machine counts."""
        return self._nodes[host].pid

    def link(self, host: str, up: bool) -> None:
        """Plug or unplug the node's cable: its connections stall, and go on when it is back."""
        index = self.hosts.index(host) + 1
        self._switch.network("ip", f"link set v{index} {'up' if up else 'down'}")
        down = self._directory / f"{host}.down"
        down.unlink(missing_ok=True) if up else down.touch()

    def crash(self, host: str, *, soft: bool = False) -> None:
        """End all processes of the node at once, as a loss of power does; it does not come back.

        Peers hear nothing, for the cable goes first; soft leaves it, and the dying node's kernel
        closes the connections. Returns when the last process is gone.
        """
        if not soft:
            self.link(host, up=False)
        _end([self._nodes[host]])

    def stop(self, host: str) -> None:
        """Stop all processes of the node, whose kernel still acknowledges what it receives."""
        own = os.readlink(f"/proc/{self.pid(host)}/ns/pid")
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.readlink(entry / "ns" / "pid") == own:
                    os.kill(int(entry.name), signal.SIGSTOP)

    def sent(self, host: str) -> int:
        """Return how many bytes the node has put on its link, headers included."""
        devices = Path(f"/proc/{self.pid(host)}/net/dev").read_text()
        return int(devices.partition("eth0:")[2].split()[8])  # after eight figures of receiving

    def mpirun(
        self,
        command: Sequence[str],
        *,
        bin: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """The command line and environment that run `command` with the declared ranks per node.

        bin: the directory to look for `mpirun` in before PATH, else the running Python's.
        env: variables for `mpirun` and the ranks besides this process's own.

        World ranks fill the nodes in order. RuntimeError where there is no `mpirun`, or one that
        is neither MPICH's nor Open MPI's.
        """
        path = os.pathsep.join([str(bin or Path(sys.executable).parent), os.environ["PATH"]])
        mpirun = shutil.which("mpirun", path=path)
        if mpirun is None:
            raise RuntimeError(f"no mpirun in {path}")
        version = run([mpirun, "--version"])
        if "HYDRA" in version:
            options, settings = self._mpich()
        elif "Open MPI" in version:
            options, settings = self._open_mpi()
        else:
            raise RuntimeError(f"{mpirun} is neither MPICH's nor Open MPI's: {version}")
        environment = {**os.environ, "PATH": path, **settings, **(env or {})}
        return [mpirun, *options, "-n", str(sum(self.ranks)), *command], environment

    def _mpich(self) -> tuple[list[str], dict[str, str]]:
        # By address: hydra would ask the machine's name server for the names.
        hosts = ",".join(f"{self._net}.{i}:{n}" for i, n in enumerate(self.ranks, 1))
        options = ["-launcher", "ssh", "-launcher-exec", str(self._agent)]
        options += ["-localhost", f"{self._net}.254", "-hosts", hosts]
        # Nothing but TCP between nodes; within a node MPICH has its own shared memory.
        return options, {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}

    def _open_mpi(self) -> tuple[list[str], dict[str, str]]:
        hosts = ",".join(f"{host}:{n}" for host, n in zip(self.hosts, self.ranks, strict=True))
        options = ["--prtemca", "plm_ssh_agent", str(self._agent)]
        options += ["--prtemca", "oob_tcp_if_include", f"{self._net}.0/24", "--host", hosts]
        options += ["--map-by", "slot:oversubscribe", "--bind-to", "none"]
        return options, {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "OMPI_MCA_osc": "^ucx",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # the ranks outnumber the cores
            "OMPI_MCA_btl_tcp_eager_limit": str(4 << 20),  # as mntrain has it (mntrain/comm/mpi.py)
            "TMPDIR": str(self._directory),  # mpirun's own; a killed one leaves its files
        }


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock among all clusters of the machine that are choosing their network."""
    number = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _end(nodes: Sequence[Namespaces]) -> None:
    for node in nodes:
        node.kill()
    for node in nodes:
        node.wait()


@functools.cache
def available() -> str | None:
    """Return why emulated nodes cannot be made here, or None where they can."""
    if os.geteuid() != 0:
        return "emulated nodes need root"
    missing = [tool for tool in ("ip", "tc", *TOOLS) if shutil.which(tool) is None]
    if missing:
        return f"emulated nodes need {', '.join(missing)} on PATH"
    try:
        with Cluster(ranks=(1,), link="1gbit"):
            return None
    except RuntimeError as refusal:
        return str(refusal)


def main() -> int:
    """Bring nodes up, run a command under `mpirun` on them, take them down; its exit code."""
    parser = argparse.ArgumentParser(description="Run a command under mpirun on emulated nodes.")
    parser.add_argument(
        "--ranks",
        default=[2, 2],
        type=lambda text: [int(number) for number in text.split(",")],
        metavar="N,N,...",
        help="ranks of each node (default: 2,2)",
    )
    parser.add_argument("--link", default="1gbit", metavar="RATE", help="as tc has it, or none")
    parser.add_argument("command", nargs="+", help="after --, e.g. -- python -m mntrain")
    options = parser.parse_args()
    if (reason := available()) is not None:
        parser.error(reason)
    with Cluster(options.ranks, None if options.link == "none" else options.link) as cluster:
        command, environment = cluster.mpirun(options.command)
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
