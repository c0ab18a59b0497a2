"""The kinds of faults, and what a job must say of each."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from launch import is_open_mpi
from nodes import available


class Kind(NamedTuple):
    """A report that must appear on stderr, as a regular expression with {rank} for the faulty rank.

    `waits`: whether the report comes when ranks have waited for the time limit; else at once.
    `completes`: whether the job goes on to its end. `code`: the exit code of the job. `dies`:
    whether the rank's process ends without a word. `script`: of this folder. `nodes`: whether it
    needs emulated nodes. `shell`: what is done first in a mount namespace of the job. `most`: the
    ranks of the job at most.
    """

    report: str
    waits: bool = False
    completes: bool = False
    code: int = 1
    dies: bool = False
    script: str = "fault.py"
    nodes: bool = False
    shell: str = ""
    most: int = 4

    @property
    def moves(self) -> bool:
        """True if it may happen on emulated nodes, too: there each node starts its ranks."""
        of_a_host = self.shell or self is WRONG_MPIRUN or self.script != "fault.py"
        return not (of_a_host or self.most < 4 or self is OUT_OF_MEMORY)


WAITED = r"error: rank.* waited \d+ s for rank {rank} on "
# Nobody sees the state of a rank's process that is alone on its node.
STOPPED = r"(.*\n)*.*(stopped by a signal|its process is stopped, or held in C code)"
LOST = r"error: rank {rank} on \S+ is lost: its process has ended"
NODE_LOST = r"error: ranks? (\d+, )*{rank}\b[ ,\d]* on n\d (is|are) lost"
FAILED = r"mntrain: rank {rank} of \d+ on \S+ failed:\n(.*\n)*.*a bug of one rank"
WORKER = r"mntrain: rank {rank} of \d+ on \S+ failed:\n(.*\n)*.*DataLoader worker .* is killed"
DISAGREE = r"error: ranks (disagree|wait for each other)(.*\n)*  rank {rank}: "
DIFFERS = r"%s differs between ranks: .*ranks? (\d+, )*{rank}\b"
UNSEEN = r"error: (rank {rank}|ranks? 1\b.*): .* is not the folder that rank 0 sees"
BOUND = r"warning: 2 ranks share the 1 core of \S+ that they are bound to"
JOB = {"script": "job_fault.py"}
REFUSED = {**JOB, "code": 2}
OUT_OF_MEMORY = Kind(LOST, dies=True)  # in a cgroup, which emulated nodes do not see
WRONG_MPIRUN = Kind("error: .* does not know: ")
SMALL_SHM = "mount -t tmpfs -o size=1m tmpfs /dev/shm"

KINDS = {
    "none": Kind("", completes=True),
    "hang": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in <lambda>", waits=True),
    "spins": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in spin", waits=True),
    "never leaves": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in train", waits=True),
    "late to a broadcast": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in extra_collectives", waits=True),
    "stopped": Kind(WAITED + STOPPED, waits=True),
    "held": Kind(WAITED + r"(.*\n)*.*held in C code", waits=True),
    "killed": Kind(LOST, dies=True),
    "segfault": Kind(LOST, dies=True),
    "vanishes": Kind(LOST, dies=True),
    "raises": Kind(FAILED),
    "memory": Kind(FAILED),
    "raises in backward": Kind(FAILED),
    "raises after backward": Kind(FAILED),
    "exits": Kind(r"rank {rank} of \d+ on \S+ left the job with exit code 3", code=3),
    "exits with 0": Kind(DISAGREE),
    "dead worker": Kind(WORKER),
    "stuck worker": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in batch", waits=True),
    "out of memory": OUT_OF_MEMORY,
    "continues": Kind(DISAGREE),
    "stops early": Kind(DISAGREE),
    "another shape": Kind(DISAGREE),
    "another dtype": Kind(DISAGREE),
    "another order": Kind(DISAGREE),
    "one more": Kind(DISAGREE),
    "nan": Kind(r"gradient.*(nan|not finite).*{rank}"),
    "slow": Kind(r"warning: .*for rank {rank} on ", completes=True),
    "slow worker": Kind(r"warning: .*for rank {rank} on ", completes=True),
    "paused": Kind(r"", completes=True),
    "clock shifted": Kind(r"warning: the clock of \S+ \(rank \d\) is 1\d\d\.\d s", completes=True),
    "same core": Kind(BOUND, completes=True, most=2),
    "other option": Kind(DIFFERS % "--optim.lr", **REFUSED),
    "other task": Kind(DIFFERS % r"the source own_task\.py", **REFUSED),
    "other data": Kind(r"error: the samples of the training data on ranks? \d.* differ", **REFUSED),
    "other version": Kind(DIFFERS % "torch", **REFUSED),
    "read-only run directory": Kind(r"error: .*Read-only file system", **REFUSED),
    "run directory not shared": Kind(UNSEEN, **REFUSED),
    "full disk": Kind(r"error: .* was not saved: .*No space left on device", **JOB),
    "full shared memory": Kind("/dev/shm has 1.0 MB free, and MPI needs", shell=SMALL_SHM),
    "wrong mpirun": WRONG_MPIRUN,
    "node lost": Kind(NODE_LOST, nodes=True),
    "link cut": Kind(NODE_LOST, nodes=True),
    "link cut for 30 s": Kind(NODE_LOST, nodes=True),
    "link cut for 3 s": Kind("", completes=True, nodes=True),
}

NAMES = tuple(KINDS)

ROOT = [
    "read-only run directory",
    "run directory not shared",
    "full disk",
    "full shared memory",
]
MISSING = {
    "root": ROOT if os.geteuid() else [],
    "a cgroup of version 1": []
    if os.access(Path("/sys/fs/cgroup/memory/cgroup.procs"), os.W_OK)
    else ["out of memory"],
    "emulated nodes": [name for name, kind in KINDS.items() if kind.nodes] if available() else [],
    # Open MPI does without /dev/shm; its mpirun ends the job itself when the agent of a node ends.
    "MPICH": ["full shared memory", "node lost"] if is_open_mpi() else [],
    "two MPI libraries": [] if shutil.which("mpirun.openmpi") else ["wrong mpirun"],
}
for names in MISSING.values():
    for name in names:
        KINDS.pop(name, None)
