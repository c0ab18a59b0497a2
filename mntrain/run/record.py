"""The record of a run: metrics.jsonl and its copies, summary.json and the page."""

from collections.abc import Callable, Mapping
from typing import Any, Self

from mntrain.metrics.files import Line, loss_text
from mntrain.metrics.writers import MetricsFiles
from mntrain.options.config import LogConfig
from mntrain.ranks import Ranks
from mntrain.run.directory import RunDirectory


class RunRecord:
    """The record of a job or of an own loop, which rank 0 writes. Construction is local.

    From then on until `finish` or the end of the world, a job that ends without its ranks leaves a
    summary.json. `log` selects copies and the page; `warn` prints a warning.
    """

    def __init__(
        self, world: Ranks, directory: RunDirectory, log: LogConfig, warn: Callable[[str], None]
    ) -> None:
        self._world, self._directory, self._log, self._warn = world, directory, log, warn
        self._files: MetricsFiles | None = None  # opened for the first line, on rank 0
        self._rewinds = 0  # of the directory, when they were opened
        self._early_end = directory.write_early_end
        world.watchdog.at_end.append(self._early_end)

    def write(self, line: Line) -> None:
        """Append a line to metrics.jsonl and its copies, on rank 0. Local; never raises."""
        if self._world.master:
            self._opened().write(line)

    def finish(self, summary: Mapping[str, Any]) -> list[str]:
        """Write summary.json and the page. Collective. Returns what is missing, a text for each."""
        missing = []
        if self._world.master:
            files, self._files = self._opened(), None
            missing = files.finish(summary)
        self._world.watchdog.at_end.remove(self._early_end)
        return self._world.gather(missing)[0]

    def __enter__(self) -> Self:
        if self._world.master:
            self._opened()  # before the first step: copies may take seconds to begin
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Close metrics.jsonl without waiting for other ranks; warn if it lacks lines. Local."""
        files, self._files = self._files, None
        if files is not None:
            files.close()
            if files.missing:
                self._warn(loss_text(self._directory.path, files.missing))

    def _opened(self) -> MetricsFiles:
        """Return the open files, which a rewind of the directory has replaced. Local."""
        if self._files is None or self._rewinds != self._directory.rewinds:
            if self._files is not None:
                self._files.close()
            self._rewinds = self._directory.rewinds
            self._files = MetricsFiles(
                self._directory.path, self._log, self._warn, self._directory.expect_own
            )
        return self._files
