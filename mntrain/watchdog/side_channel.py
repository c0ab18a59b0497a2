"""Messages between the ranks of a job beside MPI, over TCP: they arrive while MPI is stuck.

Every rank connects to the monitors, ranks 0 and 1. The state of a connection tells of its peer:

    closed              the process has ended
    not acknowledged    the node or its network is lost, or down for a while: lost after a limit
    open, no answer     the process is stopped, or the interpreter is held in C code

since a kernel acknowledges for a stopped process (keep-alive: RFC 1122, 4.2.3.6; user timeout: RFC
5482). Messages are JSON objects, one a line. Both ends prove first that they know the secret of the
job (HMAC-SHA256), which the ranks exchange over MPI:

    rank        {"rank": R, "token": T, "challenge": C}    T is the same each time
    monitor     {"proof": of C, "challenge": D}
    rank        {"proof": of D}     only now the monitor counts the rank as connected

Without a token, the peer is a stranger. Strangers cost no descriptor that the job could use: a
monitor keeps STRANGERS of them at most, in descriptors that it has reserved, and the oldest gives
way. Once all ranks are connected, the monitor stops listening.
"""

import fcntl
import hmac
import json
import os
import resource
import secrets
import selectors
import socket
import struct
import termios
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

Message = dict[str, Any]

LOST_S = 20.0  # the default, until a node that does not acknowledge counts as lost
CONNECT_S = 3.0  # per address
STRANGERS = 64  # most connections that a monitor keeps without a token
_STRANGE_S = 0.25  # that each of them has at least, so that at most 256 a second are accepted
_TOKEN_S = 2.0  # for the token, after which a stranger is dropped in any case
_GREETING_S = 10.0  # for the rest of the greeting, which a busy host takes long for
_MAX_GREETING, _MAX_LINE = 512, 1 << 20  # bytes
_PROBE_S, _MAX_PROBES, _MAX_S = 5, 127, 1e6  # of keep-alive; the last one bounds a time limit
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
_LOOPBACK = "127.0.0.1"
# In which users name the interfaces of MPI.
_INTERFACE_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")

Address = tuple[str, int]  # at which a monitor listens: IPv4 address and port


class Closed(NamedTuple):
    """The end of a connection: None for one whose process has ended, else the error."""

    error: OSError | None


