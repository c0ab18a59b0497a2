"""Folders of a run's checkpoints in the memory of nodes, and what is whole over all of them.

Each node has the files of a checkpoint with a few ranges of their bytes, at their places, and the
manifest, with the checksums of all. So a range is on a node if the bytes there have its checksum,
whoever has written them, and a step is whole if each of its ranges is on any node.
"""

import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mntrain.checkpoint.format import (
    FILE,
    FILES,
    RANGE_BYTES,
    ChecksummedRange,
    Manifest,
    checkpoint_name,
    read_manifest,
    step_of,
    write_at,
    write_manifest,
)
from mntrain.checks.local_folder import NODE, Attempts, prepare, run_folder
from mntrain.errors import AgreedError
from mntrain.ranks import Ranks
from zero.collectives import Work

NOT_WRITTEN = "not all ranks had written it"
_IN_FLIGHT = 2  # ranges that are sent at a time
_NEW = os.O_RDWR | os.O_CREAT


class PlacedRange(NamedTuple):
    """A range of a file of a checkpoint."""

    file: str
    place: ChecksummedRange


class Message(NamedTuple):
    """Consecutive parts of a file that a rank sends to all nodes."""

    root: int
    numbers: list[int]
    readers: frozenset[int]  # the nodes that lack them


class Held(NamedTuple):
    """Numbers of the parts that a rank has found on its node, by the folder that they are in."""

    own: frozenset[int]
    # In the folder of a virtual node that is no more, by its number among those.
    left: Mapping[int, int]


