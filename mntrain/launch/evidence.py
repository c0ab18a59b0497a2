"""What the run directory of a job says of its end."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mntrain.launch.verdict import WORDLESS, EndCause
from mntrain.recorder.recording import Kind, Recording, recordings

_BY = "the recordings"


@dataclass(frozen=True)
class Evidence:
    """The state of a run directory, if there is one.

    `last_step` is that of metrics.jsonl, as text. `recorded` changes when a job begins to record.
    """

    run: Path | None = None
    summary: str = ""
    last_step: str = ""
    recorded: int = 0

    @classmethod
    def of(cls, run: Path | None) -> "Evidence":
        """Read a run directory."""
        if run is None:
            return cls()
        summary, last, recorded = "", "", 0
        with suppress(OSError):
            summary = (run / "summary.json").read_text()
        with suppress(OSError), (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            steps = re.findall(rb'^{"step": (\d+)', file.read(), re.MULTILINE)
            last = steps[-1].decode() if steps else ""
        with suppress(OSError):
            recorded = recordings(run).stat().st_mtime_ns
        return cls(run, summary, last, recorded)

    def new_summary(self, before: "Evidence") -> Mapping[str, Any] | None:
        """Return the content of summary.json, if it is another one than `before`."""
        with suppress(ValueError):
            content = json.loads(self.summary)
            return content if isinstance(content, dict) and self.summary != before.summary else None
        return None

    def judge(self, said: EndCause, before: "Evidence") -> EndCause:
        """Return the verdict of the ranks' recordings if they know more than `said`, else `said`.

        Recordings count if there are others than `before`.
        """
        lost = re.search(rf"rank (\d+) on [^\n]*{WORDLESS}", said.what)
        unsure = lost or (said.fault and said.by == "mpirun")
        if self.run is None or self.recorded == before.recorded:
            return said
        if said.fault is not None and not unsure:
            return said
        from mntrain.recorder.autopsy import find_recordings  # noqa: PLC0415 - rarely needed

        try:
            found, _ = find_recordings(self.run)
        except ValueError:
            return said
        if unsure:
            return _crash_of(int(lost[1]) if lost else None, found) or said
        return _first_end(self.run, found) or said


def _crash_of(rank: int | None, found: Sequence[Recording]) -> EndCause | None:
    """Return that a rank, or any, has crashed by itself, if it has.

    SIGBUS comes of memory that fails; and others may abort when MPI has lost a rank.
    """
    others = {"Bus error"} if rank is not None else {"Bus error", "Aborted"}
    for header, error in ((one.header, one.error) for one in found):
        crashed = error and error.kind == Kind.CRASH and error.text not in others
        if error and crashed and rank in (None, header.rank):
            what = f"rank {header.rank} on {header.host}: native code crashed: {error.text}"
            return EndCause(False, what, _BY, (header.host,))
    return None


def _first_end(run: Path, found: Sequence[Recording]) -> EndCause | None:
    """Return who stopped first, if any. A machine is to blame if no rank has noted an error."""
    from mntrain.recorder.autopsy import examine  # noqa: PLC0415 - rarely needed

    # Ranks on other hosts do not run any more either, however new their recordings are.
    autopsy = replace(examine(run, found), now=math.inf)
    if autopsy.state == "ended well":  # a loop of one's own may write no summary
        return EndCause(False, "all ranks have ended well", _BY)
    errors = [recording.error for recording in found if recording.error]
    if autopsy.state != "failed" or not (errors or autopsy.first):
        return None
    ranks = {recording.header.rank: recording.header.host for recording in found}
    hosts = tuple({ranks[rank] for rank in autopsy.first if rank in ranks})
    named = ", ".join(f"rank {rank} on {ranks.get(rank, '?')}" for rank in autopsy.first)
    what = f"{named}: {autopsy.cause}" if named else autopsy.cause
    return EndCause(not errors, what, _BY, hosts)
