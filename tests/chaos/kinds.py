"""The kinds of faults, and what a job must say of each."""

import os
import shutil
from typing import NamedTuple

from launch import is_open_mpi
from nodes import available


class Sign(NamedTuple):
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
        return not (of_a_host or self.most < 4)


WAITED = r"error: rank.* waited \d+ s for rank {rank} on "
# Nobody sees the state of a rank's process that is alone on its node.
STOPPED = r"(.*\n)*.*(stopped by a signal|its process is stopped, or held in C code)"
LOST = r"error: rank {rank} on \S+ is lost: its process has ended"
NODE_LOST = r"error: ranks? (\d+, )*{rank}\b[ ,\d]* on n\d (is|are) lost"
FAILED = r"mntrain: rank {rank} of \d+ on \S+ failed:\n(.*\n)*.*a bug of one rank"
ENDED = r"DataLoader worker .* (is killed|exited unexpectedly)"  # as torch notices it
WORKER = r"mntrain: rank {rank} of \d+ on \S+ failed:\n(.*\n)*.*" + ENDED
DISAGREE = r"error: ranks (disagree|wait for each other)(.*\n)*  rank {rank}: "
DIFFERS = r"%s differs between ranks: .*ranks? (\d+, )*{rank}\b"
UNSEEN = r"error: (rank {rank}|ranks? 1\b.*): .* is not the folder that rank 0 sees"
BOUND = r"warning: 2 ranks share the 1 core of \S+ that they are bound to"
JOB = {"script": "job_fault.py"}
REFUSED = {**JOB, "code": 2}
WRONG_MPIRUN = Sign("error: .* does not know: ")
SMALL_SHM = "mount -t tmpfs -o size=1m tmpfs /dev/shm"

KINDS = {
    "none": Sign("", completes=True),
    "hang": Sign(WAITED + r"(.*\n)*.*fault.py:\d+ in <lambda>", waits=True),
    "stopped": Sign(WAITED + STOPPED, waits=True),
    "held": Sign(WAITED + r"(.*\n)*.*held in C code", waits=True),
    "killed": Sign(LOST, dies=True),
    "raises": Sign(FAILED),
    "exits": Sign(r"rank {rank} of \d+ on \S+ left the job with exit code 3", code=3),
    "exits with 0": Sign(DISAGREE),
    "dead worker": Sign(WORKER),
    "continues": Sign(DISAGREE),
    "another order": Sign(DISAGREE),
    "nan": Sign(r"gradient.*(nan|not finite).*{rank}"),
    "slow": Sign(r"warning: .*for rank {rank} on ", completes=True),
    "paused": Sign(r"", completes=True),
    "clock shifted": Sign(r"warning: the clock of \S+ \(rank \d\) is 1\d\d\.\d s", completes=True),
    "same core": Sign(BOUND, completes=True, most=2),
    "other option": Sign(DIFFERS % "--optim.lr", **REFUSED),
    "other task": Sign(DIFFERS % r"the source own_task\.py", **REFUSED),
    "other data": Sign(r"error: the samples of the training data on ranks? \d.* differ", **REFUSED),
    "other version": Sign(DIFFERS % "torch", **REFUSED),
    "read-only run directory": Sign(r"error: .*Read-only file system", **REFUSED),
    "run directory not shared": Sign(UNSEEN, **REFUSED),
    "full disk": Sign(r"error: .* was not saved: .*No space left on device", **JOB),
    "full shared memory": Sign("/dev/shm has 1.0 MB free, and MPI needs", shell=SMALL_SHM),
    "wrong mpirun": WRONG_MPIRUN,
    "node lost": Sign(NODE_LOST, nodes=True),
    "link cut": Sign(NODE_LOST, nodes=True),
    "link cut for 3 s": Sign("", completes=True, nodes=True),
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
    "emulated nodes": [name for name, kind in KINDS.items() if kind.nodes] if available() else [],
    # Open MPI does without /dev/shm; its mpirun ends the job itself when the agent of a node ends.
    "MPICH": ["full shared memory", "node lost"] if is_open_mpi() else [],
    "two MPI libraries": [] if shutil.which("mpirun.openmpi") else ["wrong mpirun"],
}
for names in MISSING.values():
    for name in names:
        KINDS.pop(name, None)