class SideChannel:
    """The connections of one rank. Used by one thread.

    `own_listener` is the socket of `listen` if this rank is a monitor. `secret` is the job's. A
    connection ends with an error once the other node has acknowledged nothing for `lost_after`
    seconds.
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        own_listener: socket.socket | None,
        *,
        lost_after: float = LOST_S,
    ) -> None:
        self._lost_after = lost_after
        self._rank, self._secret, self._listener = rank, secret, own_listener
        self._connections: dict[int, _Connection] = {}
        self._strangers: deque[_Connection] = deque()  # without a token, the oldest first
        self._joining: list[_Connection] = []  # with one
        self._reserve: list[int] = []  # descriptors
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for waker in (self._wake_reader, self._wake_writer):
            waker.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        if own_listener is not None:
            own_listener.setblocking(False)
            self._selector.register(own_listener, selectors.EVENT_READ)
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            for _ in range(STRANGERS if soft < 0 else min(STRANGERS, soft // 16)):
                self._reserve_one()
        self._accepted: deque[float] = deque(maxlen=len(self._reserve) or 1)  # times of strangers

    @property
    def peers(self) -> list[int]:
        """The ranks with an open connection."""
        return sorted(self._connections)

    @property
    def wake_descriptor(self) -> int:
        """A descriptor that ends `poll` when it is written to, as by `signal.set_wakeup_fd`."""
        return self._wake_writer.fileno()

    def connect(self, monitor: int, where: Address) -> None:
        """Connect to a monitor. Takes up to CONNECT_S and the greeting.

        Raises OSError if it does not answer as such; then it may be tried again.
        """
        connection = self._connect(monitor, where)
        connection.rank = monitor
        connection.socket.setblocking(False)
        self._connections[monitor] = connection
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def send(self, peer: int, message: Message) -> None:
        """Send a message to a connected rank; do nothing if it is not connected. Never blocks."""
        if connection := self._connections.get(peer):
            connection.send(message)

    def send_to_all(self, message: Message) -> None:
        """Send a message to all ranks, those included that are about to join. Never blocks."""
        for connection in [*self._connections.values(), *self._joining]:
            connection.send(message)

    def acknowledged(self, peer: int) -> bool:
        """Return False if the node of a connected rank has not acknowledged what was sent to it."""
        connection = self._connections.get(peer)
        return connection is None or connection.acknowledged()

    def poll(self, seconds: float) -> Iterator[tuple[int, Message | Closed]]:
        """Wait up to some seconds for messages, and yield each with the rank that it comes from."""
        for connection in self._connections.values():
            connection.flush()
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_reader:
                for number in self._read_wakes():
                    yield self._rank, {"kind": "signal", "number": number}
            elif key.data.socket.fileno() >= 0:  # not replaced a moment ago
                yield from self._receive(key.data)
        now = time.monotonic()
        for stranger in [s for s in self._strangers if s.since < now - _TOKEN_S]:
            self._drop(stranger)
        for joining in [j for j in self._joining if j.since < now - _GREETING_S]:
            self._drop(joining)

    def stop_listening(self) -> None:
        """Close the port, and the connections of strangers, since all ranks are connected."""
        if self._listener is None:
            return
        for connection in [*self._strangers, *self._joining]:
            self._drop(connection)
        self._selector.unregister(self._listener)
        self._close_port()

    def wake(self) -> None:
        """End the current `poll`. Safe from any thread and from a signal handler."""
        with suppress(OSError):
            self._wake_writer.send(b"\0")

    def close(self, *, in_child: bool = False) -> None:
        """Close all connections; in a forked child, without a word to the peers."""
        connections = [*self._connections.values(), *self._strangers, *self._joining]
        for connection in connections:
            if not in_child:
                connection.flush()
            connection.socket.close()
        self._connections.clear()
        self._strangers.clear()
        self._joining.clear()
        self._close_port()
        for own in (self._wake_reader, self._wake_writer):
            own.close()
        self._selector.close()

    def _close_port(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        while self._reserve:
            os.close(self._reserve.pop())

    def _connect(self, monitor: int, where: Address) -> "_Connection":
        own = socket.create_connection(where, CONNECT_S)
        try:
            connection = _Connection(own, _MAX_LINE, self._lost_after)
            challenge = secrets.token_hex(16)
            token = self._proof("token", self._rank)
            connection.send({"rank": self._rank, "token": token, "challenge": challenge})
            answer = connection.read_line(_GREETING_S)
            if not _equal(answer["proof"], self._proof("monitor", monitor, challenge)):
                raise ValueError("another secret")
            proof = self._proof("rank", self._rank, answer["challenge"])
            connection.send({"proof": proof})
        except (KeyError, ValueError) as error:
            own.close()
            raise OSError(f"{where} is no monitor of this job") from error
        except OSError:
            own.close()
            raise
        return connection

    def _accept(self) -> None:
        """Accept what waits at the port; of strangers no more than there is a place for."""
        assert self._listener is not None
        while self._may_accept():
            if not self._reserve and self._strangers:
                self._drop(self._strangers[0])
            if self._reserve:
                os.close(self._reserve.pop())
            try:
                own, _ = self._listener.accept()
            except BlockingIOError:
                self._reserve_one()
                return
            except OSError:  # the peer has gone, or no descriptor is free
                self._reserve_one()
                break
            own.setblocking(False)
            connection = _Connection(own, _MAX_GREETING, self._lost_after)
            self._strangers.append(connection)
            self._accepted.append(connection.since)
            self._selector.register(own, selectors.EVENT_READ, connection)
        time.sleep(0.01)

    def _may_accept(self) -> bool:
        """Return whether the oldest stranger, which may have to give way, has had its time."""
        full = len(self._accepted) == self._accepted.maxlen
        return not full or self._accepted[0] < time.monotonic() - _STRANGE_S

    def _receive(self, connection: "_Connection") -> Iterator[tuple[int, Message | Closed]]:
        messages, closed = connection.receive()
        for message in messages:
            if connection.rank is not None:
                yield connection.rank, message
            elif not self._greet(connection, message):
                closed = Closed(None)
                break
        if closed is not None:
            self._drop(connection)
            if connection.rank is not None:
                yield connection.rank, closed

    def _drop(self, connection: "_Connection") -> None:
        """Close one connection."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.rank is not None:
            del self._connections[connection.rank]
        elif connection in self._joining:
            self._joining.remove(connection)
        else:
            self._strangers.remove(connection)
            self._reserve_one()

    def _reserve_one(self) -> None:
        """Reserve a descriptor for a stranger, if one is free."""
        with suppress(OSError):
            self._reserve.append(os.dup(self._wake_reader.fileno()))

    def _greet(self, connection: "_Connection", message: Message) -> bool:
        """Go on with the greeting of a peer; return False if it does not know the secret."""
        if connection in self._joining:
            peer = connection.claimed
            expected = self._proof("rank", peer, connection.challenge)
            if not _equal(message.get("proof"), expected):
                return False
            self._joining.remove(connection)
            if replaced := self._connections.get(peer):  # which the rank gave up
                self._drop(replaced)
            connection.rank, connection.limit = peer, _MAX_LINE
            self._connections[peer] = connection
            return True
        claimed, challenge = message.get("rank"), message.get("challenge")
        if not isinstance(claimed, int) or not isinstance(challenge, str):
            return False
        if not _equal(message.get("token"), self._proof("token", claimed)):
            return False
        for earlier in [joining for joining in self._joining if joining.claimed == claimed]:
            self._drop(earlier)
        self._strangers.remove(connection)
        self._reserve_one()
        with suppress(ValueError):
            self._accepted.remove(connection.since)
        self._joining.append(connection)
        connection.claimed, connection.challenge = claimed, secrets.token_hex(16)
        proof = self._proof("monitor", self._rank, challenge)
        connection.send({"proof": proof, "challenge": connection.challenge})
        return True

    def _proof(self, role: str, rank: int, challenge: str = "") -> str:
        text = f"{role} {rank} {challenge}".encode(errors="replace")
        return hmac.new(self._secret, text, "sha256").hexdigest()

    def _read_wakes(self) -> list[int]:
        """Return the numbers of the signals that have arrived, without the bytes of `wake`."""
        try:
            return [number for number in self._wake_reader.recv(4096) if number]
        except OSError:
            return []