class NodeFolders:
    """A run's folder on this rank's node, and those of virtual nodes that are no more.

    Made by all ranks, within DIR, which is made unless it is there. `attempts` are those of the
    run, before what this start trains. Raises AgreedError if any node cannot use DIR, or if nodes
    share it.
    """

    def __init__(self, world: Ranks, folder: Path, run_dir: Path, attempts: Attempts) -> None:
        self._world, self.attempts = world, attempts
        rank, topology = world.rank, world.topology
        self.leader = topology.local_rank(rank) == 0
        """True if this rank is the first one of its node."""
        self.passed_over: dict[Path, str] = {}
        """Why steps that a restart has looked at were not taken. The same on all ranks."""
        first = world.hosts.index(world.hosts[rank]) == rank
        with world.agreement():
            if first:
                prepare(folder)
        with world.agreement():
            prepare(folder)  # of another user, by his number on this host
        mark = folder / f".mntrain-{secrets.token_hex(8)}"
        try:
            with world.agreement():
                try:
                    if first:
                        mark.touch(0o600)
                except OSError as error:
                    raise ValueError(
                        f"the folder for local checkpoints, {folder}, cannot be written "
                        f"({error.strerror}): free some space, or give another one"
                    ) from error
            marks = world.gather(mark.name)
            others = {
                name
                for name, key in zip(marks, world.hosts, strict=True)
                if key != world.hosts[rank]
            }
            with world.agreement():
                if not others.isdisjoint(path.name for path in _listed(folder)):
                    raise ValueError(
                        f"the folder for local checkpoints, {folder}, is one that several nodes "
                        "share, and is lost with any of them: give one in the memory or on a disk "
                        "of each node"
                    )
        finally:
            if first:
                mark.unlink(missing_ok=True)
        on_host = [node for node in topology.nodes if world.hosts[node[0]] == world.hosts[rank]]
        number = next(n for n, node in enumerate(on_host) if rank in node)
        # Of the run, on this host.
        self.root = root = folder / world.gather(run_folder(run_dir, attempts))[0]
        with world.agreement():
            if os.path.lexists(root) and (owner := root.lstat().st_uid) != os.geteuid():
                raise ValueError(
                    f"{root} belongs to the user {owner}: remove it, or give another DIR"
                )
        found = {path.name: path for path in _listed(root) if path.name.startswith(NODE)}
        for n in range(len(on_host)):
            found.pop(f"{NODE}{n}", None)
        self.own = root / f"{NODE}{number}"
        self.left = [found[name] for name in sorted(found)][number :: len(on_host)]

    def steps(self) -> set[tuple[int, str]]:
        """Return the steps, with their attempts, of which this node has anything that is valid."""
        return {
            (step, path.parent.name)
            for path in self.paths()
            if (step := step_of(path)) is not None and self.attempts.valid(path.parent.name, step)
        }

    def make(self, path: Path) -> None:
        """Make the folder of a step on this node, for this user alone, unless it is there."""
        for folder in (self.root, self.own, path.parent, path):
            folder.mkdir(0o700, exist_ok=True)

    def paths(self) -> list[Path]:
        """Return the folders of all steps on this node, valid or not."""
        return [
            path
            for folder in (self.own, *self.left)
            for attempt in _listed(folder)
            for path in _listed(attempt)
        ]

    def remove_all_but(self, *kept: Path) -> None:
        """Remove all steps that this node has, but for some. On its first rank."""
        for path in self.paths():
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):
                    path.parent.rmdir()  # of the attempt

    def make_whole(self, step: int, attempt: str) -> tuple[Manifest | None, str]:
        """Give each node all ranges of a step; return its manifest, and where it came from.

        Or None, and why not all ranges are there. Collective.
        Each range that a node lacks is sent once, by a rank on a node that has it. A step of which
        all ranges are there is the one that is taken: all others are removed before, which makes
        room, and AgreedError is raised where a node cannot be given it. Nothing of it is removed
        then.
        """
        world, name = self._world, Path(attempt, checkpoint_name(step))
        manifest = self._manifest(name) if self.leader else None
        known = world.gather(manifest is not None)
        if not any(known):
            return None, NOT_WRITTEN
        root = known.index(True)
        manifest = world.gather(manifest if world.rank == root else None)[root]
        assert manifest is not None
        parts = [PlacedRange(file, place) for file in FILES for place in manifest.checksums[file]]
        held: list[Held] = world.gather(self._look(name, parts))
        lacking, messages = assign_senders(parts, held, world.topology.nodes)
        if lacking:
            nbytes = sum(parts[number].place.length for number in lacking)
            share = f"{len(lacking)} of its {len(parts)} slices ({nbytes / 1e6:.1f} MB)"
            return None, f"{share} are on no node, or damaged"
        try:
            _Sending(world, self, name, parts, held[world.rank]).send(manifest, messages)
        except AgreedError as error:
            raise AgreedError(
                f"{name.name} is whole in the nodes' memory, and a node cannot be given all of it "
                f"({error}): free space in {self.root.parent} and start again, or remove "
                f"{self.root} on each node to go on from the run directory",
                world.rank,
            ) from error
        sent = sum(parts[number].place.length for message in messages for number in message.numbers)
        return manifest, f"of {world.topology}, which were sent {sent / 1e6:.1f} MB of it"

    def _manifest(self, name: Path) -> Manifest | None:
        for folder in (self.own, *self.left):
            with suppress(OSError, ValueError):
                return read_manifest(folder / name)
        return None

    def _look(self, name: Path, parts: Sequence[PlacedRange]) -> Held:
        """Return what this rank finds on its node, of the equal part that it looks for. Local."""
        world, own = self._world, set[int]()
        left: dict[int, int] = {}
        numbers = range(world.local_rank, len(parts), world.local_size)
        for place, folder in enumerate((self.own, *self.left)):
            missing = [number for number in numbers if number not in own and number not in left]
            found = _sound(folder / name, parts, missing)
            if place == 0:
                own.update(found)
            else:
                left |= dict.fromkeys(found, place - 1)
        return Held(frozenset(own), left)


def assign_senders(
    parts: Sequence[PlacedRange], held: Sequence[Held], nodes: Sequence[Sequence[int]]
) -> tuple[list[int], list[Message]]:
    """Return the numbers of parts that nobody has, and the messages that give the others to all.

    Pure. `held` is by rank. Of several ranks that have a part, the one sends it that sends least.
    """
    owners: list[list[int]] = [[] for _ in parts]  # by part
    for rank, (own, left) in enumerate(held):
        for number in (*own, *left):
            owners[number].append(rank)
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    sent = [0] * len(held)
    messages: list[Message] = []
    end, length = ("", 0), 0  # of the last message
    for number, (file, (start, nbytes, _)) in enumerate(parts):
        has = {node_of[rank] for rank in owners[number] if number in held[rank].own}
        readers = frozenset(range(len(nodes))) - has
        if not owners[number] or not readers:
            continue
        last = messages[-1] if messages else None
        if (
            last is not None
            and (file, start) == end
            and last.readers == readers
            and last.root in owners[number]
            and length + nbytes <= RANGE_BYTES
        ):
            root = last.root
            last.numbers.append(number)
            length += nbytes
        else:
            root = min(owners[number], key=lambda rank: (sent[rank], rank))
            messages.append(Message(root, [number], readers))
            length = nbytes
        end = file, start + nbytes
        sent[root] += nbytes
    return [number for number, ranks in enumerate(owners) if not ranks], messages


