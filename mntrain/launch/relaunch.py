"""The starts of a command, one after the other, and the hosts of each."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGINT

from mntrain.launch.answers import SILENT, Hosts
from mntrain.launch.evidence import Evidence
from mntrain.launch.hosts import Host
from mntrain.launch.launcher_command import LauncherCommand
from mntrain.launch.starts import Signals, Start
from mntrain.launch.verdict import EndCause, choose, judge
from mntrain.recorder.launch_notes import VARIABLE, LaunchNotes

AGAIN = 75  # the exit code if too few hosts are left: run it again; EX_TEMPFAIL of sysexits.h
_VERSION_S = 20.0  # for mpirun to say whose it is
# Starts in a row that are not known to have come beyond the steps of all before, or to have taken
# more than the one before: what has ended them may be in the program, at the same point each time.
_MOST_ALIKE = 3
_FORWARDED = ("-x", VARIABLE)  # Open MPI passes variables of other names to no other host
_OWN = "launch"  # whose word a verdict is
SIGNALLED_S = 60.0  # after a signal, for the job to end by itself: a last save may take long
_WORD_S = 60.0  # for which hosts are asked after the ranks' word that they do not answer


class Launch:
    """The starts of a command, on `full` hosts if there are so many, and on `least` or more.

    `folder` is for notes of the job, which its ranks see.
    """

    def __init__(
        self,
        command: LauncherCommand,
        *,
        full: int,
        least: int,
        folder: Path,
        signals: Signals,
    ) -> None:
        self._command, self._full, self._least = command, full, least
        self._folder, self._signals = folder.resolve(), signals
        self._notes = LaunchNotes(self._folder)
        self._answering = Hosts(command.hosts, os.environ, command.agent)
        self._open_mpi = command.kind == "mpirun" and _is_open_mpi(command.words[0])
        self._hosts = command.hosts[:full]  # of the present start
        self._number = self._alike = 0
        self._highest = 0  # step in the metrics of all starts
        self._steps: int | None = None  # of the present start, as last seen
        self._steps_before: int | None = None  # of the start before it
        self._step_at: float | None = None  # when a step of any start was last seen, monotonic

    def run(self, *, as_given: bool) -> int:
        """Start the command until it ends without a fault of a machine; return the exit code.

        That is AGAIN if too few hosts are left. After code 0, nothing of the run is left in the
        nodes' memory. The first start changes nothing if all is `as_given`.
        """
        code = self._run(as_given=as_given)
        if code == 0 and (local := self._notes.local) is not None:
            self._answering.remove(str(local))
        return code

    def _run(self, *, as_given: bool) -> int:
        why = ""
        while True:
            code, verdict, further = self._start(why, as_given=as_given)
            if self._signals.first and verdict.by == _OWN:  # what was told to end did not
                _say(f"ended by force: {verdict.what}")
                self._answering.free(str(self._folder), enough=0)
                return self._signalled
            if self._signals.first or verdict.fault is False:
                if code and not self._signals.first:
                    _say(f"not started again: {verdict.said}, which is no fault of a machine")
                return code
            ended = time.monotonic()
            free = self._answering.free(str(self._folder), enough=self._enough(verdict))
            silent = ", ".join(host.name for host in self._hosts if host not in free)
            if verdict.fault is None and not silent:
                _say(f"not started again: {verdict.what}, and every host answers")
                return code or 1
            reasons = [f"no answer from {silent}" if silent else "", verdict.fault and verdict.said]
            why = "; ".join(filter(None, reasons))
            if stuck := self._stuck(further, silent):
                _say(f"not started again: {stuck}; the last: {why}")
                return code or 1
            blamed = {host for host in free if {host.name, free[host]} & {*verdict.hosts}}
            chosen = choose(self._hosts, list(free), blamed, self._full)
            if self._command.hosts and len(chosen) < self._least:
                _say(
                    f"not started again: {why}; of {len(self._command.hosts)} hosts, {len(chosen)} "
                    f"are left, and {self._least} are needed (--nodes MIN:MAX goes on with fewer)"
                )
                return AGAIN
            if self._signals.first:  # while the hosts were asked
                return self._signalled
            as_given = as_given and chosen == self._hosts
            self._hosts = chosen if self._command.hosts else []
            why += f"; looking at hosts took {time.monotonic() - ended:.1f} s"

    def _stuck(self, further: bool, silent: str) -> str:
        """Count the starts that do not get on; return in words that there are too many, or "".

        One that took steps, and lost a host, is not to blame, nor one that took more steps than
        the start before.
        """
        steps, before = self._steps or 0, self._steps_before
        self._steps_before = steps
        more = before is not None and steps > before
        self._alike = 0 if further or more or (silent and steps) else self._alike + 1
        if self._alike < _MOST_ALIKE:
            return ""
        missed = f"came beyond step {self._highest}" if self._highest else "ended well"
        return f"none of {_MOST_ALIKE} starts in a row {missed}"

    @property
    def _signalled(self) -> int:
        """The exit code after a signal, if the command has none."""
        return 130 if self._signals.first == SIGINT else AGAIN

    def _enough(self, verdict: EndCause) -> int:
        """Return how many answers are enough: as many as hosts are used, or ranks say are left.

        If nobody says why a start has ended, all are: one that does not answer is the cause.
        """
        if verdict.fault is None:
            return len(self._command.hosts)
        silent = len(verdict.hosts) if verdict.silent else 0
        return max(self._least, (len(self._hosts) or self._full) - silent)

    def _start(self, why: str, *, as_given: bool) -> tuple[int, EndCause, bool]:
        """Run the command once; return its exit code, the verdict, and whether it came further.

        That is, whether it took steps that are known to be beyond those of all starts before.
        """
        self._number += 1
        number = self._number
        if why:
            on = f" on {', '.join(host.name for host in self._hosts)}" if self._hosts else ""
            _say(f"start {number}{on}: {why}")
        self._notes.begin_start(number)
        environment = {**os.environ, VARIABLE: str(self._folder)}
        if number > 1:  # Slurm keeps what a former step had until it has given up its lost node
            environment["SLURM_OVERLAP"] = "1"
        start = Start(self._words(as_given=as_given), environment)
        self._signals.direct(start.process)
        met, lost = False, EndCause(None, "")
        self._steps = None

        def look() -> None:
            nonlocal met, lost
            self._look_at_steps()
            met = met or bool(self._steps or self._notes.run)
            hosts, when = self._in_doubt(start, met=met)
            if start.lost:
                self._answering.begin(str(self._folder))
            elif not when:
                self._answering.watch_no_more()
            elif silent := self._answering.silent(str(self._folder), hosts):
                names = tuple(host.name for host in silent)
                what = f"{when}, {', '.join(names)} did not answer {SILENT} times"
                lost = EndCause(True, what, _OWN, names)
                self._answering.begin(str(self._folder))
                start.end()

        code = start.wait(look)
        self._answering.watch_no_more()
        self._signals.direct(None)
        self._look_at_steps()
        evidence = Evidence.of(self._notes.run)
        said = judge(code, start.output, evidence.summary)
        verdict = lost if lost.fault else evidence.judge(said)
        if code == 0 and verdict.fault is None:
            verdict = EndCause(False, "the command has ended well", "the exit code")
        if verdict.fault is False and verdict.what.partition(" with ")[0] in start.output:
            verdict = replace(verdict, what="the error above")
        if self._steps is None:
            return code, verdict, False
        before = self._highest
        self._highest = max(before, evidence.last_step)
        return code, verdict, self._highest > before

    def _look_at_steps(self) -> None:
        """Note when the number of steps has changed, and tell of the first step of a later start.

        By the clock of this host: that of rank 0 may differ.
        """
        steps, now = self._notes.steps, time.monotonic()
        if steps is None or steps == self._steps:
            return
        if self._steps is None and self._number > 1:
            since = self._step_at
            idle = f"; nothing was trained for {now - since:.1f} s" if since else ""
            _say(f"start {self._number} trains{idle}")
        self._steps, self._step_at = steps, now

    def _in_doubt(self, start: Start, *, met: bool) -> tuple[Sequence[Host], str]:
        """Return the hosts that are to be asked whether they are lost, and when that is; or "".

        Once ranks have met, they notice most losses themselves, but not that a node is stopped.
        Only they know that others wait for it, and only the host whether a call keeps the
        interpreter.
        """
        if not self._hosts:
            return [], ""
        signals = self._signals  # after one, mpirun may wait for a host that is lost
        if signals.first is not None and time.monotonic() > signals.first_at + SIGNALLED_S:
            return self._hosts, f"{SIGNALLED_S:.0f} s after {signals.first.name}"
        if not met:
            return self._hosts, "before the ranks had met"
        since = max(time.monotonic() - _WORD_S, self._step_at or -math.inf)
        if start.silent_at <= since:
            return [], ""
        named, names = {*start.silent}, self._answering.names
        hosts = [host for host in self._hosts if {host.name, names.get(host, "")} & named]
        return hosts, "while ranks waited for it"

    def _words(self, *, as_given: bool) -> list[str]:
        """Return the command on the hosts of this start."""
        words = list(self._command.words)
        if self._hosts and not as_given:
            words = self._command.on(
                self._hosts, self._full, open_mpi=self._open_mpi, write=self._write_hosts
            )
        return [words[0], *_FORWARDED, *words[1:]] if self._open_mpi else words

    def _write_hosts(self, text: str) -> Path:
        path = self._folder / "hosts"
        path.write_text(text)
        return path


def _is_open_mpi(program: str) -> bool:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False
        )
        return "Open MPI" in done.stdout
    return False


def _say(text: str) -> None:
    print(f"mntrain: launch: {text}", file=sys.stderr, flush=True)
