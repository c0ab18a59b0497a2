"""Messages between the ranks of a job beside MPI, over TCP: they arrive while MPI is stuck.

Every rank connects to the monitors, ranks 0 and 1. The state of a connection tells of its peer:

    closed              the process has ended
    not acknowledged    the node or its network is lost: found within LOST_S
    open, no answer     the process is stopped, or the interpreter is held in C code

since a kernel acknowledges for a stopped process (keep-alive: RFC 1122, 4.2.3.6; user timeout: RFC
5482). Messages are JSON objects, one a line. Both ends prove first that they know the secret of the
job (HMAC-SHA256 of the other's challenge), which the ranks exchange over MPI:

    monitor     {"challenge": C}
    rank        {"rank": R, "proof": of C, "challenge": D}
    monitor     {"proof": of D}
    rank        {"joined": true}    only now the monitor counts the rank as connected
"""

import fcntl
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

Message = dict[str, Any]

LOST_S = 20  # until a node without a network counts as lost
CONNECT_S = 3.0  # per address
_GREETING_S = 10.0  # for the rest of the greeting, which a busy host takes long for
_MAX_LINE = 1 << 20
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


class Address(NamedTuple):
    """The place at which a monitor listens: the addresses of its host, and the port."""

    host: str
    addresses: list[str]
    port: int


class Closed(NamedTuple):
    """The end of a connection: None for one whose process has ended, else the error."""

    error: OSError | None


