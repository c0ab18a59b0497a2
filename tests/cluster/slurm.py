"""A real Slurm on emulated nodes: a head node with the controller, and nodes that run jobs.

    head      munged, slurmctld, and every command given to Slurm: sbatch, scancel, scontrol, ...
    n1, n2    slurmd; the partition `main`, and `urgent`, whose jobs requeue those of `main`

A lost node is noticed after some 10 s, and a requeued job starts 6 s later.

    python tests/cluster/slurm.py -- srun --nodes 2 hostname
"""

import argparse
import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

import nodes
from namespaces import Namespaces, run

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
HEAD = "head"
_UP = 30.0  # seconds until daemons that are not ready are reported

# Of these some are beyond their usual reach: more CPUs than the machine has (config_overrides), and
# a credential that expires after 5 s, for which a requeued job waits before it starts again.
_CONF = """
ClusterName=emulated
SlurmctldHost={head}({net}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={here}/munge/socket,cred_expire=5
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
# mpi/pmix names a directory after the job, and all nodes share the machine's /tmp.
TmpFS={here}/tmp-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={here}/task-prolog
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=9
SlurmctldTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=90
UnkillableStepTimeout=30
InactiveLimit=0
MinJobAge=300
WaitTime=0
CompleteWait=0
NodeName=DEFAULT CPUs={cpus} CoresPerSocket={cpus} RealMemory=1000 State=UNKNOWN
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=90
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
"""

# States that a job leaves for another one.
_PASSING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "STOPPED"}


