"""Copies of what ranks write into the memory of their nodes, on the node of a partner.

They travel over connections of their own, from a thread of each rank to the first rank of the
partner's node: beside MPI, which moves only while a thread calls it, in small pieces with pauses
between them, which leave the link to the gradients. Nobody waits for them, and an error of one,
such as of a partner that has stopped, is that of this copy alone. A restart sends nodes what they
lack in the same way, without pauses. Both ends prove first that they know the secret of the job
(`multiprocessing.connection`).

    sender      JSON of a Header, then the ranges, end to end
    receiver    "", or why the copy is not complete
"""

import json
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from mntrain.checkpoint.format import FILES, ChecksummedRange, opened, write_at
from mntrain.options.types import port_numbers
from mntrain.ranks import Ranks
from mntrain.watchdog.side_channel import Address, address_towards, listen, own_addresses

_PIECE_BYTES = 256 << 10
_GREETING_S = 10.0
_SILENT_S = 60.0  # without any bytes, until a copy is given up
_MAX_HEADER = 1 << 28
_RACK = "SLURM_TOPOLOGY_ADDR"  # such as core.rack3.node17


def partner_nodes(racks: Sequence[str]) -> list[int]:
    """Return the number of the node that keeps the copies of each node. Pure.

    Half the job away, of the nodes in the order of their racks: in another rack, unless one rack
    has more than half of them. `racks` are those of the nodes.
    """
    count = len(racks)
    order = sorted(range(count), key=lambda node: (racks[node], node))
    partners = [0] * count
    for place, node in enumerate(order):
        partners[node] = order[(place + count // 2) % count]
    return partners


class PartnerCopies:
    """Sends what this rank has written to its partner's node, and receives there. Made by all.

    `root` is the folder of this rank's node. `partner` is the number of the partner's node; None if
    there is a single one. Raises AgreedError if a node cannot listen for others.
    """

    def __init__(self, world: Ranks, root: Path) -> None:
        self._root, self._closed = root, False
        self.until = 0.0  # when a copy is to be sent, by time.monotonic()
        self._listener: socket.socket | None = None
        nodes, node = world.topology.nodes, world.topology.node(world.rank)
        gathered = world.gather((_rack(), own_addresses(), secrets.token_bytes(32)))
        racks, addresses, keys = zip(*gathered, strict=True)
        self._key: bytes = keys[0]
        with world.agreement():
            if world.rank == nodes[node][0]:
                hosts = zip(world.hosts, addresses, strict=True)
                others = [own for key, own in hosts if key != world.hosts[world.rank]]
                towards = address_towards(others)
                self._listener = listen(towards, port_numbers(world.settings.port_range))
        at = self._listener.getsockname()[:2] if self._listener else None
        places: list[Any] = world.gather(at)
        partners = partner_nodes([racks[ranks[0]] for ranks in nodes])
        self.partner = partners[node] if len(nodes) > 1 else None
        self._addresses: list[Address] = [places[ranks[0]] for ranks in nodes]
        if self._listener is not None:
            threading.Thread(target=self._listen, name="mntrain copies", daemon=True).start()

    def send(
        self,
        step: Path,
        sizes: Mapping[str, int],
        ranges: Mapping[str, Sequence[ChecksummedRange]],
        node: int | None = None,
        folder: Path | None = None,
    ) -> str:
        """Send ranges of a step's files, slowly, `until` a time; return why that failed, or "".

        Local. To a `node`, of what is in a `folder`; by default to the partner's, of what this
        node's has. `step` is relative to both, and `sizes` are those of the whole files. Does
        nothing without a partner.
        """
        header: dict[str, Any] = {"step": str(step), "sizes": dict(sizes), "ranges": dict(ranges)}
        header["synced"] = node is None  # what a restart is given is elsewhere, too
        node, folder = self.partner if node is None else node, folder or self._root
        if node is None:
            return ""
        total, sent = sum(part.length for parts in ranges.values() for part in parts), 0
        try:
            with socket.create_connection(self._addresses[node], _GREETING_S) as own:
                connection = _connection(own)
                _limit(own, _GREETING_S)
                answer_challenge(connection, self._key)
                deliver_challenge(connection, self._key)
                _limit(own, _SILENT_S)
                connection.send_bytes(json.dumps(header).encode())
                start = time.monotonic()
                for name, parts in ranges.items():
                    for piece in _pieces(folder / step / name, parts):
                        while not self._closed:  # until this piece is due, which may change
                            due = start + (self.until - start) * sent / total
                            if (wait := due - time.monotonic()) <= 0:
                                break
                            time.sleep(min(wait, 1.0))
                        if self._closed:
                            return "the run has ended"
                        own.sendall(piece)
                        sent += len(piece)
                return connection.recv_bytes(_MAX_HEADER).decode()
        except BlockingIOError:  # a limit of the socket
            return "the other node does not answer"
        except Exception as error:  # also what the library asserts of a peer
            return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """End what is on its way, and receive no more. Local."""
        self._closed = True
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()

    def _listen(self) -> None:
        """Receive copies, in a thread for each. In the thread."""
        assert self._listener is not None
        while not self._closed:
            try:
                own, _ = self._listener.accept()
                threading.Thread(
                    target=self._receive, args=(own,), name="mntrain copy", daemon=True
                ).start()
            except (OSError, RuntimeError):  # closed, or no more descriptors or threads
                time.sleep(0.1)

    def _receive(self, own: socket.socket) -> None:
        with own, suppress(Exception):  # whatever a stranger sends
            _limit(own, _GREETING_S)
            connection = _connection(own)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _limit(own, _SILENT_S)
            header = json.loads(connection.recv_bytes(_MAX_HEADER))
            folder = self._root / header["step"]
            try:
                for name in FILES:
                    ranges = [ChecksummedRange(*part) for part in header["ranges"][name]]
                    size, synced = header["sizes"][name], header["synced"]
                    _write_ranges(own, folder / name, size, ranges, synced=synced)
                answer = ""
            except OSError as error:
                answer = f"the other node cannot write: {error}"
            connection.send_bytes(answer.encode())
            while own.recv(_PIECE_BYTES):  # with unread bytes, a closed socket takes it back
                pass


def _pieces(path: Path, ranges: Sequence[ChecksummedRange]) -> Iterator[bytes]:
    """Yield ranges of a file in small pieces. Raises OSError."""
    with opened(path) as file:
        for part in ranges:
            for low in range(0, part.length, _PIECE_BYTES):
                yield os.pread(file, min(_PIECE_BYTES, part.length - low), part.start + low)


def _write_ranges(
    own: socket.socket,
    path: Path,
    size: int,
    ranges: Sequence[ChecksummedRange],
    *,
    synced: bool = True,
) -> None:
    """Receive ranges of a file. Raises OSError, also for what does not have its checksum."""
    # The ranks of this node may not have begun to write it.
    with opened(path, os.O_RDWR | os.O_CREAT) as file:
        os.ftruncate(file, size)
        buffer = memoryview(bytearray(_PIECE_BYTES))
        for part in ranges:
            checksum, low = 0, 0
            while low < part.length:
                count = own.recv_into(buffer, min(_PIECE_BYTES, part.length - low))
                if not count:
                    raise EOFError
                checksum = zlib.crc32(buffer[:count], checksum)
                write_at(file, buffer[:count], part.start + low)
                low += count
            if checksum != part.checksum:
                raise OSError(f"{path.name} arrives damaged")
        if synced:
            os.fsync(file)


def _connection(own: socket.socket) -> Connection:
    """Return the connection of a socket for whole messages; it has a descriptor of its own."""
    own.settimeout(None)
    return Connection(os.dup(own.fileno()))


def _limit(own: socket.socket, seconds: float) -> None:
    """Let reads and writes of a blocking socket raise OSError after so long."""
    limit = struct.pack("ll", int(seconds), 0)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _rack() -> str:
    """Return the switches above this rank's node, if the scheduler tells; else ""."""
    return os.environ.get(_RACK, "").rpartition(".")[0]
