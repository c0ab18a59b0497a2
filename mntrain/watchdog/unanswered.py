"""TCP connections of this node's ranks to which the other node does not answer. Linux only.

The kernel's tables (/proc/net/tcp) tell how often it has sent the same again without any
acknowledgement. A process that is busy, stopped or late does not look like this: its kernel
acknowledges. A firewall that drops packets, a wrong interface, a smaller MTU on the way and a link
that is down do.

MPI_Init keeps the interpreter of a rank, so during the start this file runs as a program of its own
beside the ranks of a node (`start_timer.network_watched`). It needs the standard library alone.
"""

import fcntl
import math
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SURE_S = 10.0  # without any progress, until unanswered connections are told
WARN_S = 20.0  # until a wait is told in which none is unanswered
LASTING_S = 2.5  # that a connection must be unanswered: TCP bridges shorter outages
_LOOK_S = 1.0
_APART_S, _APART = 0.4, 4  # between the ends that the first ranks make: one sentence is enough
_NAME_S = 1.0  # for a name server
_MOST_SHOWN = 8  # addresses
_MPICH_DAEMON = "hydra_pmi_proxy"
_SYN_SENT, _ESTABLISHED = "02", "01"
_RESENDING, _PROBING = "01", "04"  # timers
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
_GLOBAL, _TEMPORARY = "00", 0x01  # the scope of an IPv6 address, and a flag
INTERFACES = (
    "UCX_NET_DEVICES=NAME or FI_TCP_IFACE=NAME (MPICH), OMPI_MCA_btl_tcp_if_include=NAME (Open MPI)"
)


class Connection(NamedTuple):
    """A TCP connection in the kernel's table. `opened`: the other node has answered at first."""

    local: str  # address
    local_port: int
    remote: str
    port: int
    opened: bool


def read_table(text: str) -> Iterator[tuple[Connection, str, bool]]:
    """Yield the connections between hosts in a text like /proc/net/tcp or tcp6. Pure.

    With each its inode, and whether the same was sent several times since the last answer.
    """
    for line in text.splitlines()[1:]:
        words = line.split()
        state, timer = words[3], words[5].partition(":")[0]
        local, _, local_port = words[1].partition(":")
        remote, _, port = words[2].partition(":")
        if state not in (_SYN_SENT, _ESTABLISHED) or local == remote:
            continue
        opened = state == _ESTABLISHED
        resent, probed = int(words[6], 16), int(words[8])
        resends = timer == _RESENDING and resent >= 1 + opened
        probes = timer == _PROBING and probed >= 2 and not words[4].startswith("00000000:")
        ends = _address(local), int(local_port, 16), _address(remote), int(port, 16)
        yield Connection(*ends, opened), words[9], resends or probes