def make_valid(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a step into a folder, as a whole. Raises OSError and ValueError."""
    new = folder / f".{FILE}"
    write_manifest(new, manifest, 0o600)
    new.rename(folder / FILE)


def _listed(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing if it is not there, or cannot be listed."""
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _sound(folder: Path, parts: Sequence[PlacedRange], numbers: Iterable[int]) -> Iterator[int]:
    """Yield the numbers of the parts whose bytes in a folder have their checksums."""
    for name in FILES:
        with suppress(OSError), opened(folder / name) as file:
            for number in numbers:
                if parts[number].file == name and _has(file, parts[number].place):
                    yield number


def _has(file: int, place: ChecksummedRange) -> bool:
    start, length, checksum = place
    data = os.pread(file, length, start)  # a hole, which nobody has written, gives zeros
    return len(data) == length and zlib.crc32(data) == checksum


@dataclass
class _Sending:
    """Ranges on their way to the nodes that lack them, which write them into their folders."""

    _world: Ranks
    _folders: NodeFolders
    _name: Path
    _parts: Sequence[PlacedRange]
    _held: Held
    _waiting: list[tuple[Message, Tensor, Work]] = field(default_factory=list)
    _ended: int = 0
    _problem: OSError | ValueError | None = None  # the first of this rank

    def send(self, manifest: Manifest, messages: Sequence[Message]) -> None:
        """Send all messages, and make the step one that has a manifest on each node. Collective.

        Raises AgreedError if any rank cannot read or write its own.
        """
        folders, folder = self._folders, self._folders.own / self._name
        with self._world.agreement():
            if folders.leader:
                folders.remove_all_but(*(one / self._name for one in (folders.own, *folders.left)))
                folders.make(folder)
                for file, places in manifest.checksums.items():
                    with opened(folder / file, _NEW) as new:
                        os.ftruncate(new, max((p.start + p.length for p in places), default=0))
        for message in messages:
            self._start(message)
        while self._end():
            pass
        with self._world.agreement():
            if self._problem:
                raise self._problem
            if folders.leader:
                make_valid(folder, manifest)

    def _start(self, message: Message) -> None:
        """Start a message. Collective."""
        length = sum(self._parts[number].place.length for number in message.numbers)
        data = torch.empty(length, dtype=torch.uint8, device="cpu")
        if message.root == self._world.rank:
            with self._noted():
                self._read(message, data)
        work = self._world.collectives.named("restore").broadcast(data, message.root)
        self._waiting.append((message, data, work))
        if len(self._waiting) > _IN_FLIGHT:
            self._end()

    def _end(self) -> bool:
        """End the oldest message, if there is one. Collective."""
        if not self._waiting:
            return False
        message, data, work = self._waiting.pop(0)
        work.wait()
        world, number, self._ended = self._world, self._ended, self._ended + 1
        own = number % world.local_size == world.local_rank  # the node's ranks write in turn
        if own and world.topology.node(world.rank) in message.readers:
            with self._noted():
                self._write(message, data)
        return True

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep an error until all messages have ended, since other ranks take part in them."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._problem = self._problem or error

    def _pieces(
        self, message: Message, data: Tensor
    ) -> Iterator[tuple[int, PlacedRange, memoryview]]:
        view, at = data.numpy().data, 0
        for number in message.numbers:
            length = self._parts[number].place.length
            yield number, self._parts[number], view[at : at + length]
            at += length

    def _read(self, message: Message, data: Tensor) -> None:
        for number, (file, place), piece in self._pieces(message, data):
            left, folders = self._held.left.get(number), self._folders
            folder = folders.own if left is None else folders.left[left]
            with opened(folder / self._name / file) as source:
                os.preadv(source, [piece], place.start)

    def _write(self, message: Message, data: Tensor) -> None:
        file = self._parts[message.numbers[0]].file
        with opened(self._folders.own / self._name / file, os.O_RDWR) as target:
            for _, (_, place), piece in self._pieces(message, data):
                if zlib.crc32(piece) != place.checksum:
                    raise ValueError(f"{file} was changed while it was sent")
                write_at(target, piece, place.start)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file in the block, a new one for this user alone. Raises OSError."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)