class SideChannel:
    """The connections of one rank. Used by one thread.

    `own_listener` is the socket of `listen` if this rank is a monitor. `secret` is the job's.
    """

    def __init__(self, rank: int, secret: bytes, own_listener: socket.socket | None) -> None:
        self._rank, self._secret, self._listener = rank, secret, own_listener
        self._connections: dict[int, _Connection] = {}
        self._strangers: list[_Connection] = []  # that have not proved anything yet
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for waker in (self._wake_reader, self._wake_writer):
            waker.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        if own_listener is not None:
            own_listener.setblocking(False)
            self._selector.register(own_listener, selectors.EVENT_READ)

    @property
    def peers(self) -> list[int]:
        """The ranks with an open connection."""
        return sorted(self._connections)

    @property
    def wake_descriptor(self) -> int:
        """A descriptor that ends `poll` when it is written to, as by `signal.set_wakeup_fd`."""
        return self._wake_writer.fileno()

    def connect(self, monitor: int, where: tuple[str, int]) -> None:
        """Connect to a monitor at an address and port. Takes up to CONNECT_S and the greeting.

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
        joining = [stranger for stranger in self._strangers if stranger.proven is not None]
        for connection in [*self._connections.values(), *joining]:
            connection.send(message)

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
        for stranger in [s for s in self._strangers if s.since < time.monotonic() - _GREETING_S]:
            self._drop(stranger)

    def wake(self) -> None:
        """End the current `poll`. Safe from any thread and from a signal handler."""
        with suppress(OSError):
            self._wake_writer.send(b"\0")

    def close(self, *, in_child: bool = False) -> None:
        """Close all connections; in a forked child, without a word to the peers."""
        connections = [*self._connections.values(), *self._strangers]
        for connection in connections:
            if not in_child:
                connection.flush()
            connection.socket.close()
        self._connections.clear()
        self._strangers.clear()
        for own in (self._listener, self._wake_reader, self._wake_writer):
            if own is not None:
                own.close()
        self._selector.close()

    def _connect(self, monitor: int, where: tuple[str, int]) -> "_Connection":
        own = socket.create_connection(where, CONNECT_S)
        try:
            own.settimeout(_GREETING_S)
            connection = _Connection(own)
            challenge = secrets.token_hex(16)
            theirs = connection.read_line()["challenge"]
            proof = self._proof("rank", self._rank, theirs)
            connection.send({"rank": self._rank, "proof": proof, "challenge": challenge})
            answer = connection.read_line()["proof"]
            if not _equal(answer, self._proof("monitor", monitor, challenge)):
                raise ValueError("another secret")
            connection.send({"joined": True})
        except (KeyError, ValueError) as error:
            own.close()
            raise OSError(f"{where} is no monitor of this job") from error
        except OSError:
            own.close()
            raise
        return connection

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            own, _ = self._listener.accept()
        except OSError:  # the peer has gone, or no descriptor is free
            time.sleep(0.01)
            return
        own.setblocking(False)
        connection = _Connection(own)
        connection.challenge = secrets.token_hex(16)
        connection.send({"challenge": connection.challenge})
        self._strangers.append(connection)
        self._selector.register(own, selectors.EVENT_READ, connection)

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
        if connection.rank is None:
            self._strangers.remove(connection)
        else:
            del self._connections[connection.rank]

    def _greet(self, connection: "_Connection", message: Message) -> bool:
        """Go on with the greeting of a stranger; return False if it does not know the secret."""
        if connection.proven is not None:
            self._strangers.remove(connection)
            if earlier := self._connections.get(connection.proven):  # which the rank gave up
                self._drop(earlier)
            connection.rank = connection.proven
            self._connections[connection.rank] = connection
            return True
        rank, challenge = message.get("rank"), message.get("challenge")
        if not isinstance(rank, int) or not isinstance(challenge, str):
            return False
        if not _equal(message.get("proof"), self._proof("rank", rank, connection.challenge)):
            return False
        connection.proven = rank
        connection.send({"proof": self._proof("monitor", self._rank, challenge)})
        return True

    def _proof(self, role: str, rank: int, challenge: str) -> str:
        text = f"{role} {rank} {challenge}".encode(errors="replace")
        return hmac.new(self._secret, text, "sha256").hexdigest()

    def _read_wakes(self) -> list[int]:
        """Return the numbers of the signals that have arrived, without the bytes of `wake`."""
        try:
            return [number for number in self._wake_reader.recv(4096) if number]
        except OSError:
            return []


class _Connection:
    """A socket that carries lines."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        self.since = time.monotonic()
        self.challenge = ""  # that the peer must answer
        self.proven: int | None = None  # the peer's rank, once it has answered
        self.rank: int | None = None  # the same, once it has joined
        self._received = b""
        self._unsent = b""
        options = {"KEEPIDLE": 5, "KEEPINTVL": 5, "KEEPCNT": 3, "USER_TIMEOUT": 1000 * LOST_S}
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

    def receive(self) -> tuple[list[Message], Closed | None]:
        """Return the messages that have arrived, and the end of the connection if it has come."""
        closed = None
        try:
            data = self.socket.recv(1 << 16)
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
        if len(self._received) > _MAX_LINE:
            closed = Closed(None)
        return messages, closed

    def read_line(self) -> Message:
        """Block until a line has arrived. Raises OSError, or ValueError for no message."""
        while b"\n" not in self._received:
            data = self.socket.recv(4096)
            if not data or len(self._received) > _MAX_LINE:
                raise OSError("the connection was closed")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return _parse(line)


def listen() -> tuple[socket.socket, Address]:
    """Return a socket that listens on a free port of all interfaces, and its address.

    Raises OSError.
    """
    listener = socket.create_server(("", 0), backlog=1024)
    port = listener.getsockname()[1]
    return listener, Address(socket.gethostname(), _own_addresses(), port)


def places(address: Address) -> list[tuple[str, int]]:
    """Return the addresses and ports at which a monitor may be reached from here."""
    here = ["127.0.0.1"] if address.host == socket.gethostname() else []
    return [(candidate, address.port) for candidate in [*here, *address.addresses]]


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host, that of the loopback interface last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            with suppress(OSError):  # an interface without an address, or no Linux
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    if not found:
        with suppress(OSError):
            found = socket.gethostbyname_ex(socket.gethostname())[2]
    return sorted(
        set(found), key=lambda address: (address.startswith("127."), found.index(address))
    )


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