def _address(digits: str) -> str:
    """Return the address that the kernel writes as hexadecimal words in the order of this CPU."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")


class Unanswered:
    """The unanswered connections of some processes of this node over time."""

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = pids
        # With the times at which it was first and last found unanswered, without an answer since.
        self._found: dict[Connection, tuple[float, float]] = {}

    def look(self, now: float) -> None:
        """Read the tables. Takes about 0.1 ms, and 10 ms with some thousand connections."""
        own: set[str] | None = None
        for name in ("tcp", "tcp6"):
            with suppress(OSError):
                for connection, inode, unanswered in read_table(
                    Path(f"/proc/self/net/{name}").read_text()
                ):
                    if not unanswered:
                        self._found.pop(connection, None)
                        continue
                    own = _sockets(self._pids) if own is None else own
                    if inode in own:
                        first, _ = self._found.get(connection, (now, now))
                        self._found[connection] = first, now

    def lasting(self, seconds: float = LASTING_S, since: float = 0.0) -> list[Connection]:
        """Return those that were unanswered for some seconds, and found so at `since` or later.

        Also if they are closed by now.
        """
        found = self._found.items()
        return [key for key, (first, last) in found if last - first >= seconds and last >= since]


def _sockets(pids: Collection[int]) -> set[str]:
    """Return the inodes of the sockets of some processes."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target.startswith("socket:["):
                        found.add(target[8:-1])
    return found


def describe(found: Sequence[Connection]) -> str:
    """Return in one sentence, and the fix, which nodes do not answer; "" if none. Local.

    Takes up to a second if names must be asked for.
    """
    unopened = [connection for connection in found if not connection.opened]
    if not (shown := unopened or list(found)):
        return ""
    here, first = socket.gethostname(), shown[0]
    names = _names(list(dict.fromkeys(connection.remote for connection in shown)))
    own = [(name, mtu) for name, (address, mtu) in interfaces().items() if address == first.local]
    interface, mtu = own[0] if own else ("address", 0)
    via = f" from {interface} ({first.local}, MTU {mtu or 'unknown'})"
    if unopened:
        return (
            f"{here} cannot connect to {names}: nothing answers what it sends{via} to TCP port "
            f"{first.port}. Fix: let firewalls pass TCP between all nodes of the job (the page for "
            f"administrators lists the ports), or choose the interface that joins them: "
            f"{INTERFACES}"
        )
    size = f"ping -M do -s {mtu - 28} {first.remote}" if mtu else f"ping -M do {first.remote}"
    return (
        f"{here} has connected to {names}, but what it sends now{via} is not acknowledged: small "
        "messages pass and large ones do not, or the link has gone down. Fix: give the interfaces "
        f"and switches between the nodes the same MTU ({size} must be answered), and check the "
        "link and the firewall"
    )


def refused_connections() -> int:
    """Return how many TCP connections of this host were refused so far; 0 if unknown. Local."""
    with suppress(OSError, ValueError):
        text = Path("/proc/self/net/snmp").read_text()
        names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        return int(dict(zip(names, values, strict=True))["AttemptFails"])
    return 0


def describe_refused(count: int) -> str:
    """Return in one sentence, and the fix, that MPI gave up after refused connections. Pure."""
    if count < 1:
        return ""
    return (
        f"TCP connections of {socket.gethostname()} were refused ({count}) while MPI connected the "
        "ranks, and it has ended them (its own message says more). Fix: let firewalls pass TCP "
        "between all nodes of the job instead of rejecting it (the page for administrators lists "
        f"the ports), or choose the interface that joins them: {INTERFACES}"
    )


def _names(addresses: Sequence[str]) -> str:
    """Return some addresses in words, the first with the name of its host if it is known."""
    names: list[str] = []
    call_for(_NAME_S, lambda: names.append(socket.gethostbyaddr(addresses[0])[0].partition(".")[0]))
    words = [f"{names[0]} ({addresses[0]})" if names else addresses[0]]
    words += addresses[1:_MOST_SHOWN]
    more = len(addresses) - _MOST_SHOWN
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def interfaces() -> dict[str, tuple[str, int]]:
    """Return the IPv4 address and the MTU of each interface of this host that has one, by name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            with suppress(OSError):  # an interface without an address, or no Linux
                address = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFMTU, request)
                mtu = int(struct.unpack_from("=i", reply, 16)[0])
                found[name] = socket.inet_ntoa(address), mtu
    return found


def ipv6_addresses() -> dict[str, str]:
    """Return an IPv6 address that other hosts reach of each interface of this host, by name."""
    found = {}
    with suppress(OSError):  # no Linux, or no IPv6
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, flags, name = line.split()
            if scope == _GLOBAL and not int(flags, 16) & _TEMPORARY:
                found[name] = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return found


def call_for(seconds: float, function: Callable[[], object]) -> None:
    """Call a function in a thread of its own, and wait for some seconds at most."""

    def call() -> None:
        with suppress(Exception):
            function()

    thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end
        call()
    else:
        thread.join(seconds)


def _siblings(pid: int) -> tuple[int, list[int]]:
    """Return a rank's parent, 0 if unknown, the rank and the other children of the parent."""
    parent = 0
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        parent = int(words[1])
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except (OSError, ValueError, IndexError):
        return parent, [pid]
    return parent, sorted({pid, *map(int, children.split())})


def _end_node(parent: int, siblings: Sequence[int]) -> None:
    """End the ranks of this node, one of which has ended before MPI had started, for MPICH.

    Its mpirun ends a job of which a rank was killed, or its daemon on a node. It lets the other
    ranks wait for one that has ended by itself at the start, as MPI ends ranks.
    """
    with suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() == _MPICH_DAEMON:
            time.sleep(_APART_S)  # for the daemon to forward the lines of this process
            for process in (*siblings, parent):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def main(words: Sequence[str]) -> None:
    """Watch the start of the ranks of this node until stdin ends; a line there tells of progress.

    The words are the process and number of a rank, the number of ranks on other nodes, the seconds
    without progress after which the rank is killed, or "inf", and those for which one connection
    must be unanswered until it is. If the rank ends without the line "end", MPI may have ended it
    since a node does not answer.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the rank ends this process
    pid, rank, others = map(int, words[:3])
    limit, lost_after = map(float, words[3:5])
    apart = _APART_S * min(rank, _APART)
    sure = SURE_S if limit == math.inf else min(SURE_S - 2, limit) + apart
    parent, siblings = _siblings(pid)
    unanswered, since, told = Unanswered(siblings), time.monotonic(), False
    refused = refused_connections()
    while True:
        if select.select([0], [], [], _LOOK_S)[0]:
            line = os.read(0, 4096)
            if not line and not told:
                silent = describe(unanswered.lasting(0.0))
                _print("error", silent or describe_refused(refused_connections() - refused))
            if not line:
                _end_node(parent, siblings)
            if not line or line.endswith(b"end\n"):
                return
            unanswered, since, told = Unanswered(siblings), time.monotonic(), False
        now = time.monotonic()
        unanswered.look(now)
        waited = now - since
        text = describe(unanswered.lasting()) if waited >= sure and not told else ""
        ends = bool(text) and limit < math.inf
        if not text and rank == 0:
            ends = waited >= limit
            if ends or (waited >= WARN_S and not told):
                text = _late(waited, others)
        if text:
            told = True
            _print("error" if ends else "warning", text)
        if told and not ends and (lost := unanswered.lasting(lost_after - _LOOK_S, now)):
            ends = True
            _print(
                "error",
                f"{socket.gethostname()} has had no answer from {lost[0].remote} for "
                f"{lost_after:g} s: the job ends (--comm.lost-after, or lost_after=)",
            )
        if ends:
            time.sleep(_APART_S)  # for the launcher to forward the line
            os.kill(pid, signal.SIGKILL)
            return


def _late(waited_s: float, others: int) -> str:
    """Return in one sentence that rank 0 waits, though no connection of its node is unanswered."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    return (
        f"rank 0 on {socket.gethostname()} has waited {waited_s:.0f} s for other ranks, of which "
        f"{others} run on other nodes{nodes and f' of {nodes}'}: they have not started yet, or "
        "cannot be reached. Fix: if they run, check the firewall, the interface ("
        f"{INTERFACES}) and the MTU between the nodes"
    )


def _print(kind: str, text: str) -> None:
    if text:
        with suppress(OSError):  # nobody reads it any more
            os.write(2, f"mntrain: {kind}: {text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
