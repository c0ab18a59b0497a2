"""Messages between the ranks of a job beside MPI, over TCP: they arrive while MPI is stuck.

A monitor is a rank to which the others connect. The state of a connection tells of its peer:

    closed              the process has ended
    not acknowledged    the node or its network is lost, or down for a while: lost after a limit
    open, no answer     the process is stopped, or the interpreter is held in C code

since a kernel acknowledges for a stopped process (keep-alive: RFC 1122, 4.2.3.6; user timeout: RFC
5482). Messages are JSON objects, one a line. Both ends prove first that they know the secret of the
job (HMAC-SHA256), which the ranks exchange over MPI:

    monitor     {"challenge": D}
    rank        {"rank": R, "proof": of D, "challenge": C}      then the rank is connected
    monitor     {"proof": of C}

Before its proof, a peer is a stranger, of which a monitor keeps STRANGERS at most: the oldest gives
way. Once all ranks are connected, the monitor stops listening.
"""

import errno
import fcntl
import hmac
import json
import math
import os
import resource
import secrets
import selectors
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mntrain.watchdog.unanswered import interfaces, ipv6_addresses

Message = dict[str, Any]
Address = tuple[str, int]  # at which a monitor listens: IPv4 or IPv6 address, and port

LOST_S = 20.0  # the default, until a node that does not acknowledge counts as lost
CONNECT_S = 3.0  # per address
STRANGERS = 64  # most connections that a monitor keeps without a proof
_STRANGE_S = 0.25  # that each of them has at least
_ACCEPT_S = 1e-3  # between two that are accepted
_GREETING_S = 10.0  # for the proofs, which a busy host takes long for
_MAX_GREETING, _MAX_LINE = 512, 1 << 20  # bytes
_PROBE_S, _MAX_PROBES, _MAX_S = 5, 127, 1e6  # of keep-alive; the last one bounds a time limit
_SURE_S = 2.0  # between the first look at a connection that may be lost and the last
_TCP_INFO = struct.Struct("=3xB20xI28xI")  # of linux/tcp.h: probes, unacked, last_ack_recv
_LOOPBACK = "127.0.0.1"
# In which users name the interfaces of MPI.
_INTERFACE_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")


