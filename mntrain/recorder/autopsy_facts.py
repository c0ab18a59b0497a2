"""Facts about a job beside its recordings: processes, kernel counters, summary, Slurm."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mntrain.recorder.autopsy_ends import Facts, Process
from mntrain.recorder.events import boot_id, pid_namespace, process_start, read_oom_kills
from mntrain.recorder.recording import Header

_SLURM_TIMEOUT_S = 5.0
_SUMMARY_FILE = "summary.json"


def gather_facts(run_dir: Path, headers: Sequence[Header]) -> Facts:
    """Return what this host, the run's directory and Slurm tell about a job's ranks."""
    here = [header for header in headers if _is_here(header)]
    return Facts(
        processes={header.rank: _process(header) for header in here},
        oom_kills={header.rank: kills for header in here if (kills := _new_oom_kills(header))},
        summary=_summary(run_dir, headers),
        scheduler=_slurm_state(headers[0]),
        now=time.time(),
    )


def _is_here(header: Header) -> bool:
    """Return True if this process sees the processes of the rank's host."""
    here = socket.gethostname(), boot_id(), pid_namespace()
    return here == (header.host, header.boot, header.pid_namespace) and bool(header.boot)


def _process(header: Header) -> Process:
    if not header.process_start or process_start(header.pid) != header.process_start:
        return "gone"
    try:
        state = Path(f"/proc/{header.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return "stopped" if state in "Tt" else "runs"


def _new_oom_kills(header: Header) -> int:
    """Return the out-of-memory kills in a rank's cgroup since it began to record."""
    found = read_oom_kills(Path(header.oom_file)) if header.oom_file else None
    if found is None or found[0] != header.oom_inode:  # it is gone, or another one of that name
        return 0
    return found[1] - header.oom_kills


def _summary(run_dir: Path, headers: Sequence[Header]) -> dict[str, Any]:
    """Return summary.json, unless an earlier job has left it."""
    path = run_dir / _SUMMARY_FILE
    try:
        if path.stat().st_mtime < min(header.wall for header in headers) - 1:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _slurm_state(header: Header) -> str:
    """Return the state of the job's step or allocation in Slurm, "" if it is not known."""
    job, step = header.jobs.get("SLURM_JOB_ID", ""), header.jobs.get("SLURM_STEP_ID", "")
    if not job:
        return ""
    output = _ask("sacct", "--parsable2", "--noheader", "--format=JobID,State", f"--jobs={job}")
    states = dict(line.split("|", 1) for line in output.splitlines() if "|" in line)
    state = states.get(f"{job}.{step}") or states.get(job)
    if not state:
        fields = _ask("scontrol", "--oneliner", "show", "job", job).split()
        state = dict(word.split("=", 1) for word in fields if "=" in word).get("JobState", "")
    return state.split()[0] if state else ""  # "CANCELLED by 0"


def _ask(*command: str) -> str:
    """Return the output of a command of Slurm, "" if it is missing, fails or takes too long."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]],
            capture_output=True,
            text=True,
            timeout=_SLURM_TIMEOUT_S,
            check=True,
            env=dict(os.environ),
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
