"""Checkpoints in the nodes' memory: when they are due, and what of them is told."""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from mntrain.checkpoint import FoundCheckpoint, Manifest
from mntrain.checkpoint.local_saver import LocalSaver
from mntrain.checkpoint.node_folders import NodeFolders
from mntrain.checkpoint.saver import Saved
from mntrain.checks.local_folder import Attempts, free_bytes
from mntrain.errors import AgreedError
from mntrain.ranks import Ranks
from mntrain.run.save_interval import SaveInterval

SHARE = 0.01  # of the time of training, that `auto` may cost
_FIRST_AFTER = 5  # undisturbed steps, whose time is known then
_STEPS = 64  # of which the time is kept
_OTHER_BYTES = 64 << 10  # of a rank, beside tensors: random generators, headers, the manifest
_COPY_SHARE, _COPY_S = 0.25, 30.0  # of an interval, and most seconds, until copies are to be sent
# No machine takes longer for a byte of a rank that is written, sent over 1 Gbit/s and received:
# what longer steps during a save show beyond that is noise.
_MOST_S_PER_BYTE = 20e-9


class SaveCost:
    """The cost of saves in the nodes' memory, as the times of steps show it.

    The time of a step is that from the end of one call of `Checkpoints.save` to the next. This rank
    saves about `nbytes`.
    """

    def __init__(self, nbytes: int) -> None:
        self._most_s = nbytes * _MOST_S_PER_BYTE
        self._quiet: deque[float] = deque(maxlen=_STEPS)  # seconds of undisturbed steps
        self._disturbed: deque[float] = deque(maxlen=_STEPS)  # of those during saves
        self._during = 0  # steps during the present save
        self._left: float | None = None  # when the last step's call ended
        self._interval_s = self._blocked_s = 0.0

    def step_taken(self, *, disturbed: bool) -> None:
        """Note that a step was taken. Local."""
        self._during += disturbed
        if self._left is not None:
            (self._disturbed if disturbed else self._quiet).append(time.monotonic() - self._left)

    def leaves(self, blocked_s: float) -> None:
        """Note that the next step begins, after so many seconds for a save. Local."""
        self._left = time.monotonic()
        self._blocked_s += blocked_s

    def begins(self) -> None:
        """Note that a save begins. Local."""
        self._blocked_s, self._during = 0.0, 0

    def ended(self) -> None:
        """Note that it has ended, which shows what it cost. Local.

        That is the time for which training waited, and by which steps during saves are longer: the
        mean difference and two standard errors, since it must not be taken for less than it is.
        """
        extra_s = self._most_s
        if min(len(self._quiet), len(self._disturbed)) > 1:
            step_s = median(self._quiet)  # much longer ones have other causes
            quiet = [min(seconds, 2 * step_s) for seconds in self._quiet]
            disturbed = [min(seconds, step_s + self._most_s) for seconds in self._disturbed]
            error = sum(variance(one) / len(one) for one in (quiet, disturbed)) ** 0.5
            longer = fmean(disturbed) - fmean(quiet) + 2 * error
            extra_s = min(self._most_s, max(0.0, longer) * self._during)
        seconds = (self._blocked_s + extra_s) / SHARE
        self._interval_s = (self._interval_s + seconds) / 2 if self._interval_s else seconds

    def interval_s(self) -> float:
        """Return the interval "auto" in seconds; infinity until undisturbed steps are known."""
        return self._interval_s if len(self._quiet) >= _FIRST_AFTER else inf

    def copy_s(self, every: int) -> float:
        """Return the seconds from the begin of a save in which its copies are to be sent.

        `every` is the interval in steps, 0 for "auto".
        """
        steps = [*self._quiet, *self._disturbed]
        until_next = max(self._interval_s, self._blocked_s / SHARE)
        if every:
            until_next = every * median(steps) if steps else 0.0
        return min(_COPY_S, until_next * _COPY_SHARE)


