"""The end of the batch job that this process belongs to, as its scheduler tells it."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime

Environment = Mapping[str, str]

_COMMAND_TIMEOUT_S = 10.0
_MINUTE_S = 60.0
_UNLIMITED = 2**32 - 1  # what Flux reports for a job without a limit
_TIME_UNITS_S = (1, 60, 3600, 86400)  # of a duration such as 2:00:00, from its end


def allocation_end(environment: Environment) -> float | None:
    """Return when this process's batch job ends, in seconds since the epoch; None if unknown.

    A job in a job of another scheduler, such as Flux in Slurm, ends with the first of them. Takes
    up to 10 s for each scheduler that does not answer. Local.
    """
    ends = [_end(variable, environment) for variable in SCHEDULERS if variable in environment]
    return min((end for end in ends if end is not None), default=None)


def _end(variable: str, environment: Environment) -> float | None:
    command, parse = SCHEDULERS[variable]
    job, index = environment[variable], environment.get("LSB_JOBINDEX", "0")
    if variable == "SLURM_JOB_ID":
        known = environment.get("SLURM_JOB_END_TIME", "")  # since Slurm 23.02
        if known.isdecimal() and float(known) > time.time():  # else of an older allocation
            return float(known)
    elif variable == "LSB_JOBID" and index != "0":
        job += f"[{index}]"  # an element of a job array
    try:
        now = time.time()
        output = subprocess.run(
            [word.format(job) for word in command.split()],
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=True,
            # SLURM_TIME_FORMAT is scontrol's own; "standard" is local time.
            env={**os.environ, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"},
        ).stdout
        return parse(output, now)
    except (OSError, subprocess.SubprocessError, LookupError, ValueError):
        return None  # without the command, or for a job without an end


def parse_slurm(output: str, now: float) -> float | None:
    """Return the end of a job from `scontrol --oneliner show job`."""
    return datetime.fromisoformat(output.partition(" EndTime=")[2].split()[0]).timestamp()


def parse_pbs(output: str, now: float) -> float | None:
    """Return the end of a job from `qstat -f` of OpenPBS, PBS Pro or Torque."""
    # Lines that continue another one are indented by a tab or by more.
    fields = dict(re.findall(r"^ {4}([\w.]+) = (.*)$", output, re.MULTILINE))
    if "Walltime.Remaining" in fields:  # Torque
        return now + float(fields["Walltime.Remaining"])
    if "Resource_List.walltime" not in fields:
        return None
    start = fields["stime"] if "stime" in fields else fields["start_time"]
    parts = reversed(fields["Resource_List.walltime"].split(":"))
    limit_s = sum(int(part) * unit for part, unit in zip(parts, _TIME_UNITS_S, strict=False))
    return datetime.strptime(start, "%a %b %d %H:%M:%S %Y").timestamp() + limit_s


def parse_lsf(output: str, now: float) -> float | None:
    """Return the end of a job from `bjobs -noheader -o time_left`: hours:minutes and a letter.

    L is a limit; other letters mean an estimate, at whose end LSF does not kill the job. The time
    may be rounded up, so a minute less counts.
    """
    left = re.fullmatch(r"\s*(\d+):(\d+) L\s*", output)
    if left is None:
        return None
    return now + max(0.0, (60 * int(left[1]) + int(left[2]) - 1) * _MINUTE_S)


def parse_flux(output: str, now: float) -> float | None:
    """Return the end of a job from `flux job timeleft`."""
    left_s = float(output)
    return now + left_s if left_s < _UNLIMITED else None


# By the variable that is set in the environment of their jobs: the command that tells the end of a
# job, and a function of its output and of the time at which it was run. It returns the end in
# seconds since the epoch, None if there is no limit; LookupError or ValueError: it is unknown.
SCHEDULERS: dict[str, tuple[str, Callable[[str, float], float | None]]] = {
    "SLURM_JOB_ID": ("scontrol --oneliner show job {}", parse_slurm),
    "PBS_JOBID": ("qstat -f {}", parse_pbs),
    "LSB_JOBID": ("bjobs -noheader -o time_left {}", parse_lsf),
    "FLUX_JOB_ID": ("flux job timeleft", parse_flux),
}
