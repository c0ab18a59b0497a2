"""Every Python process of a launch imports this file at its start, since the launcher puts the
folder on PYTHONPATH. On SIGRTMAX the process writes the stack of each of its threads to a file of
its own in the launcher's folder. The handler is C code: it needs no GIL, so a process that is stuck
in a library call answers too, and no permission to trace it is needed.
"""

import faulthandler
import os
import signal


def write_stacks_on_signal() -> None:
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "none"))
    path = f"{os.environ['MPI_LAUNCH_FOLDER']}/rank {rank}, process {os.getpid()}.stacks"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGRTMAX, file=descriptor, all_threads=True)


write_stacks_on_signal()
# A forked data-loader worker would write into its parent's file.
os.register_at_fork(after_in_child=write_stacks_on_signal)
