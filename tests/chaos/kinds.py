"""The kinds of faults, and what a job must say of each.

Other tests show the kinds that are found as one of these is, or before any rank trains.
"""

from typing import NamedTuple

from launch import is_open_mpi
from nodes import available


class Sign(NamedTuple):
    """A report that must appear on stderr, as a regular expression with {rank} for the faulty rank.

    `waits`: whether the report comes when ranks have waited for the time limit; else at once.
    `completes`: whether the job goes on to its end. `dies`: whether the rank's process ends without
    a word. `nodes`: whether it needs emulated nodes.
    """

    report: str
    waits: bool = False
    completes: bool = False
    dies: bool = False
    nodes: bool = False


HUNG = r"error: rank.* waited \d+ s for rank {rank} on (.*\n)*.*fault.py:\d+ in <lambda>"
LOST = r"error: rank {rank} on \S+ is lost: its process has ended"
NODE_LOST = r"error: ranks? (\d+, )*{rank}\b[ ,\d]* on n\d (is|are) lost"
FAILED = r"mntrain: rank {rank} of \d+ on \S+ failed:\n(.*\n)*.*"
ENDED = r"DataLoader worker .* (is killed|exited unexpectedly)"  # as torch notices it

KINDS = {
    "hang": Sign(HUNG, waits=True),
    "killed": Sign(LOST, dies=True),
    "raises": Sign(FAILED + "a bug of one rank"),
    "dead worker": Sign(FAILED + ENDED),
    "link cut for 3 s": Sign("", completes=True, nodes=True),
    "continues": Sign(r"error: ranks (disagree|wait for each other)(.*\n)*  rank {rank}: "),
    "node lost": Sign(NODE_LOST, nodes=True),
}
if available():  # the reason why there are no emulated nodes
    KINDS = {name: kind for name, kind in KINDS.items() if not kind.nodes}
elif is_open_mpi():  # its mpirun ends the job itself when the agent of a node ends
    del KINDS["node lost"]
