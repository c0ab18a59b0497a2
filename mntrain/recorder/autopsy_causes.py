"""The likely cause of a job's end, and what to do: words for a diagnosis."""

from collections.abc import Mapping, Sequence

from mntrain.recorder.autopsy_ends import APART_S, Facts, RankEnd, Waits
from mntrain.recorder.recording import Event, Kind

_OUTPUT = (
    "look for a signal or exit code in the output of mpirun or srun, and in the kernel's log of "
    "its host (dmesg); python -X faulthandler shows where native code crashes"
)
_SAME_CALLS = "look for a call, a continue after an exception, or a loop that differs between ranks"
_SAME_STEPS = (
    "let every rank take the same number of steps: look for a break, return or exit in a branch "
    "that differs between ranks"
)
_LESS_MEMORY = (
    "use less memory: a smaller --train.micro-batch-size, --zero.stage 2, fewer data-loader "
    "workers; or ask the scheduler for more"
)
_LONGER_GRACE = (
    "run the same command again to resume; give the job more time between the signal and the kill, "
    "or end it in time with --run.max-minutes"
)
_MISSING = "give the folder with its file as a further argument, or read the output of mpirun"
_SCHEDULER = {
    "OUT_OF_MEMORY": _LESS_MEMORY,
    "TIMEOUT": "ask for more time, or let the job end in time with --run.max-minutes",
    "CANCELLED": "somebody or the scheduler cancelled it; run the same command again to resume",
    "PREEMPTED": "run the same command again to resume",
    "NODE_FAIL": "a node was lost: run the same command again to resume, without that node",
}


def explain(  # noqa: PLR0911 - one return for each cause
    first: Sequence[int],
    ends: Mapping[int, RankEnd],
    waits: Waits,
    facts: Facts,
    *,
    sure: bool,
) -> tuple[str, str]:
    """Return the likely cause, and what to do.

    `first` are the ranks that stopped first, and `sure` says whether that is certain.
    """
    known = [ends[rank] for rank in first if rank in ends]
    errors = [end.error for end in known or ends.values() if end.error]
    if errors:
        return _explain_error(errors[0])
    if killed := [str(rank) for rank in first or ends if facts.oom_kills.get(rank)]:
        ranks = ", ".join(killed)
        return f"the kernel killed for lack of memory in the cgroup of rank {ranks}", _LESS_MEMORY
    if facts.scheduler in _SCHEDULER:
        return f"the scheduler ended the job: {facts.scheduler}", _SCHEDULER[facts.scheduler]
    if not first and (said := facts.summary.get("error") or facts.summary.get("reason")):
        return str(said), _OUTPUT
    if not first:
        signals = sorted({name for end in ends.values() for name in end.signals})
        if signals:
            return f"the job was killed after {', '.join(signals)}", _LONGER_GRACE
        return "all ranks stopped at about the same time: the job was killed as a whole", _OUTPUT
    if set(first) <= waits.keys():
        return "ranks wait for each other in different collectives", _SAME_CALLS
    if not known:
        return "this rank ended before it could record, or its file is on another node", _MISSING
    return _explain_silence(first, ends, waits, facts, sure=sure)


def _explain_silence(
    first: Sequence[int],
    ends: Mapping[int, RankEnd],
    waits: Waits,
    facts: Facts,
    *,
    sure: bool,
) -> tuple[str, str]:
    """Return the likely cause of an end without an error."""
    known = [ends[rank] for rank in first if rank in ends]
    if any(end.ended for end in known):
        return "it ended its program while other ranks still waited for it", _SAME_STEPS
    header, processes = known[0].header, {facts.processes.get(rank) for rank in first}
    if "stopped" in processes:
        return (
            "its process is stopped, by SIGSTOP or a debugger",
            f"on {header.host}: kill -CONT {header.pid}",
        )
    if "runs" in processes:
        return (
            "it runs, but has not called what the others wait for: it is slow, hangs, or took "
            "another branch",
            f"on {header.host}: py-spy dump --pid {header.pid}; {_SAME_CALLS}",
        )
    others = max((end.last_seen for rank, end in ends.items() if rank not in first), default=0.0)
    together = others - max(end.last_seen for end in known) < APART_S
    if together and not sure:
        return (
            "it was killed (SIGKILL) or crashed, and the launcher ended the others; or the job was "
            "killed as a whole",
            _OUTPUT,
        )
    told = any(end.signals for end in ends.values()) and not any(end.signals for end in known)
    if together and waits and not told:
        return (
            "it ran on, but did not call what the others waited for: it was slow, hung, or took "
            "another branch, until the job was killed; or it was killed or crashed itself, and the "
            "launcher ended the others",
            f"{_SAME_CALLS}; {_OUTPUT}",
        )
    return (
        "its process was killed (SIGKILL), crashed or hung in native code, or was stopped "
        "(SIGSTOP), or its node was lost: it noted no exception and no signal",
        _OUTPUT,
    )


def _explain_error(error: Event) -> tuple[str, str]:
    if error.kind == Kind.SHARED_ERROR:
        return error.text, "the whole message stands in the job's output, and says what to do"
    if error.kind == Kind.CRASH:
        return f"native code crashed: {error.text}", (
            f"look at what is called at {error.site or 'the last line'}: update the library, or "
            "report the crash to its authors"
        )
    if error.text.startswith("KeyboardInterrupt"):
        return "it was interrupted by Ctrl-C", "run the same command again to resume"
    if error.text.startswith("SystemExit"):
        return f"the script left the job by {error.text}", _SAME_STEPS
    return (
        f"an exception on one rank: {error.text}",
        f"correct what raises it at {error.site}; the traceback stands in the job's output",
    )
