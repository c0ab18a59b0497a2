"""Saving a run in its directory, where all nodes see it.

RUN/checkpoints/.step-00000050.<token>/     while it is written
RUN/checkpoints/step-00000050/              after every rank's part is on the disk

At the first save of a job on several nodes, each node reads what another one wrote.
"""

import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mntrain.checkpoint.format import FILE, Manifest, checkpoint_name, sync_folder
from mntrain.checkpoint.reader import list_checkpoints, scores
from mntrain.checkpoint.saver import Save, Saved, Saver
from mntrain.metrics.files import write_whole
from mntrain.ranks import Ranks


class DirectorySaver(Saver):
    """Saves a run into its directory. Created by all ranks.

    `expect_own` raises OSError on the master if another folder is in the place of the directory.
    """

    def __init__(
        self,
        world: Ranks,
        saved: Saved,
        run_dir: Path,
        keep: int,
        *,
        expect_own: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(world, saved, reads_back=len(world.topology.nodes) > 1)
        self._run_dir, self._keep, self._expect_own = run_dir, keep, expect_own

    def best_score(self, last: int, metric: str) -> float:
        """Return the lowest score by a metric of checkpoints up to step `last`. Collective.

        Infinity without any.
        """
        lowest = math.inf
        with self._world.agreement():
            if self._world.master:
                found = list_checkpoints(self._run_dir)
                paths = [path for path in found if path.name <= checkpoint_name(last)]
                lowest = min(scores(paths, metric).values(), default=math.inf)
        return self._world.gather(lowest)[0]

    def _new(self, progress: Manifest, start: float, token: str) -> Save:
        path = self._run_dir / "checkpoints" / checkpoint_name(progress.step)
        folder = path.with_name(f".{path.name}.{token}")
        return Save(path, folder, progress, start, made_here=self._world.master)

    def _make_folder(self, save: Save) -> None:
        self._expect_own()
        # Not the run directory: where that was removed, nobody would find another one.
        save.folder.parent.mkdir(exist_ok=True)
        save.folder.mkdir()

    def _publish(self, save: Save) -> None:
        """Write the manifest, rename the folder and remove old checkpoints, on the master."""
        wrote_s = save.seconds = time.perf_counter() - save.start
        if not self._world.master:
            return
        _make_valid(save, replace(save.described(), wrote_s=wrote_s))
        save.seconds = time.perf_counter() - save.start
        remove_old(self._run_dir, self._keep, save.manifest.scored_by)


def _make_valid(save: Save, content: Manifest) -> None:
    """Write the manifest, then rename the folder, which makes it a checkpoint.

    All other files must be on the disk. Raises OSError, and ValueError as `Manifest.to_json`.
    """
    write_whole(save.folder / FILE, content.to_json().encode(), save.mode)
    sync_folder(save.folder)
    if save.path.exists():  # damaged, or the job would have resumed from it
        save.path.rename(save.path.with_name(f".{save.path.name}.old"))
    save.folder.rename(save.path)
    sync_folder(save.path.parent)


def remove_old(run_dir: Path, keep: int, metric: str) -> None:
    """Remove all but the newest `keep` checkpoints and the first with the lowest score by a metric.

    A folder that cannot be removed is left to the next call, and all where they cannot be listed or
    a manifest cannot be read: it may be that of the best. Files of others stay.
    """
    with suppress(OSError):
        for leftover in (run_dir / "checkpoints").glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    try:
        paths = list_checkpoints(run_dir)
        best = next(iter(scores(paths, metric)), None)
    except OSError:
        return
    for path in paths[keep:]:
        if path != best:
            # Renamed first: a half-removed folder must not look like a checkpoint.
            removed = path.with_name(f".{path.name}.old")
            with suppress(OSError):
                path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
