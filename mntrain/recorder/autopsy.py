"""`python -m mntrain autopsy`: how a job ended, from the recordings of its ranks.

One process, without MPI and torch. Exit code 0 for a job that ended well, 1 for another one, 2 for
bad input.
"""

import json
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mntrain.alike.naming import by_value, naming
from mntrain.options.arguments import CommandParser
from mntrain.recorder.autopsy_diagnosis import Autopsy, Process
from mntrain.recorder.events import boot_id, pid_namespace, read_oom_kills, read_process
from mntrain.recorder.recording import Event, Header, Kind, Recording, read, recordings

_MAX_GROUPS = 6  # of ranks that are shown
_SLURM_TIMEOUT_S = 5.0
LOOK_S = 2.5  # between two looks at recordings, which get a sign of life each second


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    Raises ValueError for a malformed command line, and SystemExit with code 0 after --help.
    """
    parser = CommandParser(
        prog="python -m mntrain autopsy",
        description="Say how a job ended: which rank stopped first, in what and at which line, who "
        "waited for it, the likely cause, and the fix. Exit code 0 if the job ended well, 1 if "
        "not, 2 if there is nothing to read.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of a run")
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        type=Path,
        nargs="*",
        help="further folders with files of --run.recorder, such as copies from other nodes",
    )
    options = parser.read(words)
    try:
        found, notes = find_recordings(options.run_dir, options.folders)
    except ValueError as error:
        print(f"mntrain: error: {error}", file=sys.stderr)
        return 2
    autopsy = examine(options.run_dir, found)
    if autopsy.uncertain:
        time.sleep(LOOK_S)
        later, _ = find_recordings(options.run_dir, options.folders)
        seen = {end.header.rank: end.last_seen for end in found}
        moved = [end.header.rank for end in later if end.last_seen > seen.get(end.header.rank, 0.0)]
        autopsy = examine(options.run_dir, later, moved)
    lines = [*describe(autopsy), *(_line("note", note) for note in notes)]
    print("\n".join("".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines))
    return 0 if autopsy.state == "ended well" else 1


def find_recordings(
    run_dir: Path, folders: Sequence[Path] = ()
) -> tuple[list[Recording], list[str]]:
    """Return the recordings of the newest job of a run, by rank, and notes on what was left out.

    Raises ValueError if there is none.
    """
    try:  # the --run.recorder of the run
        named = tomllib.loads((run_dir / "config.toml").read_text())["run"]["recorder"]
        local = None if named == "none" else Path(named)
    except (OSError, ValueError, KeyError, TypeError):
        local = None
    places = [recordings(run_dir), recordings(run_dir, local), run_dir, *folders]
    paths = sorted({path.resolve() for place in places for path in place.glob("rank-*.bin")})
    found, notes = [], []
    for path in paths:
        try:
            found.append(read(path))
        except (OSError, ValueError) as error:
            notes.append(str(error))
    if not found:
        looked = ", ".join(dict.fromkeys(map(str, places)))
        raise ValueError(
            "; ".join([f"no recordings of ranks (rank-*.bin) in {looked}", *notes])
            + ": give the folder of a run, and after --run.recorder also that of the recordings"
        )
    of_rank_0 = [recording for recording in found if recording.header.rank == 0]
    newest = max(of_rank_0 or found, key=lambda recording: recording.header.wall).header.job
    own = {r.header.rank: r for r in found if r.header.job == newest}
    if len(own) < len(found):
        notes.append(f"{len(found) - len(own)} files are of earlier jobs")
    return [own[rank] for rank in sorted(own)], notes


def examine(run_dir: Path, found: Sequence[Recording], moved: Sequence[int] = ()) -> Autopsy:
    """Return the end of a job, with what this host, the run's directory and Slurm know of it.

    `moved` are ranks whose recordings have grown since an earlier look.
    """
    headers = [recording.header for recording in found]
    # Whose processes this one sees.
    place = socket.gethostname(), boot_id(), pid_namespace()
    here = [h for h in headers if (h.host, h.boot, h.pid_namespace) == place and h.boot]
    return Autopsy(
        {recording.header.rank: recording for recording in found},
        processes={header.rank: _process(header) for header in here},
        oom_kills={header.rank: kills for header in here if (kills := _new_oom_kills(header))},
        summary=_summary(run_dir, min(header.wall for header in headers)),
        scheduler=_slurm_state(headers[0].jobs),
        now=time.time(),
        moved=moved,
    )


def _process(header: Header) -> Process:
    state, start = read_process(header.pid)
    if not start or start != header.process_start:
        return "gone"
    return "stopped" if state in "Tt" else "runs"


def _new_oom_kills(header: Header) -> int:
    """Return the out-of-memory kills in a rank's cgroup since it began to record."""
    kills = read_oom_kills(Path(header.oom_file)) or 0 if header.oom_file else 0
    return max(0, kills - header.oom_kills)  # a cgroup that is made anew begins at 0


def _summary(run_dir: Path, start: float) -> dict[str, Any]:
    """Return summary.json, unless an earlier job has left it.

    Each job makes its files of recordings anew, by the clock of the same file server. Where these
    are elsewhere, the job's `start` by the clock of its host counts.
    """
    path, made = run_dir / "summary.json", recordings(run_dir)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        begun = made.stat().st_mtime if made.exists() else start
        of_this_job = path.stat().st_mtime >= begun - 1
    except (OSError, ValueError):
        return {}
    return content if of_this_job and isinstance(content, dict) else {}


