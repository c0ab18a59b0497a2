"""The kinds of faults of `fault.py`, and what the job must say of each."""

from typing import NamedTuple


class Kind(NamedTuple):
    """What must appear on stderr, as a regular expression with {rank} for the faulty rank.

    `waits`: whether the report comes when ranks have waited for the time limit; else at once.
    `completes`: whether the job goes on to its end.
    """

    report: str
    waits: bool = False
    completes: bool = False


WAITED = r"error: rank.* waited \d+ s for rank {rank} on "
FAILED = r"mntrain: rank {rank} of \d+ on \S+ failed:\n(.*\n)*.*a bug of one rank"
DISAGREE = r"error: ranks (disagree|wait for each other)(.*\n)*  rank {rank}: "

KINDS = {
    "none": Kind("", completes=True),
    "hang": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in <lambda>", waits=True),
    "spins": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in spin", waits=True),
    "never leaves": Kind(WAITED + r"(.*\n)*.*fault.py:\d+ in train", waits=True),
    "stopped": Kind(WAITED + r"(.*\n)*.*stopped by a signal", waits=True),
    "held": Kind(WAITED + r"(.*\n)*.*held in C code", waits=True),
    "killed": Kind(r"error: rank {rank} on \S+ is lost: its process has ended"),
    "segfault": Kind(r"error: rank {rank} on \S+ is lost: its process has ended"),
    "vanishes": Kind(r"error: rank {rank} on \S+ is lost: its process has ended"),
    "raises": Kind(FAILED),
    "memory": Kind(FAILED),
    "raises in backward": Kind(FAILED),
    "raises after backward": Kind(FAILED),
    "exits": Kind(r"rank {rank} of \d+ on \S+ left the job with exit code 3"),
    "continues": Kind(DISAGREE),
    "stops early": Kind(DISAGREE),
    "another shape": Kind(DISAGREE),
    "another dtype": Kind(DISAGREE),
    "another order": Kind(DISAGREE),
    "one more": Kind(DISAGREE),
    "nan": Kind(r"gradient.*(nan|not finite).*{rank}"),
    "slow": Kind(r"warning: .*for rank {rank} on ", completes=True),
    "paused": Kind(r"", completes=True),
}
