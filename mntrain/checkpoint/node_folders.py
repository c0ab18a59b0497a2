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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mntrain.checkpoint.format import (
    FILE,
    FILES,
    ChecksummedRange,
    Manifest,
    checkpoint_name,
    opened,
    read_manifest,
    step_of,
)
from mntrain.checkpoint.partner_copies import PartnerCopies
from mntrain.checks.local_folder import NODE, Attempts, prepare, run_folder
from mntrain.errors import AgreedError
from mntrain.metrics.files import write_whole
from mntrain.ranks import Ranks

_ROUND = 512  # parts that all ranks together send until they meet: 8 GiB at most
NOT_WRITTEN = "not all ranks had written it"


class PlacedRange(NamedTuple):
    """A range of a file of a checkpoint."""

    file: str
    place: ChecksummedRange


class Held(NamedTuple):
    """Numbers of the parts that a rank has found on its node, by the folder that they are in."""

    own: frozenset[int]
    # In the folder of a virtual node that is no more, by its number among those.
    left: Mapping[int, int]


class NodeFolders:
    """A run's folder on this rank's node, and those of virtual nodes that are no more.

    Made by all ranks, within DIR, which is made unless it is there. `attempts` are those of the
    run, before what this start trains, and `copies` what ranks send into them. Raises AgreedError
    if any node cannot use DIR, if nodes share it, or as `PartnerCopies`.
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
        self.copies = PartnerCopies(world, self.own)

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
        A range that nodes lack is sent to each, by a rank on a node that has it. A step of which
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
        lacking, sends = assign_senders(parts, held, world.topology.nodes)
        if lacking:
            nbytes = sum(parts[number].place.length for number in lacking)
            share = f"{len(lacking)} of its {len(parts)} slices ({nbytes / 1e6:.1f} MB)"
            return None, f"{share} are on no node, or damaged"
        try:
            self._send(name, manifest, parts, held[world.rank].left, sends)
        except AgreedError as error:
            raise AgreedError(
                f"{name.name} is whole in the nodes' memory, and a node cannot be given all of it "
                f"({error}): free space in {self.root.parent} and start again, or remove "
                f"{self.root} on each node to go on from the run directory",
                world.rank,
            ) from error
        numbers = {number for of in sends for some in of.values() for number in some}
        sent = sum(parts[number].place.length for number in numbers)
        return manifest, f"of {world.topology}, which were sent {sent / 1e6:.1f} MB of it"

    def _send(
        self,
        name: Path,
        manifest: Manifest,
        parts: Sequence[PlacedRange],
        left: Mapping[int, int],
        sends: Sequence[Mapping[int, Sequence[int]]],
    ) -> None:
        """Send each node the parts that this rank is to, and write the manifest here. Collective.

        In rounds that take seconds, so that no rank waits for another until --comm.timeout. `sends`
        is by rank. Raises AgreedError if any part cannot be read, sent or written.
        """
        world, nodes = self._world, self._world.topology.nodes
        with world.agreement():
            if self.leader:
                self.remove_all_but(*(folder / name for folder in (self.own, *self.left)))
                self.make(self.own / name)
        sizes = {file: sum(p.length for p in manifest.checksums[file]) for file in FILES}
        own = world.topology.node(world.rank)
        order = (*range(own + 1, len(nodes)), *range(own + 1))  # each rank begins elsewhere
        to_send = [(node, n) for node in order for n in sends[world.rank].get(node, ())]
        most, count = max(sum(map(len, of.values())) for of in sends), max(1, _ROUND // world.size)
        for start in range(0, most, count):
            some = to_send[start : start + count]
            with world.agreement():
                for node, number in dict.fromkeys((node, left.get(n, -1)) for node, n in some):
                    given = [parts[n] for at, n in some if (at, left.get(n, -1)) == (node, number)]
                    ranges = {file: [place for of, place in given if of == file] for file in FILES}
                    folder = (self.own, *self.left)[number + 1]
                    if problem := self.copies.send(name, sizes, ranges, node, folder):
                        raise ValueError(f"to {world.places[nodes[node][0]].host}: {problem}")
        with world.agreement():
            if self.leader:
                write_whole(self.own / name / FILE, manifest.to_json().encode(), 0o600)

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
) -> tuple[list[int], list[dict[int, list[int]]]]:
    """Return the numbers of parts that nobody has, and of those that each rank sends, by node.

    Pure. `held` is by rank. A part goes to each node that lacks it. Of several ranks that have it,
    the one sends it that sends least.
    """
    owners: list[list[int]] = [[] for _ in parts]  # by part
    for rank, (own, left) in enumerate(held):
        for number in (*own, *left):
            owners[number].append(rank)
    on_node = [frozenset[int]().union(*(held[rank].own for rank in node)) for node in nodes]
    sent = [0] * len(held)
    sends: list[dict[int, list[int]]] = [{} for _ in held]
    for number, (_, place) in enumerate(parts):
        readers = [node for node, own in enumerate(on_node) if number not in own]
        if owners[number] and readers:
            sender = min(owners[number], key=lambda rank: (sent[rank], rank))
            sent[sender] += place.length * len(readers)
            for node in readers:
                sends[sender].setdefault(node, []).append(number)
    return [number for number, ranks in enumerate(owners) if not ranks], sends


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