class LocalCheckpoints:
    """The checkpoints of a run in the memory of its nodes, of which the user sees only faults.

    Every rank makes the same decisions. The first save that fails is told by a warning; training
    goes on, and later ones are tried. One that is due while another is not complete with its copies
    begins as soon as that is.
    """

    def __init__(self, world: Ranks, saved: Saved, folders: NodeFolders, every: str) -> None:
        """Check that all can be saved. Collective; raises AgreedError."""
        self._world, self._folders = world, folders
        saver = self.saver = LocalSaver(world, saved, folders)
        self._cost = SaveCost(_own_bytes(world, saver))
        self._interval = SaveInterval(every, self._cost.interval_s)
        self._failed = self._saved = self._late = 0
        self._waited_s = 0.0
        self._warned = self._overdue = False
        with world.agreement():
            saver.check()
        self._expect_room()
        if saver.partner is None:
            world.output.warn(
                "checkpoints in the memory of a single node are lost with it: there is no other "
                "node for a copy"
            )

    @property
    def asks(self) -> bool:
        """True if `flags` of all ranks are needed. The same on all ranks."""
        return self.saver.saving or self._interval.by_clock

    def flags(self) -> Mapping[str, Callable[[], float]]:
        """Return what this rank tells the others: that a save is due, or its part is ready."""
        return {"local due": self._due, "local ready": self.saver.ready}

    def restored(self, found: FoundCheckpoint | None, attempts: Attempts) -> None:
        """Begin an attempt with what was restored, and remove all else of the run. Local.

        `attempts` are those of the run, this one too.
        """
        self._folders.attempts = attempts
        self.saver.attempt, self._overdue = attempts.last, False
        self.saver.keep_only(found if found and found.from_nodes else None)

    def after_step(
        self,
        progress: Manifest,
        flags: Mapping[str, float],
        *,
        before_save: Callable[[], None],
    ) -> bool:
        """Advance the save that is being written, or begin one that is due. Collective.

        `flags` are sums over ranks. Returns whether flags that are on their way are of a phase that
        has ended.
        """
        start, ended = time.perf_counter(), False
        if progress.eval_loss is None:  # or the step has taken longer for that
            self._cost.step_taken(disturbed=self.saver.saving)
        due_now = flags["local due"] > 0 or self._interval.due_after(progress.step)
        due, begins = due_now or self._overdue, False
        if self.saver.saving and flags["local ready"] >= self._world.size:
            self._advance()
            ended = True
        self._overdue = due and self.saver.saving
        self._late += due_now and self._overdue
        if due and not self._overdue:
            before_save()
            self._cost.begins()
            self._interval.begins()
            self.saver.begin(progress)
            begins = ended = True
        spent = time.perf_counter() - start
        self._waited_s += spent
        self._cost.leaves(spent)
        if begins:
            self.saver.copies.until = time.monotonic() + self._cost.copy_s(self._interval.steps)
        return ended

    def finish(self) -> None:
        """Complete the save that is being written, if there is one, without pauses. Collective."""
        self.saver.copies.until = 0.0
        while self.saver.saving:
            self._advance()

    def summary(self) -> dict[str, Any]:
        """Return what is told of them in summary.json. Local."""
        counts = {"saved": self._saved, "failed": self._failed, "late": self._late}
        return {**counts, "waited_s": self._waited_s}

    def _due(self) -> bool:
        return self._world.master and not self.saver.saving and self._interval.due_now()

    def _advance(self) -> None:
        try:
            saved = self.saver.advance()
        except AgreedError as error:
            self._fail(str(error))
            self._cost.ended()
            return
        if saved is None:
            return
        self._cost.ended()
        if self.saver.copy_problem:
            self._fail(f"{saved.path.name} has no copy on another node: {self.saver.copy_problem}")
        else:
            self._saved += 1

    def _fail(self, reason: str) -> None:
        self._failed += 1
        if not self._warned:
            self._warned = True
            self._world.output.warn(
                f"in the nodes' memory, {reason}; training goes on, and only the first such "
                "failure is told"
            )

    def _expect_room(self) -> None:
        """Raise AgreedError if a host has no room for saves, and for a restart. Collective.

        In a restart, each node gets a whole step, and keeps it until the next save has its copies.
        Later, a save has two steps and two copies, which is not more.
        """
        world, nodes = self._world, self._world.topology.nodes
        by_rank = world.gather((_own_bytes(world, self.saver), self.saver.partner))
        of_node = [sum(by_rank[rank][0] for rank in node) for node in nodes]
        host = world.hosts[world.rank]
        here = [number for number, node in enumerate(nodes) if world.hosts[node[0]] == host]
        copied = [number for number, node in enumerate(nodes) if by_rank[node[0]][1] in here]
        whole = sum(of_node) * len(here)
        needed = whole + sum(of_node[number] for number in [*here, *copied])
        with world.agreement():
            folder = self._folders.root.parent
            room = free_bytes(folder) + _used_bytes(self._folders.root)
            if room < needed:
                raise ValueError(
                    f"the folder for local checkpoints, {folder}, has room for {room / 1e9:.3g} GB "
                    f"on {world.places[world.rank].host}, and a restart takes {needed / 1e9:.3g} "
                    "GB: a whole step for each node, and its part of the next one, with its "
                    "partner's. Make it larger (of /dev/shm, mount -o remount,size=), or give one "
                    "on a disk"
                )


def _own_bytes(world: Ranks, saver: LocalSaver) -> int:
    """Return about as many bytes as this rank saves, by what its optimizer will have. Local."""
    optimizer = saver.optimizer
    model = sum(t.numel() * t.element_size() for t in saver.model.state_dict().values())
    try:
        memory = optimizer.predicted_memory()
    except Exception:  # of an optimizer that needs more than tensors without memory
        memory = optimizer.memory()
    state = memory.master + memory.state
    if not optimizer.sharded:
        state //= world.size
    return int(model // world.size + state) + _OTHER_BYTES


def _used_bytes(folder: Path) -> int:
    """Return the bytes that the files in a folder take. Local."""
    used = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                used += os.stat(Path(path, name)).st_blocks * 512
            except OSError:
                continue  # removed meanwhile
    return used
