"""The hosts that answer, and on which nothing of a former start is left."""

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from mntrain.launch.hosts import Host, of_brokers
from mntrain.recorder.launch_notes import VARIABLE

LIMIT_S = 17.0  # for all hosts
ENOUGH_S = 3.0  # after which silent hosts are not waited for if enough others have answered
SILENT = 2  # questions in a row that a host leaves unanswered before it counts as lost
_ASK_S = 3.0  # from one of them to the next, at least
_PART, _MOST_S = 0.1, 30.0  # of the time for which hosts are asked, and at most
_AT_ONCE = 256  # hosts that are asked
_MARK = "mntrain-answers"
# The processes of former starts have the variable with this launch's folder ($0), those of mpirun
# on this host, too; containers of other process ids see to their own. Stopped ones die of SIGKILL.
# What waits for a file server does not, and such a host does not count as answering.
_IDS = f"""
ids() {{
    grep -lzxsF {VARIABLE}="$0" /proc/[0-9]*/environ | while IFS=/ read -r _ _ id _; do
        [ "$(readlink /proc/$id/ns/pid)" != "$(readlink /proc/self/ns/pid)" ] || echo $id
    done
}}
"""
_ENDING = f"""{_IDS}
for i in 1 2 3 4 5 6 7 8 9 10; do
    left=$(ids)
    [ "$left" ] || {{ echo {_MARK} "$(uname -n)"; exit; }}
    kill -s KILL $left 2>/dev/null
    sleep 0.$i
done
"""
# This host is asked whether anything can be asked from here. Any other does not answer either while
# its processes are stopped.
_ANSWERING = f'echo {_MARK} "$(uname -n)"'
_LOOKING = f"""{_IDS}
for id in $(ids); do
    ! grep -qs '^State:.T (stopped)' /proc/$id/status || exit 1
done
{_ANSWERING}
"""
_REMOVING = 'rm -rf -- "$0"'
_HERE = Host("localhost")


class Hosts:
    """A way to hosts. `agent` stands in place of ssh, if it is not empty.

    `all` are the hosts, and `environment` that in which they are asked.

    Commands are sent by srun in an allocation of Slurm, by blaunch in one of LSF, by `flux exec`,
    and otherwise by ssh, as mpirun does; to this host by none of them. ssh gives the command to a
    shell, and so would blaunch without -no-shell (man ssh, blaunch, flux-exec).
    """

    def __init__(self, hosts: Sequence[Host], environment: Mapping[str, str], agent: str) -> None:
        self.all, self._agent = hosts, agent
        self.names: dict[Host, str] = {}
        """The names that hosts have for themselves: this one, and those that have ever answered."""
        self._early: _Question | None = None
        self._regular: list[_Question] = []  # those of `silent`, the newest last
        self._since = 0.0  # when the first of them began
        own = socket.gethostname()
        self._here = {own, own.partition(".")[0], "localhost", "127.0.0.1"}
        self.environment = {k: v for k, v in environment.items() if k != VARIABLE}
        self._brokers = [] if agent else of_brokers(environment)
        self._slurm = "SLURM_JOB_ID" in environment and not agent
        if self._slurm:  # the shape of the job's steps is not that of the question
            kept = ("SLURM_JOB_ID", "SLURM_CONF")
            self.environment = {
                name: value
                for name, value in self.environment.items()
                if not name.startswith("SLURM_") or name in kept
            }

    def words(self, host: Host, script: str, argument: str) -> list[str]:
        """Return a command line that runs a script of sh on a host, with an argument as $0."""
        script_words = ["sh", "-c", script, argument]
        if host.name in self._here:
            return script_words
        if self._slurm:
            options = ["--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none"]
            return ["srun", *options, "--quiet", f"--nodelist={host.name}", *script_words]
        if "LSB_JOBID" in self.environment and not self._agent:
            return ["blaunch", "-no-shell", host.name, *script_words]
        if host.name in self._brokers:
            rank = self._brokers.index(host.name)
            return ["flux", "exec", "-n", f"--rank={rank}", *script_words]
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={LIMIT_S:.0f}"]
        ssh = shlex.split(self._agent) if self._agent else ["ssh", *options]
        # Another shell may get the line, such as csh, to which ! and ends of lines mean something.
        octal = "".join(
            c if c.isascii() and (c.isalnum() or c in " /._-") else f"\\0{ord(c):03o}"
            for c in script
        )
        decoding = 'eval "$(printf %b "$1")"'
        return [*ssh, host.name, shlex.join(["sh", "-c", decoding, argument, octal])]

    def begin(self, folder: str) -> None:
        """Begin to ask which hosts answer, for the next `free`. Returns at once."""
        self._early = self._early or _Question(self, self.all, _LOOKING, folder, _ANSWERING)

    def silent(self, folder: str, hosts: Sequence[Host]) -> list[Host]:
        """Return those of some hosts that have left SILENT questions in a row unanswered.

        They have answered before: others may not be reached from here at all. A host does not
        answer on which processes of the launch with a folder are stopped. Called again and again;
        returns at once, and asks anew after _ASK_S, whether or not all have answered: so the second
        question to a host that is cut off is over with the first. No other host is asked, for that
        may be one that was lost earlier. The longer it goes on, the rarer it asks, up to _MOST_S.
        """
        now = time.monotonic()
        if not self._regular:
            self._since = now
        apart_s = min(_MOST_S, max(_ASK_S, (now - self._since) * _PART))
        if not self._regular or now > self._regular[-1].began + apart_s:
            self._regular.append(_Question(self, hosts, _LOOKING, folder, _ANSWERING))
            if len(self._regular) > SILENT and self._regular[0].over:
                self._regular.pop(0).end()
        # A question to which nobody answers could not be asked from here. Nor could one to all
        # other hosts, if these are several: a busy scheduler or file server delays them all.
        others = {host for host in self.names if host.name not in self._here}
        several = len(others) > 1 and others <= {*hosts}
        telling = others if several else {_HERE, *hosts}
        heard = [asked for asked in self._regular if asked.found.keys() & telling]
        return [host for host in hosts if host in self.names and _is_silent(host, heard)]

    def watch_no_more(self) -> None:
        """End the questions of `silent`."""
        for asked in self._regular:
            asked.end()
        self._regular = []

    def free(self, folder: str, *, enough: int) -> dict[Host, str]:
        """End what the launch with a folder has left on the hosts; return those that answer.

        With each the name that it has for itself. Takes LIMIT_S at most. Once `enough` hosts have
        answered, others are not waited for that have not since ENOUGH_S, from `begin` on.
        """
        asked, early = _Question(self, self.all, _ENDING, folder), self._early

        def over() -> bool:
            now, answered = time.monotonic(), asked.found.keys()
            expected = early.found.keys() if early else answered
            silent_s = now - (early or asked).began
            late = silent_s > ENOUGH_S and len(answered) > enough and expected <= answered
            return late or asked.over

        wait_until(over)
        found = asked.end()
        if early:
            early.end()
        self._early = None
        return {host: found[host] for host in self.all if host in found}

    def remove(self, folder: str) -> None:
        """Remove a folder on all hosts that answer. Takes LIMIT_S at most."""
        asked = _Question(self, self.all, _REMOVING, folder)
        wait_until(lambda: asked.over)
        asked.end()


