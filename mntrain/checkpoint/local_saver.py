"""Saving a run in the memory of its nodes, as often as that costs little: the same files, in parts.

Each node gets the manifest when all ranks have written. A copy of what a rank has written goes to
the partner's node at once (`partner_copies`). The step before, with its copies, is kept until those
of this one are complete, on all ranks. `node_folders` finds what is left.
"""

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from mntrain.checkpoint.format import FILE, FILES, Manifest, checkpoint_name
from mntrain.checkpoint.node_folders import NodeFolders
from mntrain.checkpoint.reader import FoundCheckpoint
from mntrain.checkpoint.saver import EXIT_S, Save, Saved, Saver, in_thread
from mntrain.metrics.files import write_whole
from mntrain.ranks import Ranks


class LocalSaver(Saver):
    """Saves a run into the folders of its nodes. Created by all ranks.

    `attempt` names what this start of the run trains; it is set before the first `begin`, and
    `copies.until`, the time until which a copy is to be made, while it is sent.
    """

    def __init__(self, world: Ranks, saved: Saved, folders: NodeFolders) -> None:
        super().__init__(world, saved, reads_back=False)
        self._folders = folders
        self.copies, self.attempt = folders.copies, ""
        self._copying: Future[str] = Future()  # why that of this rank failed, or ""
        # The newest step whose copies are complete; before there is any, the newest without.
        self._whole: Path | None = None
        self._copied = False
        self._present: list[Path] = []  # steps of this node, this start's and that it began with
        self._removals: list[Future[None]] = []  # that may be running
        self._problem = ""  # of this rank's last copy

    @property
    def partner(self) -> int | None:
        """The node to which copies of this one go; None on all ranks if it is the only one."""
        return self.copies.partner

    @property
    def empty(self) -> bool:
        """True if the nodes have no step that is of use. The same on all ranks."""
        return self._whole is None

    def keep_only(self, found: FoundCheckpoint | None) -> None:
        """Remove what this node has of the run, but for a step that was restored. Local.

        That one is whole on each node until the next save has its copies. Ends a save in progress.
        """
        self._stop_saving()
        path = found.path if found else None
        self._whole, self._present = path, [path] if path else []
        self._copied = path is not None
        if self._folders.leader:
            self._folders.remove_all_but(*self._present)

    def advance(self) -> Save | None:
        """Advance as `Saver` does. The last phase ends when copies do, or fail: `copy_problem`."""
        saved = super().advance()
        if saved is not None:
            problems = self._world.gather(self._problem)
            self.copy_problem = next(filter(None, problems), "")
            if not (self.copy_problem and self._copied):
                self._whole, self._copied = saved.path, not self.copy_problem
                self._remove(self._whole)
        return saved

    copy_problem = ""
    """The reason if copies of the last save are not complete; equal on all ranks."""

    def close(self, *, removes: bool) -> None:
        """End, and remove what this node has of the run, if wanted. That is collective."""
        self.copies.close()
        self._stop_saving()
        for removal in self._removals:
            with suppress(Exception):
                removal.result(EXIT_S)
        if removes:
            self._world.gather(None)  # no rank writes any more
        if removes and self._folders.leader:
            for folder in (self._folders.own, *self._folders.left):
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                self._folders.root.rmdir()  # unless another virtual node is in it

    def _stop_saving(self) -> None:
        if (save := self._pending) is not None:
            with suppress(Exception):  # its thread holds tensors until then
                save.written.result(EXIT_S)
            self._end(save)

    def _begin(self, progress: Manifest, *, in_background: bool) -> None:
        super()._begin(progress, in_background=in_background)
        assert self._pending is not None
        self._copying = in_thread(partial(self._copy, self._pending))

    def _copy(self, save: Save) -> str:
        """Send what this rank has written. In a thread."""
        own = save.written.result()
        sizes = {name: (save.path / name).stat().st_size for name in FILES}
        return self.copies.send(save.path.relative_to(self._folders.own), sizes, own)

    def _new(self, progress: Manifest, start: float, token: str) -> Save:
        path = self._folders.own / self.attempt / checkpoint_name(progress.step)
        # Without a manifest until all have written.
        return Save(path, path, progress, start, mode=0o600, made_here=True, told=False)

    def _make_folder(self, save: Save) -> None:
        self._remove(self._whole)  # the last one, if its copies are not complete
        self._folders.make(save.folder)  # by each rank of the node
        self._present.append(save.path)

    def _remove(self, kept: Path | None) -> None:
        """Remove all present steps but one, in a thread."""
        removed = [path for path in self._present if path != kept]
        self._present = [path for path in self._present if path == kept]
        if self._folders.leader and removed:
            running = [removal for removal in self._removals if not removal.done()]
            self._removals = [*running, in_thread(partial(_remove, removed))]

    def _publish(self, save: Save) -> None:
        """Write the manifest, and wait for this rank's copy. In a thread."""
        if self._folders.leader:
            write_whole(save.path / FILE, save.described().to_json().encode(), save.mode)
        self._problem = self._copying.result()
        save.seconds = time.perf_counter() - save.start


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
