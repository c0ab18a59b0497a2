"""The built-in task on ranks that are bound to one core each, some of which others compete for.

COMPETITORS (of this process's environment): `RANK:PROCESSES:FIRST:LAST`. While steps FIRST to LAST
are taken, so many processes compute on the core of that rank. SAMPLES: the run ends after the step
in which all ranks together have had so many.
"""

import os
import subprocess
import sys

from mntrain.metrics.registry import StepRecord
from mntrain.tasks.lm import LanguageModel

OWN = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
RANK, PROCESSES, FIRST, LAST = map(int, os.environ["COMPETITORS"].split(":"))
SAMPLES = int(os.environ.get("SAMPLES", sys.maxsize))
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100000))"


class UnequalTask(LanguageModel):
    """The built-in language model."""

    _spinning: tuple[subprocess.Popen[bytes], ...] = ()
    _bound = False
    _samples = 0

    def on_step(self, record: StepRecord) -> str | None:
        """Bind this rank to its core; start and end the processes that compete for it."""
        if not self._bound:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[OWN % len(cores)]})
            self._bound = True
        if OWN == RANK and record.step == max(1, FIRST - 1):
            command = [sys.executable, "-c", SPIN, str(os.getpid())]
            self._spinning = tuple(subprocess.Popen(command) for _ in range(PROCESSES))
        if record.step == LAST:
            self._end()
        self._samples += record.samples
        if self._samples >= SAMPLES:
            return "enough samples"
        return super().on_step(record)

    def _end(self) -> None:
        for process in self._spinning:
            process.kill()
            process.wait()
        self._spinning = ()
