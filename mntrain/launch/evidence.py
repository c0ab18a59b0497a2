"""Evidence of a job's end in its run directory."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mntrain.launch.verdict import OWN_SIGNAL, WORDLESS, EndCause
from mntrain.recorder.launch_notes import FoundRun, changed_ns
from mntrain.recorder.recording import MPI, Kind, Recording, recordings

_BY = "the recordings"


@dataclass(frozen=True)
class Evidence:
    """The traces of a start in its run directory, if it has told of one.

    `summary` is the content of summary.json if this start has written it. `last_step` is that of
    metrics.jsonl, 0 without one. `recorded`: the start has begun to record.
    """

    run: Path | None = None
    summary: Mapping[str, Any] | None = None
    last_step: int = 0
    recorded: bool = False

    @classmethod
    def of(cls, found: FoundRun | None) -> "Evidence":
        """Read a run directory. What is as the start has found it is not of this start."""
        if found is None:
            return cls()
        run, summary, last = found.path, None, 0
        with suppress(OSError, ValueError), (run / "summary.json").open() as file:
            content = json.load(file)
            if (
                isinstance(content, dict)
                and os.fstat(file.fileno()).st_mtime_ns != found.summary_ns
            ):
                summary = content
        with suppress(OSError), (run / "metrics.jsonl").open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - (1 << 16)))
            steps = re.findall(rb'^{"step": (\d+)', lines.read(), re.MULTILINE)
            last = int(steps[-1]) if steps else 0
        return cls(run, summary, last, changed_ns(recordings(run)) != found.recordings_ns)

    def judge(self, said: EndCause) -> EndCause:
        """Return the verdict of the ranks' recordings if they know more, else `said`."""
        lost = re.search(rf"rank (\d+) on [^\n]*{WORDLESS}", said.what)
        crashed = said.fault is False and said.by == "mpirun" and OWN_SIGNAL.search(said.what)
        unsure = lost or crashed or (said.fault and said.by == "mpirun")
        sure = said.fault is not None and not unsure
        if sure or self.run is None or not self.recorded:
            return said
        from mntrain.recorder.autopsy import find_recordings  # noqa: PLC0415 - rarely needed

        try:
            found, _ = find_recordings(self.run)
        except ValueError:
            return said
        if unsure:
            if own := _crash_of(int(lost[1]) if lost else None, found):
                return own
            if crashed and any(one.error and one.error.name == MPI for one in found):
                what = f"{said.what}, in a call of MPI, as after the loss of another one"
                return EndCause(True, what, said.by)
            return said
        return self._first_end(self.run, found) or said

    def _first_end(self, run: Path, found: Sequence[Recording]) -> EndCause | None:
        """Return who stopped first, if any. A machine is to blame if no rank has noted an error."""
        from mntrain.recorder.autopsy import examine  # noqa: PLC0415 - rarely needed

        # Ranks on other hosts do not run any more either, however new their recordings are.
        autopsy = replace(examine(run, found), now=math.inf, summary=self.summary or {})
        if autopsy.state == "ended well":  # a loop of one's own may write no summary
            return EndCause(False, "all ranks have ended well", _BY)
        errors = [one.error for one in found if one.error and one.error.name != MPI]
        if autopsy.state != "failed" or not (errors or autopsy.first):
            return None
        ranks = {recording.header.rank: recording.header.host for recording in found}
        hosts = tuple({ranks[rank] for rank in autopsy.first if rank in ranks})
        named = ", ".join(f"rank {rank} on {ranks.get(rank, '?')}" for rank in autopsy.first)
        what = f"{named}: {autopsy.cause}" if named else autopsy.cause
        return EndCause(not errors, what, _BY, hosts)


def _crash_of(rank: int | None, found: Sequence[Recording]) -> EndCause | None:
    """Return that a rank, or any, has crashed by itself, if it has.

    SIGBUS comes of memory that fails; and others may abort, or crash in MPI, when it has lost a
    rank: so if ranks have seen one end, the first is asked. A crash in a call of MPI says nothing:
    MPICH may send to a rank that was killed just now, and crash before anybody has seen that.
    """
    others = {"Bus error"} if rank is not None else {"Bus error", "Aborted"}
    events = [event for recording in found for event in recording.events]
    ends = [event for event in events if event.kind == Kind.PEER_ENDED]
    if rank is None and ends:
        rank = min(ends, key=lambda event: event.time).number
    for header, error in ((one.header, one.error) for one in found):
        if not error or error.kind != Kind.CRASH or error.name == MPI or error.text in others:
            continue
        if rank in (None, header.rank):
            what = f"rank {header.rank} on {header.host}: native code crashed: {error.text}"
            return EndCause(False, what, _BY, (header.host,))
    return None