def _slurm_state(jobs: dict[str, str]) -> str:
    """Return the state of the job's step or allocation in Slurm, "" if it is not known."""
    if not (job := jobs.get("SLURM_JOB_ID")):
        return ""
    output = _ask("sacct", "--parsable2", "--noheader", "--format=JobIDRaw,State", f"--jobs={job}")
    states = dict(line.split("|", 1) for line in output.splitlines() if "|" in line)
    state = states.get(f"{job}.{jobs.get('SLURM_STEP_ID')}") or states.get(job)
    if not state:
        fields = _ask("scontrol", "--oneliner", "show", "job", job).split()
        state = dict(word.split("=", 1) for word in fields if "=" in word).get("JobState", "")
    return state.partition(" ")[0]  # "CANCELLED by 0"


def _ask(*command: str) -> str:
    """Return the output of a command of Slurm, "" if it is missing, fails or takes too long."""
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=_SLURM_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def describe(autopsy: Autopsy) -> list[str]:
    """Return the end of a job in lines of text, at most a screen."""
    ends, first = autopsy.recordings, autopsy.first
    hosts = {rank: end.header.host for rank, end in ends.items()}
    header, count = next(iter(ends.values())).header, len(set(hosts.values()))
    began = datetime.fromtimestamp(header.wall, UTC)
    lines = [
        f"{header.size} rank{'s' * (header.size > 1)} on {count} host{'s' * (count > 1)}, "
        f"began {began:%Y-%m-%d %H:%M:%S} UTC"
    ]
    if autopsy.state == "ended well":
        lines.append(f"The job ended well: {autopsy.summary.get('status', 'all ranks closed')}.")
    elif autopsy.state == "runs":
        behind = f"; {naming('rank', first, hosts)} behind" if first else ""
        if autopsy.seen_running:
            lines.append(f"The job still runs, as far as can be seen from here{behind}.")
        else:
            since = f"its recordings have not changed for {LOOK_S:g} s, and may come a minute late"
            lines.append(f"The job still runs, or has ended within a minute: {since}{behind}.")
    elif first:
        certain = "" if autopsy.sure else "probably "
        lines.append(f"{naming('rank', first, hosts)} {certain}stopped first.")
    else:
        lines.append("The job failed; no rank stopped first.")
    shown = first or (() if autopsy.state == "ended well" else tuple(ends))
    doing = {rank: _doing(ends[rank]) for rank in shown if rank in ends}
    for text, ranks in by_value(doing)[:_MAX_GROUPS]:
        who = f"{naming('rank', ranks, hosts)} " if len(doing) > 1 else ""
        lines.append(_line("was", who + text))
        lines += _last_facts(autopsy, ranks[0])
    waits = {rank: found[0][0] for rank, found in autopsy.waits.items() if rank not in first}
    calls = {rank: f"{wait}{_at(wait.site)}" for rank, wait in waits.items()}
    for _, ranks in by_value(calls)[:_MAX_GROUPS]:
        wait, times = waits[ranks[0]], [max(0.0, waits[rank].seconds) for rank in ranks]
        seconds = " to ".join(dict.fromkeys(f"{end:.0f}" for end in (min(times), max(times))))
        text = f"{naming('rank', ranks, hosts)} in {wait}, for {seconds} s{_at(wait.site)}"
        lines.append(_line("waiting", text))
    if autopsy.missing:
        lines.append(_line("missing", f"no recording of {naming('rank', autopsy.missing, hosts)}"))
    known = {key: autopsy.summary.get(key) for key in ("status", "reason", "error")}
    labelled = {
        "summary": "; ".join(f"{key} {value}" for key, value in known.items() if value),
        "Slurm": autopsy.scheduler,
        "cause": autopsy.cause,
        "fix": autopsy.fix,
    }
    return lines + [_line(label, text) for label, text in labelled.items() if text]


def _last_facts(autopsy: Autopsy, rank: int) -> list[str]:
    """Return lines about the end of a rank."""
    end = autopsy.recordings[rank]
    seen = datetime.fromtimestamp(end.header.wall + end.last_seen, UTC)
    lines = [_line("last seen", f"{seen:%H:%M:%S} UTC, {end.last_seen:.1f} s after the start")]
    if end.signals:
        lines.append(_line("signals", ", ".join(end.signals)))
    if state := autopsy.processes.get(rank):
        lines.append(_line("process", f"{end.header.pid} {'is ' * (state != 'runs')}{state}"))
    if kills := autopsy.oom_kills.get(rank):
        killed = f"{kills} out-of-memory kill{'s' * (kills > 1)}"
        lines.append(_line("kernel", f"{killed}, says {end.header.oom_file}"))
    return lines


def _doing(end: Recording) -> str:
    """Return what a rank did at its end, and where."""
    if end.error:
        where = f"in {_name_phase(end.phase)}: " if end.phase else ""
        return f"{where}{end.error.text}{_at(end.error.site)}"
    if end.ended:
        return "at the end of its program"
    parts = [f"in {_name_phase(end.phase)}"] if end.phase else []
    if end.waits:
        parts.append(f"in {end.waits[0]}{_at(end.waits[0].site)}")
    elif not parts:
        begun = [e for e in end.events if e.kind == Kind.COLLECTIVE_BEGINS]
        last = [f" since {wait}{_at(wait.site)}" for wait in map(end.wait_of, begun[-1:])]
        parts.append(f"in no collective{''.join(last)}")
    if end.sign and end.sign.site:
        parts.append(f"at {end.sign.site}")
    return ", ".join(parts)


def _name_phase(event: Event) -> str:
    return f"{event.name} of step {event.number}" if event.number else event.name


def _at(site: str) -> str:
    return f", at {site}" if site else ""


def _line(label: str, text: str) -> str:
    return f"  {label:<10}{text}"