class SlurmCluster(nodes.Cluster):
    """A cluster of Slurm, up inside `with`. Needs root and Slurm's daemons: see `available()`.

    nodes: how many run jobs, named n1, n2, ...; cpus: of each, and they may be more than there are.
    Slurm gives a node up after 9 seconds of silence, and a job has 90 to end once it is asked to:
    the machine may be busy.

    Everything runs in the namespaces of the nodes, so nothing outlives the owner: see nodes.py.
    RuntimeError, with the daemons' logs, where they do not come up.
    """

    def __init__(self, nodes: int = 2, cpus: int = 4) -> None:
        super().__init__(ranks=[1] * (nodes + 1), link=None)
        self.hosts = [HEAD, *self.hosts[:-1]]
        self._cpus = cpus

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        here = self._slurm = self._directory / "slurm"
        (here / "munge").mkdir(parents=True)
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._exit.callback(self._reap)
        self.environment = {"SLURM_CONF": str(here / "slurm.conf"), **self._settings()}
        self._write_files()
        self._show_pmix(HEAD)  # srun loads it too
        key, socket = here / "munge" / "key", here / "munge" / "socket"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        words = ["--foreground", "--force", f"--key-file={key}", f"--socket={socket}"]
        words += [f"--{file}-file={here / 'munge' / file}" for file in ("pid", "log", "seed")]
        self._daemon(HEAD, "munged", *words)
        _until(socket.exists, "munged made no socket", self.logs)
        self._daemon(HEAD, "slurmctld", "-D", "-c")
        for host in self.hosts[1:]:
            self._start_slurmd(host)
        self.wait_idle(self.hosts[1:])

    def _write_files(self) -> None:
        here = self._slurm
        names = [
            f"NodeName={host} NodeHostname={host} NodeAddr={self._net}.{i}"
            for i, host in enumerate(self.hosts, 1)
            if host != HEAD
        ]
        facts = {"cpus": self._cpus, "head": HEAD, "net": self._net, "nodes": "\n".join(names)}
        (here / "slurm.conf").write_text(_CONF.format(here=here, **facts))
        # No cgroup is used, but slurmd loads a plugin anyway, and a node has none to detect.
        (here / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        prolog = here / "task-prolog"
        prolog.write_text(f'#!/bin/sh\necho "export TMPDIR={self._directory}/$SLURMD_NODENAME"\n')
        prolog.chmod(0o755)

    def _settings(self) -> dict[str, str]:
        """Settings of each MPI library for these nodes."""
        settings = {**self._mpich()[1], **self._open_mpi()[1]}
        del settings["TMPDIR"]  # each node has its own
        return settings | {"PRTE_MCA_hwloc_default_binding_policy": "none"}

    def _daemon(self, host: str, *command: str) -> None:
        with (self._slurm / f"{command[0]}-{host}.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*self.enter(host), *command],
                    env=os.environ | {"SLURM_CONF": str(self._slurm / "slurm.conf")},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _start_slurmd(self, host: str) -> None:
        (self._slurm / f"tmp-{host}").mkdir(exist_ok=True)
        self._show_pmix(host)
        self._daemon(host, "slurmd", "-D")

    def _show_pmix(self, host: str) -> None:
        """Let mpi/pmix find the library by a name that Debian has in libpmix-dev alone.

        In the node's view of the file system only: the machine stays as it is.
        """
        for there in Path("/usr/lib").glob("*/pmix2/lib"):
            if (there / "libpmix.so").exists():
                continue
            named = self._slurm / "pmix" / there.parts[3]
            if not named.exists():
                shutil.copytree(there, named, symlinks=True)
                (named / "libpmix.so").symlink_to("libpmix.so.2")
            run([*self.enter(host), "mount", "--bind", str(named), str(there)])

    def _reap(self) -> None:
        for node in self._nodes.values():
            node.kill()
        for daemon in self._daemons:
            daemon.wait()

    def command(self, *words: str, cwd: Path | None = None) -> list[str]:
        """The command line that runs `words` on the head node, in this directory or in `cwd`."""
        place = [] if cwd is None else ["env", "-C", str(cwd)]
        return [*self.enter(HEAD), *place, *words]

    def call(
        self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Run a command of Slurm on the head node: its output, or RuntimeError with what it said.

        env: variables besides this process's own and the cluster's `environment`.
        """
        done = subprocess.run(
            self.command(*words, cwd=cwd),
            env=os.environ | self.environment | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(words)} failed: {done.stderr.strip()}")
        return done.stdout

    def submit(
        self,
        script: Path,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> str:
        """Give a batch script to sbatch, with its options: the job's id."""
        words = ["sbatch", "--parsable", *options, str(script), *arguments]
        return self.call(*words, cwd=cwd, env=env).strip()

    def facts(self, job: str) -> dict[str, str]:
        """Facts of `scontrol show job`: JobState, Restarts, NodeList, ExitCode and the like."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        """The job's state, e.g. PENDING, RUNNING, COMPLETED, FAILED, NODE_FAIL."""
        return self.facts(job)["JobState"]

    def wait(self, job: str, states: Collection[str] = ("COMPLETED",), timeout: float = 250) -> str:
        """Wait until the job is in one of the states, and return it.

        RuntimeError with what Slurm says of it when it has ended in another, or is late.
        """
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in states:
            late = time.monotonic() > deadline
            if late or state not in _PASSING:
                told = "\n".join(f"{key}={value}" for key, value in self.facts(job).items())
                why = f"after {timeout:g} s" if late else "and has ended"
                raise RuntimeError(
                    f"job {job} is {state} {why}, not {' or '.join(states)}:\n{told}"
                )
            time.sleep(0.25)
        return state

    def signal(self, job: str, name: str, *options: str) -> None:
        """Signal the tasks; with "--batch" the batch shell alone, with "--full" both."""
        self.call("scancel", f"--signal={name}", *options, job)

    def cancel(self, *jobs: str) -> None:
        """End jobs, as users do; those that have ended are no matter."""
        self.call("scancel", "--quiet", *jobs)

    def wait_idle(self, hosts: Sequence[str]) -> None:
        """Wait until jobs can start on the nodes; RuntimeError, with the logs, when they cannot."""
        words = ["sinfo", "--noheader", "--partition=main", "--Node", "--states=idle"]

        def idle() -> bool:
            with contextlib.suppress(RuntimeError):  # the controller is not up yet
                up = self.call(*words, "--format=%N %T").split()
                return all(host in up for host in hosts) and not any("*" in word for word in up)
            return False

        _until(idle, f"{' '.join(hosts)} did not become idle", self.logs)

    def boot(self, host: str) -> None:
        """Start a node that `crash` has ended, with the files that it had on its disk.

        It is idle soon: see `wait_idle`.
        """
        index = self.hosts.index(host) + 1
        with contextlib.suppress(RuntimeError):  # the kernel has taken it with the dead node
            self._switch.network("ip", f"link delete v{index}")
        node = self._nodes[host] = Namespaces(host, self._directory / "hosts")
        self._exit.callback(node.wait)
        self._exit.callback(node.kill)
        self._switch.network(
            "ip",
            f"link add v{index} type veth peer name eth0 netns {node.pid}",
            f"link set v{index} master br0 up",
        )
        node.network(
            "ip",
            f"address add {self._net}.{index}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
        )
        self._start_slurmd(host)

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        texts = []
        for log in sorted(self._slurm.rglob("*log")):
            lines = log.read_text(errors="replace").splitlines()[-20:]
            texts.append("\n".join([f"== {log.name}", *lines]))
        return "\n".join(texts)


def _until(happened: Callable[[], bool], otherwise: str, logs: Callable[[], str]) -> None:
    deadline = time.monotonic() + _UP
    while not happened():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} within {_UP:g} s:\n{logs()}")
        time.sleep(0.05)


@functools.cache
def available() -> str | None:
    """Return why a cluster of Slurm cannot be had here, or None where it can."""
    missing = [daemon for daemon in DAEMONS if shutil.which(daemon) is None]
    if missing:
        return f"Slurm on emulated nodes needs {', '.join(missing)} on PATH"
    return nodes.available()


def main() -> int:
    """Bring the cluster up, run a command on its head node, take it down; the command's code."""
    parser = argparse.ArgumentParser(description="Run a command on an emulated cluster of Slurm.")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--cpus", type=int, default=4, metavar="N", help="a node (default: 4)")
    parser.add_argument("command", nargs="*", help="after --, e.g. -- bash")
    options = parser.parse_args()
    if not options.command:
        parser.error("give a command after --")
    if (reason := available()) is not None:
        parser.error(reason)
    # Ctrl-C at the terminal is for the command, which has it too.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda number, frame: sys.exit(128 + number))
    with SlurmCluster(options.nodes, options.cpus) as cluster:
        command = cluster.command(*options.command)
        code = subprocess.call(command, env=os.environ | cluster.environment)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
