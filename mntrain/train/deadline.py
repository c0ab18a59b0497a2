"""When a job has to be over, so that it can save and end before."""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

# Besides what steps and saves have taken, for what has not been seen: a twentieth of the time.
_MOST_SPARE_S = 30.0
_SPARE_FRACTION = 0.05
_LEAVE_S = 5.0  # at least, of an allocation: who has not left at its end is killed
_ASK_S = 10.0


@dataclass(frozen=True)
class Deadline:
    """The end of a job's time. By a clock that nobody sets."""

    at: float | None  # seconds, as `time.monotonic` counts; None: there is none
    spare_s: float
    why: str

    @classmethod
    def of(cls, max_minutes: float | None, environment: Mapping[str, str]) -> "Deadline":
        """The earlier of so many minutes from now, and the end of the Slurm allocation, if any."""
        ends: list[tuple[float, float, str]] = []
        if max_minutes is not None:
            ends.append((60 * max_minutes, 0.0, f"--run.max-minutes {max_minutes:g}"))
        end = _allocation_end(environment)
        if end is not None:
            why = f"the allocation ends {datetime.fromtimestamp(end)}"
            ends.append((end - time.time(), _LEAVE_S, why))
        if not ends:
            return cls(None, 0.0, "")
        left, least_s, why = min(ends)
        spare_s = max(least_s, min(_MOST_SPARE_S, _SPARE_FRACTION * left))
        return cls(time.monotonic() + left, spare_s, why)

    def near(self, step_s: float, save_s: float) -> bool:
        """Whether it is time to save and end, if a step and a save take that long."""
        if self.at is None:
            return False
        return self.at - time.monotonic() < 2 * (step_s + save_s) + self.spare_s


def _allocation_end(environment: Mapping[str, str]) -> float | None:
    """When the Slurm allocation ends that this process runs in, in seconds since the epoch."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return None
    said = environment.get("SLURM_JOB_END_TIME", "")  # since Slurm 23.02
    return float(said) if said.isdecimal() else _asked(job)


def _asked(job: str) -> float | None:
    """The end of a job as `scontrol` says. None where there is none, or it cannot say."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None
    try:
        # SLURM_TIME_FORMAT is scontrol's own; without it the end is in local time.
        said = subprocess.run(
            [scontrol, "--oneliner", "show", "job", job],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=True,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        ).stdout
        return datetime.fromisoformat(said.partition(" EndTime=")[2].split()[0]).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None  # "Unknown", or "None"
