"""Metrics of a user's own training loop, in the files that the trainer writes."""

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Self

from torch import Tensor

from mntrain.alike.naming import difference
from mntrain.errors import AgreedError, raised_by_all
from mntrain.metrics.files import (
    METRICS_FILE,
    append_whole,
    loss_text,
)
from mntrain.metrics.registry import METRICS, PHASES, StepTimer, of_this_rank
from mntrain.metrics.writers import MetricsFiles
from mntrain.options.config import LogConfig
from mntrain.rank_info import memory_now
from mntrain.ranks import Ranks
from mntrain.run.directory import RunDirectory, warn
from mntrain.run.means import DelayedSums, Sums, to_float, weight_problem

_DIGEST_BITS = 20  # the squares of the digests of all ranks have an exact sum in fp64


class _Line(NamedTuple):
    """A line of metrics.jsonl, before its values are means over ranks."""

    step: int
    weight: float
    values: dict[str, float]
    times: dict[str, float]

    def told(self) -> dict[str, float]:
        """Return the terms of the sums by which ranks see that they have the same line."""
        names = repr((self.step, sorted(self.values)))
        digest = zlib.crc32(names.encode()) % (1 << _DIGEST_BITS)
        return {"digest": digest, "squared digest": digest**2, "weight": float(self.weight)}

    def weighted(self, names: Iterable[str]) -> dict[str, float]:
        """Return the terms of the sums over ranks: 0 for a value that this rank lacks."""
        values = self.values if self.weight else {}  # 0 times nan is nan
        return {f"of {name}": self.weight * values.get(name, 0.0) for name in names}