class _Connection:
    """A socket that carries lines of `limit` bytes at most."""

    def __init__(self, own: socket.socket, limit: int, lost_after: float) -> None:
        self.socket, self.limit = own, limit
        self.since = time.monotonic()
        self.claimed = -1  # the peer's rank, by its token
        self.challenge = ""  # that the peer must answer
        self.rank: int | None = None  # the peer's, once it has joined
        self._received = b""
        self._unsent = b""
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

    def receive(self) -> tuple[list[Message], Closed | None]:
        """Return the messages that have arrived, and the end of the connection if it has come."""
        closed = None
        try:
            data = self.socket.recv(min(self.limit, 1 << 16))
            closed = None if data else Closed(None)
        except BlockingIOError:
            data = b""
        except ConnectionResetError:
            data, closed = b"", Closed(None)
        except OSError as error:
            data, closed = b"", Closed(error)
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            messages = [_parse(line) for line in lines]
        except ValueError:
            return [], Closed(None)
        if len(self._received) >= self.limit:
            closed = Closed(None)
        return messages, closed

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


def listen(address: str) -> tuple[socket.socket, Address]:
    """Return a socket that listens on a free port of an address of this host, and both.

    Raises OSError.
    """
    listener = socket.create_server((address, 0), backlog=1024)
    return listener, (address, listener.getsockname()[1])


def own_addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this host's interfaces, by name, without loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            with suppress(OSError):  # an interface without an address, or no Linux
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(reply[20:24])
    if not found:
        with suppress(OSError):
            found = {"": socket.gethostbyname(socket.gethostname())}
    return {name: address for name, address in found.items() if not address.startswith("127.")}


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
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
