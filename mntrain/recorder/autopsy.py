"""`python -m mntrain autopsy`: how a job ended, from the recordings of its ranks.

One process, without MPI and torch. Exit code 0 for a job that ended well, 1 for another one, 2 for
bad input.
"""

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from mntrain.checks.finding import alike
from mntrain.recorder.autopsy_diagnosis import Diagnosis, diagnose
from mntrain.recorder.autopsy_ends import Facts, RankEnd
from mntrain.recorder.autopsy_facts import gather_facts
from mntrain.recorder.recording import Event, Kind, Recording, read, recordings

_MAX_GROUPS = 6  # of ranks that are shown
_WIDTH = 10  # of labels


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    Raises SystemExit, with 2 for a malformed command line and 0 after --help.
    """
    parser = argparse.ArgumentParser(
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
    options = parser.parse_args(words)
    try:
        found, notes = find_recordings(options.run_dir, options.folders)
    except ValueError as error:
        print(f"mntrain: error: {error}", file=sys.stderr)
        return 2
    facts = gather_facts(options.run_dir, [recording.header for recording in found])
    diagnosis = diagnose(found, facts)
    lines = [*describe(diagnosis, facts), *(_line("note", note) for note in notes)]
    print("\n".join("".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines))
    return 0 if diagnosis.state == "ended well" else 1


def find_recordings(
    run_dir: Path, folders: Sequence[Path] = ()
) -> tuple[list[Recording], list[str]]:
    """Return the recordings of the newest job of a run, by rank, and notes on what was left out.

    Raises ValueError if there is none.
    """
    places = [recordings(run_dir), recordings(run_dir, _local_folder(run_dir)), run_dir, *folders]
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


def describe(diagnosis: Diagnosis, facts: Facts) -> list[str]:
    """Return the diagnosis in lines of text, at most a screen."""
    ends = diagnosis.ends
    header = next(iter(ends.values())).header
    hosts = len({end.header.host for end in ends.values()})
    began = datetime.fromtimestamp(header.wall, UTC)
    lines = [
        f"{header.size} rank{'s' * (header.size > 1)} on {hosts} host{'s' * (hosts > 1)}, "
        f"began {began:%Y-%m-%d %H:%M:%S} UTC"
    ]
    if diagnosis.state == "ended well":
        lines.append(f"The job ended well: {facts.summary.get('status', 'all ranks closed')}.")
    elif diagnosis.state == "runs":
        behind = f"; {_name(diagnosis.first, ends)} behind" if diagnosis.first else ""
        lines.append(f"The job still runs, as far as can be seen from here{behind}.")
    elif diagnosis.first:
        certain = "" if diagnosis.sure else "probably "
        lines.append(f"{_name(diagnosis.first, ends)} {certain}stopped first.")
    else:
        lines.append("The job failed; no rank stopped first.")
    shown = diagnosis.first or (() if diagnosis.state == "ended well" else tuple(ends))
    lines += _states({rank: ends[rank] for rank in shown if rank in ends}, facts)
    lines += _waits(diagnosis)
    if diagnosis.missing:
        lines.append(_line("missing", f"no recording of {_name(diagnosis.missing, ends)}"))
    known = {key: facts.summary.get(key) for key in ("status", "reason", "error")}
    said = "; ".join(f"{key} {value}" for key, value in known.items() if value)
    labelled = {
        "summary": said,
        "Slurm": facts.scheduler,
        "cause": diagnosis.cause,
        "fix": diagnosis.fix,
    }
    return lines + [_line(label, text) for label, text in labelled.items() if text]


def _waits(diagnosis: Diagnosis) -> list[str]:
    """Return what ranks waited for, those in the same call together."""
    ends, waiting, lines = diagnosis.ends, diagnosis.waiting, []
    calls = {rank: _name_of(event) + _at(event.site) for rank, event in waiting.items()}
    for _, ranks in alike(calls)[:_MAX_GROUPS]:
        event = waiting[ranks[0]]
        waits = [max(0.0, ends[rank].last_seen - waiting[rank].time) for rank in ranks]
        seconds = " to ".join(dict.fromkeys(f"{end:.0f}" for end in (min(waits), max(waits))))
        text = f"{_name(ranks, ends)} in {_name_of(event)}, for {seconds} s{_at(event.site)}"
        lines.append(_line("waiting", text))
    return lines


def _states(ends: Mapping[int, RankEnd], facts: Facts) -> list[str]:
    """Return where ranks were, those that differ by the time alone together."""
    lines = []
    for text, ranks in alike({rank: _doing(end) for rank, end in ends.items()})[:_MAX_GROUPS]:
        lines.append(_line("was", (f"{_name(ranks, ends)} " if len(ends) > 1 else "") + text))
        end = ends[ranks[0]]
        seen = datetime.fromtimestamp(end.header.wall + end.last_seen, UTC)
        lines.append(
            _line("last seen", f"{seen:%H:%M:%S} UTC, {end.last_seen:.1f} s after the start")
        )
        if end.signals:
            lines.append(_line("signals", ", ".join(end.signals)))
        state = facts.processes.get(ranks[0])
        if state:
            lines.append(_line("process", f"{end.header.pid} {'is ' * (state != 'runs')}{state}"))
        if kills := facts.oom_kills.get(ranks[0]):
            lines.append(
                _line(
                    "kernel",
                    f"{kills} out-of-memory kill{'s' * (kills > 1)}, says {end.header.oom_file}",
                )
            )
    return lines


def _doing(end: RankEnd) -> str:
    """Return what a rank did at its end, and where."""
    if end.error:
        where = f"in {_phase(end.phase)}: " if end.phase else ""
        return f"{where}{end.error.text}{_at(end.error.site)}"
    if end.ended:
        return "at the end of its program"
    parts = [f"in {_phase(end.phase)}"] if end.phase else []
    if end.waiting:
        parts.append(f"in {_name_of(end.waiting[0])}{_at(end.waiting[0].site)}")
    elif not parts:
        begun = [e for e in end.recording.events if e.kind == Kind.COLLECTIVE_BEGINS]
        last = f" since {_name_of(begun[-1])}{_at(begun[-1].site)}" if begun else ""
        parts.append(f"in no collective{last}")
    if end.recording.sign and end.recording.sign.site:
        parts.append(f"at {end.recording.sign.site}")
    return ", ".join(parts)


def _phase(event: Event | None) -> str:
    if event is None:
        return ""
    return f"{event.name} of step {event.number}" if event.number else event.name


def _name_of(event: Event) -> str:
    return f"{event.text} (collective {event.number} of {event.name})"


def _at(site: str) -> str:
    return f", at {site}" if site else ""


def _name(ranks: Sequence[int], ends: Mapping[int, RankEnd]) -> str:
    """Return ranks with their hosts, as far as these are known."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        host = f" on {ends[rank].header.host}" if rank in ends else ""
        by_host.setdefault(host, []).append(str(rank))
    text = ", ".join(", ".join(group) + host for host, group in by_host.items())
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _line(label: str, text: str) -> str:
    return f"  {label:<{_WIDTH}}{text}"


def _local_folder(run_dir: Path) -> Path | None:
    """Return the --run.recorder of a run, None if it had none."""
    try:
        local = tomllib.loads((run_dir / "config.toml").read_text())["run"]["recorder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(local) if isinstance(local, str) and local != "none" else None
