"""The built-in task on ranks that are bound to one core each, one of which others compete for.

COMPETITORS (of this process's environment): `RANK:PROCESSES`. So many processes compute on the core
of that rank.
"""

import os
import subprocess
import sys

from mntrain.metrics.registry import StepRecord
from mntrain.tasks.lm import LanguageModel

OWN = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
RANK, PROCESSES = map(int, os.environ["COMPETITORS"].split(":"))
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100000))"


class UnequalTask(LanguageModel):
    """The built-in language model."""

    _bound = False

    def on_step(self, record: StepRecord) -> str | None:
        """Bind this rank to its core, and start the processes that compete for it."""
        if not self._bound:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[OWN % len(cores)]})
            self._bound = True
            for _ in range(PROCESSES if OWN == RANK else 0):  # until this process ends
                subprocess.Popen([sys.executable, "-c", SPIN, str(os.getpid())])
        return super().on_step(record)