class MetricsLog:
    """metrics.jsonl and summary.json of a user's own loop. Made by `World.metrics`.

    A context manager. At its end, or in `close`, it writes summary.json with the status
    "completed", "preempted" or "interrupted" (if `World.stop_requested` has returned True), or
    "failed" (after an AgreedError). An exception on one rank alone makes it "crashed".
    """

    def __init__(
        self,
        world: Ranks,
        directory: RunDirectory,
        log: LogConfig,
        describe: Callable[[float], Mapping[str, Any]],
        sums: DelayedSums,
    ) -> None:
        """Make metrics.jsonl. Collective. `log` selects copies of it, and the page at its end.

        `sums` are those of a line's values. `describe` returns more of the summary, collectively,
        given the seconds since now.
        """
        self._world, self._directory, self._describe = world, directory, describe
        self._log, self._rewinds = log, 0
        self._files: MetricsFiles | None = None  # opened for the first line, on the master
        with world.agreement():
            if world.master:
                append_whole(directory.path / METRICS_FILE, b"")
        self._sums = sums
        self._lines = deque[_Line]()  # whose sums are under way
        self._names: list[str] = []  # of all values so far, the same on all ranks
        self._last: dict[str, float] = {}
        self._start = time.perf_counter()
        self._timer = StepTimer(world.collectives)
        self._early_end = directory.write_early_end
        world.watchdog.at_end.append(self._early_end)
        self._open = True

    def log(self, step: int, *, weight: float = 1.0, **values: float | Tensor) -> None:
        """Append a line with the means of values over all ranks, and the time of the step.

        Collective. Every rank gives the same step, above the last, and the same names. `weight` is
        the number of samples or tokens that this rank's values are means over; 0 leaves the rank
        out. Tensors have one element, and reading them waits for their device.

        No rank waits for another: the line is written in the next call; with a sync schedule, in
        the first call after its round. It also has the seconds since the last call ("step_s"), and
        those in which a collective was in progress ("communication") and was waited for
        ("exposed"). Raises AgreedError for a wrong argument; one call later if ranks differ in the
        step or the names, or if all weights are 0.
        """
        times = {k: v for k, v in self._timer.times().items() if k not in PHASES}
        self._timer = StepTimer(self._world.collectives)
        numbers = {name: to_float(value) for name, value in values.items()}
        read = {name: number for name, number in numbers.items() if number is not None}
        memory = memory_now(self._world.device)
        own = of_this_rank(times, memory) if self._log.per_rank else {}
        reserved = {"step", *times, *own} & values.keys()
        self._check(step, weight, reserved, values.keys() - read.keys())
        self._write_lines(self._sums.take())
        self._directory.last_step = step
        line = _Line(step, weight, read, times)
        self._lines.append(line)
        self._sums.start(line.told() | line.weighted(self._names), own)

    def flush(self) -> None:
        """Write the last lines. Collective; waits for their means."""
        self._write_lines(self._sums.take_all())

    def _write_lines(self, taken: Sequence[Sums]) -> None:
        """Write the lines that were logged first, by their sums. Collective if they have new names.

        Raises AgreedError on all ranks.
        """
        lines = [self._lines.popleft() for _ in taken]
        lacking: dict[str, float] = {}
        for number, (line, (sums, _)) in enumerate(zip(lines, taken, strict=True)):
            if sums["digest"] ** 2 != sums["squared digest"] * self._world.size:
                raise AgreedError(self._difference(line), self._world.rank)
            new = [name for name in sorted(line.values) if f"of {name}" not in sums]
            self._names += [name for name in new if name not in self._names]
            lacking |= {f"{number} {key}": value for key, value in line.weighted(new).items()}
        if lacking:
            for key, value in self._sums.now(lacking).items():
                number_text, _, name = key.partition(" ")
                taken[int(number_text)].sums[name] = value
        for line, (sums, by_rank) in zip(lines, taken, strict=True):
            self._write(line, sums, by_rank)

    def _write(
        self, line: _Line, sums: Mapping[str, float], by_rank: Mapping[str, dict[str, float]]
    ) -> None:
        """Write a line, on the master. Local; raises AgreedError on all ranks."""
        weight = sums["weight"]
        if not weight:
            message = f"metrics.log({line.step}): the weights of all ranks are 0"
            raise AgreedError(message, self._world.rank)
        means = {n: self._mean(sums[f"of {n}"] / weight, own) for n, own in line.values.items()}
        self._last |= means
        if self._world.master:
            self._open_files().write({"step": line.step, **means, **line.times, **by_rank})

    def close(self) -> None:
        """Write the last line and summary.json. Collective. Does nothing the second time.

        Raises AgreedError if these, or lines before, could not be written, on a full disk for
        example: training goes on until here, and lines wait in memory.
        """
        self._finish(None)

    def abandon(self) -> None:
        """Close metrics.jsonl without waiting for other ranks; warn if it lacks lines. Local."""
        files, self._files, self._open = self._files, None, False
        if files is not None:
            files.close()
            if files.missing:
                warn(loss_text(self._directory.path, files.missing))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if raised_by_all(error):
            self._finish(error if isinstance(error, AgreedError) else None)
        else:
            self.abandon()

    def _finish(self, error: AgreedError | None) -> None:
        if not self._open:
            return
        try:
            if error is None:
                self.flush()
            wall_s = time.perf_counter() - self._start
            summary = {
                "steps": self._directory.last_step,
                **{m.summary: self._last.get(n) for n, m in METRICS.items() if m.summary},
                "wall_s": wall_s,
                "run_dir": str(self._directory.path),
                **self._describe(wall_s),
            }
            if error is not None:
                summary |= {"status": "failed", "error": str(error)}
            missing = []
            if self._world.master:
                files, self._files = self._open_files(), None
                missing = files.finish(summary)
            self._world.watchdog.at_end.remove(self._early_end)
            if missing := self._world.gather(missing)[0]:
                text = loss_text(self._directory.path, missing)
                if error is None:
                    raise AgreedError(text, self._world.rank)
                if self._world.master:
                    warn(text)
        finally:
            self.abandon()

    def _open_files(self) -> MetricsFiles:
        """Return the open files, which a rewind of the directory has replaced. Local."""
        if self._files is None or self._rewinds != self._directory.rewinds:
            if self._files is not None:
                self._files.close()
            self._rewinds = self._directory.rewinds
            self._files = MetricsFiles(
                self._directory.path, self._log, warn, self._directory.expect_own
            )
        return self._files

    def _check(self, step: int, weight: float, reserved: set[str], unread: set[str]) -> None:
        """Raise AgreedError for arguments that this rank cannot accept. Local."""
        last, problem = self._directory.last_step, weight_problem(weight)
        if not self._open:
            problem = "the log is closed"
        elif not isinstance(step, Real):
            problem = "the step is no number: give log(step, name=value, ...)"
        elif step <= last:
            problem = (
                f"{self._directory.path} has step {last} already, and has a line for each step: "
                "log all values of a step at once; to resume the run, call restore() of its "
                "checkpoints first; to begin anew, give another run directory"
            )
        elif unread:
            problem = f"{', '.join(sorted(unread))} is neither a number nor a tensor of one element"
        elif reserved:
            problem = f"{', '.join(sorted(reserved))} is written by the log itself: rename it"
        if problem:
            raise AgreedError(f"metrics.log({step!r}): {problem}", self._world.rank)

    def _difference(self, line: _Line) -> str:
        """Return the error for ranks that logged different steps or names. Collective."""
        names = " and ".join(sorted(line.values)) or "no value"
        return difference("metrics.log", self._world.gather(f"step {line.step} with {names}"))

    def _mean(self, mean: float, own: float) -> float:
        """Return a mean, or this rank's value if they differ by the rounding of the sum only."""
        return own if math.isclose(mean, own, rel_tol=self._world.size * 2**-52) else mean
