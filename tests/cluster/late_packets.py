"""A node's network device whose packets leave later: the place of netem, which few kernels have.

    python late_packets.py NODE_PID SWITCH_PID DEVICE PORT MILLISECONDS

Makes the device in the node's network namespace and the port in the switch's, and passes packets
between both: what the node sends is late by so many milliseconds, and what it receives is not.
Prints "ready", and runs until it is ended.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

_TUNSETIFF, _TAP_WITHOUT_INFO = 0x400454CA, 0x1002
_LARGEST = 1 << 16  # bytes of a packet


def device(pid: str, name: str) -> int:
    """Make a device in the network namespace of a process; return its descriptor."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"no namespace of {pid}")
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(made, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_INFO))
    return made


def main() -> None:
    node_pid, switch_pid, name, port, milliseconds = sys.argv[1:]
    node, switch = device(node_pid, name), device(switch_pid, port)
    print("ready", flush=True)
    late_s, held = float(milliseconds) / 1e3, collections.deque[tuple[float, bytes]]()
    while True:
        left_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([node, switch], [], [], left_s)
        now = time.monotonic()
        if node in ready:
            held.append((now + late_s, os.read(node, _LARGEST)))
        if switch in ready:
            os.write(node, os.read(switch, _LARGEST))
        while held and held[0][0] <= now:
            os.write(switch, held.popleft()[1])


if __name__ == "__main__":
    main()
