"""What MPI does with device memory, found out in a process that may crash.

    python -m mntrain.transport.probe_process DEVICE

A world of one sends itself messages from device memory to device memory, of sizes on both sides of
where an MPI changes its ways, and looks at what has arrived. An MPI that takes the address for one
of host memory dies of it; one that copies wrongly is found out. Prints a line for every size, as
soon as it is known: so what crashed is what comes after the last line.
"""

import sys

import torch

from mntrain.comm import mpi

SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes


def main() -> None:
    """Send and compare, size by size."""
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world, _ = mpi.start()
    for nbytes in SIZES:
        sent = torch.arange(nbytes, device=device).to(torch.uint8)
        arrived = torch.zeros_like(sent)
        wait_for(device)
        flights = [world.receive(0, as_message(arrived)), world.send(0, as_message(sent))]
        for flight in flights:
            flight.wait()
        wait_for(device)
        equal = torch.equal(arrived, sent)
        print(f"{nbytes} {'right' if equal else 'wrong'}", flush=True)


def as_message(tensor: torch.Tensor) -> "mpi.Bytes":
    """A tensor of bytes as MPI takes it."""
    return tensor if tensor.is_cuda else tensor.numpy()


def wait_for(device: torch.device) -> None:
    """Return when the device is done: nothing else uses it here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