class _Question:
    """A script that runs on some hosts and this one, for LIMIT_S at most.

    This one runs `here` instead, if that is given.
    """

    def __init__(
        self, way: Hosts, hosts: Sequence[Host], script: str, argument: str, here: str = ""
    ) -> None:
        self.hosts, asked = hosts, [(_HERE, here or script), *((host, script) for host in hosts)]
        self.began = time.monotonic()
        self.found: dict[Host, str] = {}  # the names of hosts that have answered so far
        self._running: list[subprocess.Popen[str]] = []
        self._pool = ThreadPoolExecutor(min(len(asked), _AT_ONCE))
        self._asking = [
            self._pool.submit(self._ask, host, way.words(host, words, argument), way)
            for host, words in asked
        ]
        self._of_hosts = dict(zip(hosts, self._asking[1:], strict=True))

    @property
    def late(self) -> bool:
        """True if the time is over."""
        return time.monotonic() > self.began + LIMIT_S

    @property
    def over(self) -> bool:
        """True if all have answered, or the time is over."""
        return self.late or all(one.done() for one in self._asking)

    def is_over(self, host: Host) -> bool:
        """Return whether one of the hosts has answered or failed to, or the time is over."""
        return self.late or self._of_hosts[host].done()

    def end(self) -> dict[Host, str]:
        """Ask no more; return the names of the hosts that have answered."""
        answered = dict(self.found)
        for one in [*self._running]:
            if one.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
        self._pool.shutdown(wait=False, cancel_futures=True)
        return answered

    def _ask(self, host: Host, words: Sequence[str], way: Hosts) -> None:
        with suppress(OSError):
            done = subprocess.Popen(
                words,
                env=way.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                text=True,
            )
            self._running.append(done)
            with suppress(subprocess.TimeoutExpired):
                out, _ = done.communicate(timeout=self.began + LIMIT_S - time.monotonic())
                marked = [line.split() for line in out.splitlines() if line.startswith(_MARK)]
                if done.returncode == 0 and marked:
                    self.found[host] = way.names[host] = marked[-1][-1]


def _is_silent(host: Host, questions: Sequence[_Question]) -> bool:
    """Return whether a host has left SILENT of the questions unanswered since its last answer."""
    since: list[tuple[_Question, bool]] = []
    for asked in questions:
        if host in asked.hosts:
            over = asked.is_over(host)  # looked at first: an answer may come at any moment
            since = [] if host in asked.found else [*since, (asked, over)]
    first_is_late = bool(since) and since[0][0].late
    return len(since) >= SILENT and (first_is_late or sum(over for _, over in since) >= SILENT)


def wait_until(over: Callable[[], bool]) -> None:
    """Wait until something is true, looking often."""
    while not over():
        time.sleep(0.05)
