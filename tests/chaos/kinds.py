"""The kinds of faults of `fault.py`, and what the job must say of each."""

import os
from pathlib import Path
from typing import NamedTuple


class Kind(NamedTuple):
    """What must appear on stderr, as a regular expression with {rank} for the faulty rank.

    `waits`: whether the report comes when ranks have waited for the time limit; else at once.
    `completes`: whether the job goes on to its end. `code`: the exit code of the job. `dies`:
    whether the rank's process ends without a word.
    """

    report: str
    waits: bool = False
    completes: bool = False
    code: int = 1
    dies: bool = False


WAITED = r"error: rank.* waited \d+ s for rank {rank} on "
LOST = r"error: rank {rank} on \S+ is lost: its process has ended"
FAILED = r"mntrain: rank {rank} of \d+ on \S+ failed:\n(.*\n)*.*a bug of one rank"
WORKER = r"mntrain: rank {rank} of \d+ on \S+ failed:\n(.*\n)*.*DataLoader worker .* is killed"
DISAGREE = r"error: ranks (disagree|wait for each other)(.*\n)*  rank {rank}: "

KINDS = {
    "none": Kind("", completes=True),
    "hang": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in <lambda>", waits=True),
    "spins": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in spin", waits=True),
    "never leaves": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in train", waits=True),
    "late to a broadcast": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in extra_collectives", waits=True),
    "stopped": Kind(WAITED + r"(.*\n)*.*stopped by a signal", waits=True),
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
    "out of memory": Kind(LOST, dies=True),
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
}

if not os.access(Path("/sys/fs/cgroup/memory/cgroup.procs"), os.W_OK):
    del KINDS["out of memory"]  # that of fault.py needs root, and version 1
