"""The namespaces of one emulated node, and the process that keeps them."""

import contextlib
import functools
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

TOOLS = ("unshare", "nsenter", "mount", "env", "sh")  # all of util-linux and coreutils, and a shell
_WAIT = 20.0  # seconds until a killed node that is not gone is reported

# The first process of a node. $1: the node's name; $2: its /etc/hosts; $3: how long it lingers.
_FIRST = """
set -e
read -r pid rest </proc/self/stat  # as the machine counts: /proc is not yet the node's
mount -t proc proc /proc
mount -t sysfs sysfs /sys  # UCX looks for interfaces there
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$2" /etc/hosts
echo "$1" >/proc/sys/kernel/hostname
exec 3<&0
cat <&3 >/dev/null &  # ends with the owner
echo "$pid"
wait $!  # and meanwhile reaps the orphans that come to a first process
sleep "$3"
"""


def run(command: Sequence[str], text: str | None = None) -> str:
    """Run `command` with `text` as its input: its output, or RuntimeError with what it said."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


class Namespaces:
    """New network, UTS, IPC, PID and mount namespaces; their only interface is `lo`, and down.

    name: the host name inside; hosts: the file that is /etc/hosts inside; linger: for how many
    seconds it outlives this process.

    The constructor starts the first process and does not wait for it: `pid` does. That process
    waits on a pipe whose other end only this process holds. However this process ends, the pipe
    closes, the first process returns, and the kernel takes the others, the namespaces and their
    interfaces with it. No namespace has a name on disk.
    """

    def __init__(self, name: str, hosts: Path, linger: int = 0) -> None:
        self.name = name
        kinds = ("--net", "--uts", "--ipc", "--mount", "--pid")
        first = ["sh", "-c", _FIRST, "sh", name, str(hosts), str(linger)]
        self._process = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", *first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C at a terminal is for the owner alone
        )

    @functools.cached_property
    def pid(self) -> int:
        """The first process as the machine counts; RuntimeError where namespaces are refused."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if not said.isdecimal():
            raise RuntimeError(f"cannot make the namespaces of {self.name}: {said}")
        return int(said)

    def enter(self) -> list[str]:
        """The command line to put before a command, to run it in all of the namespaces."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--"]

    def network(self, tool: str, *lines: str) -> None:
        """Run the `lines` of `ip` or `tc` in the network namespace alone."""
        run(["nsenter", "-t", str(self.pid), "-n", "--", tool, "-batch", "-"], "\n".join(lines))

    def kill(self) -> None:
        """End every process inside at once; `wait` for it."""
        if self._process.poll() is None:
            # A first process that never was, or that is gone by itself, is none to kill.
            with contextlib.suppress(RuntimeError, ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
                self._kill_stopped_parents()

    def _kill_stopped_parents(self) -> None:
        """Kill each nsenter that has stopped with its child, of which it would see no end."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line, state = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
                if line.startswith(f"nsenter\0-t\0{self.pid}\0".encode()) and ") T " in state:
                    os.kill(int(entry.name), signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the last process inside is gone, after `kill`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(_WAIT)