class SideChannel:
    """The connections of one rank. Used by one thread.

    `listener` is a socket that listens if this rank is a monitor. `secret` is the job's. A
    connection ends with an error once the other node has acknowledged nothing for `lost_after`
    seconds.
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        listener: socket.socket | None,
        *,
        lost_after: float = LOST_S,
    ) -> None:
        self._rank, self._secret, self._listener = rank, secret, listener
        self.lost_after = lost_after
        self._connections: dict[int, _Connection] = {}
        self._strangers: list[_Connection] = []  # the oldest first
        self._early: list[_Connection] = []  # new ones to monitors
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._places = STRANGERS if soft < 0 else max(1, min(STRANGERS, soft // 16))
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._wake_writer.setblocking(False)
        for own in (self._wake_reader, listener):
            if own is not None:
                own.setblocking(False)
                self._selector.register(own, selectors.EVENT_READ)

    @property
    def peers(self) -> list[int]:
        """The ranks with an open connection."""
        return sorted(self._connections)

    @property
    def port(self) -> int:
        """The TCP port at which a monitor listens; 0 once it does not."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    @property
    def wake_descriptor(self) -> int:
        """A descriptor that ends `poll` when it is written to, as by `signal.set_wakeup_fd`."""
        return self._wake_writer.fileno()

    def connect(self, monitor: int, where: Address) -> None:
        """Connect to a monitor. Takes up to CONNECT_S and the greeting.

        Raises OSError if it does not answer as such; then it may be tried again.
        """
        own = socket.create_connection(where, CONNECT_S)
        try:
            connection = _Connection(own, _MAX_LINE, self.lost_after)
            given = connection.read_line(_GREETING_S)["challenge"]
            proof = self._proof("rank", self._rank, given)
            challenge = connection.challenge
            connection.send({"rank": self._rank, "proof": proof, "challenge": challenge})
            answer = connection.read_line(_GREETING_S)
            if not _equal(answer["proof"], self._proof("monitor", monitor, challenge)):
                raise ValueError("another secret")
        except (KeyError, ValueError) as error:
            own.close()
            raise OSError(f"{where} is no monitor of this job") from error
        except OSError:
            own.close()
            raise
        own.setblocking(False)
        connection.rank, self._connections[monitor] = monitor, connection
        self._selector.register(own, selectors.EVENT_READ, connection)
        self._early.append(connection)  # which may have sent more with its proof

    def send(self, peer: int, message: Message) -> None:
        """Send a message to a connected rank; do nothing if it is not connected. Never blocks."""
        if connection := self._connections.get(peer):
            connection.send(message)

    def send_to_all(self, message: Message) -> None:
        """Send a message to all connected ranks. Never blocks."""
        for connection in self._connections.values():
            connection.send(message)

    def acknowledged(self, peer: int) -> bool:
        """Return False if the node of a connected rank has not acknowledged what was sent to it."""
        connection = self._connections.get(peer)
        return connection is None or connection.acknowledged()

    def poll(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Wait up to some seconds for messages, and yield each with the rank that it comes from.

        The end of a connection is a message "disconnected" with the error, which is None for a
        process that has ended; a signal, one of this rank.
        """
        for connection in self._connections.values():
            connection.flush()
        while self._early:
            connection = self._early.pop()
            if connection.socket.fileno() >= 0:
                yield from self._receive(connection)
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_reader:
                with suppress(OSError):
                    for number in filter(None, self._wake_reader.recv(4096)):  # `wake` sends zeros
                        yield self._rank, {"kind": "signal", "number": number}
            elif key.data.socket.fileno() >= 0:  # not replaced a moment ago
                yield from self._receive(key.data)
        now = time.monotonic()
        for connection in [*self._strangers]:
            if connection.since < now - _GREETING_S:
                self._drop(connection)
        for peer, connection in [*self._connections.items()]:
            if connection.silent(now):
                self._drop(connection)
                yield peer, {"kind": "disconnected", "error": os.strerror(errno.ETIMEDOUT)}

    def stop_listening(self) -> None:
        """Close the port, and the connections of strangers, since all ranks are connected."""
        if self._listener is not None:
            for connection in [*self._strangers]:
                self._drop(connection)
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def wake(self) -> None:
        """End the current `poll`. Safe from any thread and from a signal handler."""
        with suppress(OSError):
            self._wake_writer.send(b"\0")

    def close(self, *, in_child: bool = False) -> None:
        """Close all connections; in a forked child, without a word to the peers."""
        for connection in [*self._connections.values(), *self._strangers]:
            if not in_child:
                connection.flush()
            connection.socket.close()
        self._connections.clear()
        self._strangers.clear()
        for own in (self._wake_reader, self._wake_writer, self._listener):
            if own is not None:
                own.close()
        self._listener = None
        self._selector.close()

    def _accept(self) -> None:
        """Accept one that waits at the port, if there is a place for it."""
        assert self._listener is not None
        time.sleep(_ACCEPT_S)
        if len(self._strangers) == self._places:
            if self._strangers[0].since > time.monotonic() - _STRANGE_S:
                return
            self._drop(self._strangers[0])
        try:
            own, _ = self._listener.accept()
        except OSError:  # the peer has gone, or no descriptor is free
            return
        own.setblocking(False)
        connection = _Connection(own, _MAX_GREETING, self.lost_after)
        self._strangers.append(connection)
        self._selector.register(own, selectors.EVENT_READ, connection)
        connection.send({"challenge": connection.challenge})

    def _receive(self, connection: "_Connection") -> Iterator[tuple[int, Message]]:
        messages, closed, error = connection.receive()
        for message in messages:
            if connection.rank is not None:
                yield connection.rank, message
            elif not self._greet(connection, message):
                closed = True
                break
        if closed:
            self._drop(connection)
            if connection.rank is not None:
                yield connection.rank, {"kind": "disconnected", "error": error}

    def _drop(self, connection: "_Connection") -> None:
        """Close one connection."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.rank is None:
            self._strangers.remove(connection)
        else:
            del self._connections[connection.rank]

    def _greet(self, connection: "_Connection", message: Message) -> bool:
        """Let in a peer that knows the secret; return whether it does."""
        peer, challenge = message.get("rank"), message.get("challenge")
        if not isinstance(peer, int) or not isinstance(challenge, str):
            return False
        if not _equal(message.get("proof"), self._proof("rank", peer, connection.challenge)):
            return False
        self._strangers.remove(connection)
        if replaced := self._connections.get(peer):  # which the rank gave up
            self._drop(replaced)
        connection.rank, connection.limit = peer, _MAX_LINE
        self._connections[peer] = connection
        connection.send({"proof": self._proof("monitor", self._rank, challenge)})
        return True

    def _proof(self, role: str, rank: int, challenge: object) -> str:
        text = f"{role} {rank} {challenge}".encode(errors="replace")
        return hmac.new(self._secret, text, "sha256").hexdigest()


class _Connection:
    """A socket that carries lines of `limit` bytes at most."""

    def __init__(self, own: socket.socket, limit: int, lost_after: float) -> None:
        self.socket, self.limit = own, limit
        self.since = time.monotonic()
        self.challenge = secrets.token_hex(16)  # that the peer must answer
        self.rank: int | None = None  # the peer's, once it has joined
        self._received = self._unsent = b""
        self._lost_after, self._doubted_at = lost_after, math.inf
        seconds = min(lost_after, _MAX_S)
        probe = max(1, min(_PROBE_S, int(seconds / 4)))
        options = {
            "KEEPIDLE": probe,
            "KEEPINTVL": probe,
            "KEEPCNT": max(1, min(_MAX_PROBES, round(seconds / probe) - 1)),
            "USER_TIMEOUT": max(1, int(1000 * seconds)),  # on Linux it decides, not the count
        }
        with suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name, value in options.items():
                if (option := getattr(socket, f"TCP_{name}", None)) is not None:
                    own.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what fits now; an error is found by the next `receive`."""
        with suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def acknowledged(self) -> bool:
        """Return whether the peer's kernel has acknowledged all that was sent."""
        try:
            queued = fcntl.ioctl(self.socket.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:  # not Linux: it is not known
            return True
        return not self._unsent and not any(queued)

    def silent(self, now: float) -> bool:
        """Return whether the peer's kernel has acknowledged nothing for the limit, by two looks.

        The kernel's own limit begins anew with the first message after the peer was lost.
        """
        if self._unanswered_s() < self._lost_after - _SURE_S:
            self._doubted_at = math.inf
        self._doubted_at = min(self._doubted_at, now)
        return now >= self._doubted_at + _SURE_S

    def _unanswered_s(self) -> float:
        """Return how old the last acknowledgement is, if another one is waited for; else 0."""
        with suppress(OSError, AttributeError, struct.error):  # not Linux: it is not known
            found = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            probes, unacknowledged, last_ms = _TCP_INFO.unpack(found)
            return last_ms / 1000 if probes or unacknowledged else 0.0
        return 0.0

    def receive(self) -> tuple[list[Message], bool, str | None]:
        """Return the messages that have arrived, whether the connection has ended, and the error.

        There is none if the peer's process has ended, or has sent what is no message.
        """
        closed, error = False, None
        try:
            data = self.socket.recv(min(self.limit, 1 << 16))
            closed = not data
        except BlockingIOError:
            data = b""
        except OSError as raised:
            data, closed = b"", True
            error = None if isinstance(raised, ConnectionResetError) else str(raised.strerror)
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            messages = [_parse(line) for line in lines]
        except ValueError:
            return [], True, None
        return messages, closed or len(self._received) >= self.limit, error

    def read_line(self, seconds: float) -> Message:
        """Block until a line has arrived. Raises OSError, or ValueError for no message."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self.socket.recv(4096)
            if time.monotonic() > deadline:  # it comes byte by byte
                raise TimeoutError("the peer is too slow")
            if not data or len(self._received) >= self.limit:
                raise OSError("the connection was closed")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return _parse(line)


def allow_files(count: int) -> None:
    """Let this process open some files more than its limit says, as far as it may. Local."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= 0:  # not infinite
        more = soft + count if hard < 0 else min(soft + count, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def listen(address: str, ports: Sequence[int] = (0,)) -> socket.socket:
    """Return a socket that listens at the first of some ports that is free; 0 is any. Local.

    Raises ValueError if none is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ValueError(
        f"no port of --comm.port-range {ports[0]}-{ports[-1]} is free at {address}: give a larger "
        "range; a job takes up to two ports of it on a host, and one more with local checkpoints"
    )


def own_addresses() -> dict[str, str]:
    """Return the addresses of this host's interfaces, by name, without loopback.

    They are IPv4 addresses, or IPv6 addresses where there are no others.
    """
    found = {name: address for name, (address, _) in interfaces().items()}
    own = {name: address for name, address in found.items() if not address.startswith("127.")}
    if not found:
        with suppress(OSError):
            named = socket.gethostbyname(socket.gethostname())
            own = {} if named.startswith("127.") else {"": named}
    return own or ipv6_addresses()


def address_towards(
    others: Iterable[Mapping[str, str]], environment: Mapping[str, str] = os.environ
) -> str:
    """Return the address of the interface that leads to other hosts; of loopback if there are none.

    `others` are their `own_addresses`. If the variables of MPI name interfaces, one of them counts;
    else the one through which the most addresses are reached, by the routing table.
    """
    own = own_addresses()
    named = ",".join(environment.get(name, "") for name in _INTERFACE_VARIABLES).split(",")
    usable = [own[name] for name in named if name in own] or list(own.values())
    votes: Counter[str] = Counter()
    for addresses in others:
        votes.update(dict.fromkeys(usable, 0))
        for address in set(addresses.values()) - set(own.values()):  # not of a bridge on each host
            votes[_source(address)] += 1
    if not votes:
        return _LOOPBACK
    return max(usable, key=lambda address: votes[address], default=_LOOPBACK)


def _source(address: str) -> str:
    """Return the address of this host from which packets to an address are sent, or ""."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def _equal(given: object, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(errors="replace"), expected.encode())


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("a message is too deep") from error
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    return message
