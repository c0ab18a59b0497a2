"""Test of an MPI library with device memory, in a child process that may crash.

    python -m mntrain.comm.probe_process DEVICE

The child is an MPI world of one rank. It sends itself messages in device memory, of sizes on both
sides of the limits at which an MPI changes its protocol, and compares what has arrived. An MPI
library that takes a device address for a host address crashes. The child prints one line per size
as soon as the size is done, so that the parent can name the size at which it crashed or hung.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import torch

from mntrain.comm import mpi

SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes
TIMEOUT_S = 60.0
CHILD = (sys.executable, "-m", "mntrain.comm.probe_process")
# Variables that launchers set for their ranks; with them the child would join the job's world.
LAUNCHER_VARIABLES = re.compile(
    "PMI|PRTE_|SLURM_|HYDRA|HYDI_|MPI_LOCAL|MV2_|PALS_|ALPS_"
    # A user's settings for Open MPI begin with OMPI_MCA_, but mpirun sets a few of these as well.
    "|OMPI_(?!MCA_)|OMPI_MCA_(orte|ess|pmix|prte|initial_wdir)"
)


def probe_device_memory(
    device: str, command: Sequence[str] = CHILD, timeout_s: float = TIMEOUT_S
) -> str:
    """Return why the MPI of this rank cannot use memory of a device; "" if it can. Local.

    Takes some seconds, for the start of torch and MPI, and at most `timeout_s`.
    """
    try:
        child = subprocess.run(
            [*command, device],
            env=child_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode(errors="replace") if expired.stdout else ""
        return f"its MPI hung with device memory at {_next_size(output)}"
    except OSError as error:
        return f"the probe cannot start: {error}"
    return _verdict(child.returncode, child.stdout, child.stderr)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which MPI starts a world of one, with the user's MPI settings."""
    return {
        name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.match(name)
    }


def _verdict(code: int, output: str, errors: str) -> str:
    """Return the reason that follows from a child's exit code and output; "" for success."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"its MPI crashed with device memory ({name}) at {_next_size(output)}"
    if code:
        message = (errors.strip().splitlines() or ["no message"])[-1]
        return f"its MPI failed with device memory at {_next_size(output)}: {message}"
    wrong = [line.split()[0] for line in output.splitlines() if line.endswith("wrong")]
    if wrong:
        return f"its MPI corrupts messages in device memory of {', '.join(wrong)} bytes"
    if _sizes_done(output) < len(SIZES):
        return "its MPI ended before the probe was complete"
    return ""


def _sizes_done(output: str) -> int:
    return sum(line.endswith(("right", "wrong")) for line in output.splitlines())


def _next_size(output: str) -> str:
    done = _sizes_done(output)
    return f"{SIZES[done]} bytes" if done < len(SIZES) else "its end"


def main() -> None:
    """Run the child: send and compare messages, size by size."""
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world, _ = mpi.start()
    for nbytes in SIZES:
        sent = torch.arange(nbytes, device=device).to(torch.uint8)
        arrived = torch.zeros_like(sent)
        _synchronize(device)
        requests = [world.receive(0, _message(arrived)), world.send(0, _message(sent))]
        for request in requests:
            request.wait()
        _synchronize(device)
        print(f"{nbytes} {'right' if torch.equal(arrived, sent) else 'wrong'}", flush=True)


def _message(tensor: torch.Tensor) -> "mpi.Bytes":
    return tensor if tensor.is_cuda else tensor.numpy()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
