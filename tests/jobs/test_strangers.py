"""Connections of another user to the ports of a job."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from job import SMALL, completed, metrics, summary
from launch import mpirun

LIMIT, CONNECTIONS, STEPS = 1024, 1020, 6
# With these the MPI library opens no port in the ranks, so that all of them are mntrain's.
NO_PORTS = {"UCX_TLS": "self,sm", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}

# Holds as many connections to a port as it can, and opens others for those that are closed, until
# the port is closed or its input ends.
FLOOD = """
import os, selectors, socket, sys
address, count = ("127.0.0.1", int(sys.argv[1])), int(sys.argv[2])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
selector, held, opened = selectors.DefaultSelector(), 0, 0
selector.register(sys.stdin, selectors.EVENT_READ)
while True:
    while held < count:
        own = socket.socket()
        own.settimeout(0.5)
        try:
            own.connect(address)
        except ConnectionRefusedError:
            print("closed", flush=True)
            sys.exit()
        except OSError:
            own.close()
            break
        selector.register(own, selectors.EVENT_READ)
        held, opened = held + 1, opened + 1
        if opened == count:
            print("flooded", flush=True)
    for key, _ in selector.select(0.05 if held < count else None):
        if key.fileobj is sys.stdin:
            sys.exit()
        selector.unregister(key.fileobj)
        key.fileobj.close()
        held -= 1
"""

# A rank with few descriptors. It connects to rank 0 only when a checkpoint was saved under the
# flood, which keeps the port open so long.
RANK = f"""
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from mntrain.watchdog.side_channel import SideChannel

def wait_for(path):
    end = time.monotonic() + 90
    while not Path(path).exists():
        assert time.monotonic() < end, f"no {{path}}"
        time.sleep(0.02)

def late(self, monitor, where, connect=SideChannel.connect):
    wait_for("run/checkpoints/step-{STEPS - 2:08}")
    connect(self, monitor, where)

SideChannel.connect = late
if __name__ == "__main__":
    from mntrain.__main__ import main
    sys.exit(main())
"""

TASK = """
from pathlib import Path
from mntrain.tasks.lm import LanguageModel
from rank import wait_for

class Waits(LanguageModel):
    '''Trains and saves while the port is open and flooded, and ends when it is closed.'''

    def loss(self, model, batch):
        wait_for("flooded")
        if len(list(Path("run/checkpoints").glob("step-????????"))) > 1:
            wait_for("closed")
        return super().loss(model, batch)
"""


class Strangers:
    """Another user's processes, one for each port of the ranks that run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.floods, self._end = folder, {}, threading.Event()
        self._threads = [threading.Thread(target=self._run)]

    def __enter__(self):
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._threads[0].join()
        for flood in self.floods.values():
            flood.stdin.close()
        for thread in self._threads[1:]:
            thread.join()
        for flood in self.floods.values():
            flood.wait()

    def _run(self):
        while not self._end.wait(0.05):
            for port in ports(self.folder) - self.floods.keys():
                number = str(int(port.rpartition(":")[2], 16))
                words = [sys.executable, "-c", FLOOD, number, str(CONNECTIONS)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                self.floods[port] = flood = subprocess.Popen(words, **pipes)
                self._threads.append(threading.Thread(target=self._listen, args=(flood,)))
                self._threads[-1].start()

    def _listen(self, flood):
        for line in flood.stdout:
            (self.folder / line.strip()).touch()
        flood.stdout.close()


def ports(folder: Path) -> set[str]:
    """The addresses and ports at which the ranks in a folder listen, as the kernel writes them."""
    sockets: dict[bool, set[str]] = {True: set(), False: set()}  # of ranks, of other processes
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = (process / "cmdline").read_bytes().split(b"\0")
            rank = words[1:2] == [b"rank.py"] and Path(os.readlink(process / "cwd")) == folder
            sockets[rank] |= {os.readlink(file) for file in (process / "fd").iterdir()}
    own = sockets[True] - sockets[False]  # MPICH's ranks inherit the one of mpirun
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()
    ]
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own}


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="becomes another user")
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the ports from /proc")
@pytest.mark.thorough
def test_a_flood_by_another_user_loses_nothing_and_reads_nothing(tmp_path):
    data = tmp_path / "texts"
    data.mkdir()
    for number in range(80):  # more files than a rank keeps open
        (data / f"{number}.txt").write_text(
            f"{number} and {number + 1} make {2 * number + 1}\n" * 3
        )
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "waits.py").write_text(TASK)
    words = ["--data.path", "texts", "--run.dir", "run", *SMALL, "--train.steps", str(STEPS)]
    words += ["--task", "waits:Waits", "--checkpoint.every", "2"]
    command = ["sh", "-c", 'umask 077; exec "$@"', "sh", sys.executable, "rank.py", *words]
    with Strangers(tmp_path) as strangers:
        result = mpirun(2, command, cwd=tmp_path, timeout=150, env=NO_PORTS)
    completed(result)
    assert len(strangers.floods) == 1, strangers.floods.keys()  # of rank 0
    assert next(iter(strangers.floods)).startswith("0100007F:")  # loopback
    assert summary(tmp_path)["status"] == "completed"
    assert len(metrics(tmp_path)) == STEPS
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (2, 4, 6)], result.report()
    assert "warning" not in result.stderr
    made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert (tmp_path / "run" / "recorder" / "rank-00001.bin") in made
    assert {
        path.name: oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o077
    } == {}
