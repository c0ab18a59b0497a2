"""Causes of a command's end, and the verdict if a machine is to blame. Pure."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

T = TypeVar("T")

# Statuses of summary.json after which a run is not started again.
_ENDS = ("completed", "stopped", "preempted", "interrupted")
# Exit codes of a job that say the same without a summary: docs/failures.md.
_CODES = {2: "options or data were refused", 74: "files could not be written", 75: "preempted"}
_CODES |= {130: "Ctrl-C"}
_KILLS = {135: "killed by SIGBUS", 137: "killed by SIGKILL"}  # 128 and the signal, as of a shell

WORDLESS = "has ended without a word"  # of a rank's process, in a report of the ranks
# The reports of mntrain.watchdog for which a machine is to blame, from their first word on, and the
# words in them that name the hosts. Messages of users' exceptions do not begin like this.
_RANKS = r"ranks? \d+(?: to \d+|, \d+| on [\w.-]+)*"
_WAIT = rf"{_RANKS} ha(?:s|ve) waited \d+ s"
_NODE = r"[\w.:%-]*\w"  # a name or address
_NETWORK = rf"(?:{_WAIT}[^\n]*; )?{_NODE}"  # ends the report of a wait, or is the report
_LOSSES = (
    rf"(?P<whom>{_RANKS}) (?:is|are) lost: (?:its process|the node, or the network to it,) ",
    r"rank \d+ has lost its connections to ranks 0 and 1\b",
    rf"{_WAIT} for (?P<whom>{_RANKS}), which do(?:es)? not answer",
    rf"{_WAIT}, and (?P<whom>{_RANKS}) do not answer",
    rf"{_WAIT} in what all ranks have begun: messages between them do not arrive",
    rf"{_NETWORK} cannot connect to (?P<whom>{_NODE})[^\n]*: nothing answers what it sends ",
    rf"{_NETWORK} has connected to (?P<whom>{_NODE})[^\n]*, but what it sends now ",
    rf"{_NODE} has had no answer from (?P<whom>{_NODE}) for \d",
)
# In a warning of ranks that wait. It may be a call that keeps the interpreter: hosts are asked.
_SILENCE = re.compile(rf"mntrain: warning: {_WAIT}[^\n]*")
_SILENT_HOST = re.compile(r"; no rank on ([\w.-]+) answers")
_REPORT = re.compile(
    r"mntrain: (?:error: (?P<error>[^\n]*)|(?P<failed>rank \d+ of \d+ on \S+ "
    r"(?:failed|left the job)[^\n]*))"
)
_OF_MPI = re.compile(r"\bMPI\.Exception\b|with Exception: (?:MPI_ERR|Other MPI error)")

# What launchers say of a rank or node, by which program, and whether a machine is to blame; the
# first in the output counts. A process that was killed, or whose memory failed (SIGBUS), did not do
# so itself. Any other signal comes of its own code, which would do the same again.
# Lines of ranks may stand among those of the banner: they come by another stream.
_OTHERS = r"(?:(?![^\n]*(?:RUNNING AT|EXIT STRING))[^\n]*\n){0,50}?"
_BANNER = rf"RUNNING AT (?P<host>\S+)\n{_OTHERS}YOUR APPLICATION TERMINATED WITH THE EXIT STRING: "
_ON_NODE = r"process rank \d+ with PID \d+ on node (?P<host>\S+) exited on\s+signal "
_LAUNCHERS = (
    ("mpirun", True, rf"{_BANNER}(?P<what>(?:Killed|Bus error) \(signal \d+\))"),
    # Not signal 15, with which mpirun itself ends the other ranks.
    ("mpirun", False, rf"{_BANNER}(?P<what>(?!Terminated)[^\n]*)"),
    # In place of the signal if mpirun's daemons end before they tell: mostly, but not always 9.
    (
        "mpirun",
        True,
        rf"RUNNING AT (?P<host>\S+)\n{_OTHERS}=   (?P<what>EXIT CODE: 9)\n(?![\s\S]*EXIT STRING)",
    ),
    ("mpirun", True, r"control_cb [^\n]*assert \(!closed\) failed"),
    ("mpirun", True, r"has lost communication with a remote daemon"),
    # Before the ranks have met; the exit code may be 0.
    (
        "mpirun",
        True,
        r"A daemon failed to report back(?=[\s\S]{0,900}?Remote host: +(?P<host>\S+))",
    ),
    ("mpirun", True, rf"{_ON_NODE}[79]\b"),
    ("mpirun", False, rf"{_ON_NODE}\d+"),
    ("mpirun", False, r"MPI_ABORT was invoked on rank \d+"),
    ("srun", True, r"Node failure on (?P<host>\S+)"),
    ("srun", True, r"DUE TO NODE FAILURE"),
    # By scancel, or at its time limit. With --kill-on-bad-exit also later, after a task's end.
    (
        "srun",
        False,
        r"CANCELLED AT (?![^\n]*NODE FAILURE|[\s\S]*srun: error: Node failure on)[^\n]*",
    ),
    (
        "srun",
        True,
        r"srun: error: (?P<host>\S+): tasks? [^\n]*: (?:Killed|Bus error|Out Of Memory)",
    ),
    ("srun", True, r"[Dd]etected \d+ oom.kill event"),
    ("srun", False, r"srun: error: (?P<host>\S+): tasks? [^\n]*: [^\n]*"),
    ("ssh", True, r"ssh: connect to host (?P<host>\S+) port \d+: [^\n]*"),
)
# An abort may be that of a rank whose MPI has lost another one.
OWN_SIGNAL = re.compile(r"Segmentation fault|signal (?:4|8|11)\b")


@dataclass(frozen=True)
class EndCause:
    """Cause of a command's end, the source that says so, and the hosts that it names.

    `fault`: a machine is to blame. None: nobody says why; then hosts that do not answer decide.
    """

    fault: bool | None
    what: str
    by: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def silent(self) -> bool:
        """True if ranks have waited in vain for an answer of the hosts."""
        return bool(self.fault) and bool(re.search(r"\bnot answer\b|\bno answer\b", self.what))

    @property
    def said(self) -> str:
        """The reason in words, and whose they are."""
        what = re.split(r"\. Fix: |\[(?:proxy|mpiexec)\b", self.what)[0]  # mpirun's, in one line
        return f"{what} (says {self.by})"


def judge(code: int, output: str, summary: Mapping[str, Any] | None) -> EndCause:
    """Return the verdict on a start from the exit code, the last output and summary.json.

    `summary` is that which this start has written, if any. Code 0 alone says nothing: Open MPI's
    mpirun may return it after a loss.
    """
    of_job = _of_summary(summary or {}) or _of_ranks(output)
    if of_job and not (of_job.fault and WORDLESS in of_job.what):
        return of_job
    of_launcher = _of_launchers(output)
    # Other ranks do not see the signal by which one has ended.
    if of_job and not (of_launcher and OWN_SIGNAL.search(of_launcher.what)):
        return of_job
    return of_launcher or _of_code(code)


def _of_summary(summary: Mapping[str, Any]) -> EndCause | None:
    status, by = str(summary.get("status") or ""), "summary.json"
    if status in _ENDS:
        return EndCause(False, f"the run is {status}", by)
    reason = str(summary.get("reason") or summary.get("error") or status)
    # An exception of MPI comes of another rank's end.
    if not status or _OF_MPI.search(reason):
        return None
    # A "crashed" or "failed" run has the words of an exception, whatever they are.
    lost = status in ("lost", "stalled") and _is_loss(reason)
    return EndCause(lost, reason, by, _hosts_in(reason) if lost else ())


def _of_ranks(output: str) -> EndCause | None:
    """Return the verdict of the first loss or failure that ranks report, else of another error.

    A script may go on after an error that all ranks raise.
    """
    reports = list(_REPORT.finditer(output))
    ends = [*(found.start() for found in reports[1:]), len(output)]
    errors = []
    for found, end in zip(reports, ends, strict=False):
        said = found["error"] or found["failed"].rstrip(":")
        if _is_loss(found["error"] or ""):
            return EndCause(True, said, "the ranks", _hosts_in(said))
        if found["error"]:
            errors.append(said)
        elif not _OF_MPI.search(output[found.start() : end]):
            return EndCause(False, said, "the ranks")
    return EndCause(False, errors[0], "the ranks") if errors else None


def _of_launchers(output: str) -> EndCause | None:
    words = [(by, fault, re.search(text, output)) for by, fault, text in _LAUNCHERS]
    found = [(word.start(), by, fault, word) for by, fault, word in words if word]
    if not found:
        return None
    _, by, fault, word = min(found, key=itemgetter(0))
    parts = word.groupdict()
    host = parts.get("host")
    said = f"a rank on {host} ended: {parts['what']}" if "what" in parts else word[0]
    return EndCause(fault, " ".join(said.split()), by, (host,) if host else ())


def _of_code(code: int) -> EndCause:
    if code in _CODES or code in _KILLS:
        return EndCause(code in _KILLS, (_CODES | _KILLS)[code], "the exit code")
    return EndCause(None, f"exit code {code}")


def tells_loss(line: str) -> bool:
    """Return whether a line of output is a report of the ranks that a machine is to blame."""
    found = _REPORT.search(line)
    return found is not None and _is_loss(found["error"] or "")


def silent_hosts(line: str) -> list[str]:
    """Return the hosts of which no rank answers, by a warning of the ranks in a line of output."""
    return _SILENT_HOST.findall(line) if _SILENCE.search(line) else []


def _is_loss(text: str) -> bool:
    return any(re.match(pattern, text) for pattern in _LOSSES)


def _hosts_in(report: str) -> tuple[str, ...]:
    """Return the hosts that a report of a loss blames, each once."""
    found = [re.match(pattern, report) for pattern in _LOSSES]
    whom = " ".join(one.groupdict().get("whom") or "" for one in found if one)
    return tuple(dict.fromkeys(re.findall(r"\bon ([\w.-]+)", whom) or whom.split()[:1]))


def choose(now: Sequence[T], free: Sequence[T], suspects: Collection[T], want: int) -> list[T]:
    """Return `want` hosts that are free, or all: those of `now` at their places, then others.

    Those in `suspects`, which have lost a rank, are taken last.
    """
    good = [host for host in free if host not in suspects]
    spares = [host for host in good if host not in now]
    others = iter([*spares, *(host for host in free if host in suspects)])
    places = [host if host in good else next(others, None) for host in now]
    return [host for host in [*places, *others] if host is not None][:want]
