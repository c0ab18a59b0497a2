"""Children of ranks that end in every way: each has its exit code, and the job goes on.

The arguments are who starts MPI, and a folder. Each child prints "last words" in a handler of its
end, unless it leaves by the kernel alone.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

started_by = sys.argv[1]
if started_by in ("mpi4py", "script"):
    import mpi4py

    mpi4py.rc.finalize = started_by == "mpi4py"
    from mpi4py import MPI

    if started_by == "script":
        atexit.register(MPI.Finalize)

RANK = os.getpid()


@atexit.register
def last_words():
    if os.getpid() != RANK:
        os.write(1, b"last words\n")


import torch  # noqa: E402 - handlers that are registered first are called last
from torch.utils.data import DataLoader  # noqa: E402

import mntrain  # noqa: E402


def leave(code):
    raise SystemExit(code)


def fail():
    raise KeyError("in a child")


def fork_again():
    child = os.fork()
    sys.exit(1 + status_of(child) if child else 4)


def end_mpi():
    from mpi4py import MPI

    MPI.Finalize()


def close_world():
    world.close()


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


WAYS = {
    "sys.exit": (lambda: sys.exit(2), 2),
    "SystemExit": (lambda: leave("a reason"), 1),
    "an exception": (fail, 1),
    "an end without an error": (sys.exit, 0),
    "the end of the script": (lambda: None, 0),
    "os._exit": (lambda: os._exit(3), 3),
    "a child of its own": (fork_again, 5),
    "a signal": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "the end of MPI": (end_mpi, 0),
    "a world of its own": (mntrain.init, 1),
    "the end of the world": (close_world, 0),
}
SPOKEN = len(WAYS) - 2 + 1  # all but two, and the child's child


def rank():
    """Fork children; return True in the rank alone."""
    numbers = torch.ones(70_000)
    for way, (end, expected) in WAYS.items():
        child = os.fork()
        if child == 0:
            end()
            return False
        found = status_of(child)
        assert found == expected, (way, found)
        world.collectives.all_reduce(numbers).wait()

    def fork_in_thread():
        child = os.fork()
        if child:
            statuses.append(status_of(child))
        else:
            os._exit(6)  # by another end torch and CPython abort it, as without ranks

    statuses = []
    thread = threading.Thread(target=fork_in_thread)
    thread.start()
    thread.join()
    assert statuses == [6]
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(7,))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert subprocess.run(["sh", "-c", "exit 8"], check=False).returncode == 8
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    assert len(list(DataLoader(range(4), **options))) == 4
    assert world.sum(1.0) == world.size
    return True


with mntrain.init(device="cpu") as world:
    model = torch.nn.Linear(2, 1)
    optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)
    saved = world.checkpoints(sys.argv[2], model=model, optimizer=optimizer)
    with world.metrics(sys.argv[2]) as log, saved:
        log.log(1, loss=0.5)
        goes_on = rank()
    if goes_on:
        world.print(f"{SPOKEN * world.size} last words; the job goes on")
