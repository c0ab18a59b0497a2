"""Metrics of a run: metrics.jsonl and its copies, summary.json and the page."""

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Self

from torch import Tensor

from mntrain.alike.naming import difference
from mntrain.errors import AgreedError, raised_by_all
from mntrain.metrics.files import METRICS_FILE, Line, loss_text
from mntrain.metrics.registry import PHASES, StepTimer, of_this_rank
from mntrain.metrics.writers import MetricsFiles
from mntrain.options.config import LogConfig
from mntrain.rank_info import memory_now
from mntrain.ranks import Ranks
from mntrain.run.delayed_sums import DelayedSums, Sums
from mntrain.run.directory import RunDirectory
from mntrain.run.means import to_float, weight_problem
from mntrain.run.named_sums import NamedSums, NamedValue

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

    def own(self) -> dict[str, NamedValue]:
        """Return the sums that the values stand for: 0 times nan is nan."""
        weight = self.weight
        return {
            n: NamedValue("mean", weight * v if weight else 0.0, weight)
            for n, v in self.values.items()
        }


class MetricsLog:
    """metrics.jsonl and summary.json of a run, which rank 0 writes. Made by `World.metrics`.

    A context manager. At its end, or in `close`, it writes summary.json with the status
    "completed", "stopped", "preempted" or "interrupted" (as `World.stop_requested` has said), or
    "failed" (after an AgreedError). An exception on one rank alone makes it "crashed". A job
    writes lines and the summary of its own, by `write` and `finish`.
    """

    def __init__(
        self,
        world: Ranks,
        directory: RunDirectory,
        log: LogConfig,
        sums: DelayedSums,
        summarize: Callable[..., dict[str, Any]],
    ) -> None:
        """Make metrics.jsonl, when the run begins. Collective.

        `log` selects copies of it, and the page at its end. Lines are reduced by `sums`, its own.
        `summarize` makes the summary, collectively, of the last values and the arguments of the
        method. From the run's beginning until the end, a job that ends without its ranks leaves a
        summary.json.
        """
        self._world, self._directory, self._log, self._summarize = world, directory, log, summarize
        directory.write_files({METRICS_FILE: None})
        self._files: MetricsFiles | None = None  # opened for the first line, on rank 0
        self._rewinds = 0  # of the directory, when they were opened
        self._early_end = directory.write_early_end
        world.watchdog.at_end.append(self._early_end)
        self._sums = sums
        self._lines = deque[_Line]()  # whose sums are under way
        self._values = NamedSums()
        self._last: dict[str, Any] = {}  # the last value of each name in the lines
        self._own: dict[str, float] = {}  # of this rank, for all to know
        self._start = time.perf_counter()
        self._timer = StepTimer(world.collectives)
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
        self._directory.begin()
        self._write_lines(self._sums.take())
        self._directory.last_step = step
        line = _Line(step, weight, read, times)
        self._lines.append(line)
        terms = self._values.terms(line.own()).items()
        self._sums.start(line.told() | {name: value for name, (value, _) in terms}, own)

    def flush(self) -> None:
        """Write the last lines. Collective; waits for their means."""
        if self._lines:  # a job has none, whose last step nothing follows
            self._write_lines(self._sums.take_all())

    def _write_lines(self, taken: Sequence[Sums]) -> None:
        """Write the lines that were logged first, by their sums. Collective if they have new names.

        Raises AgreedError on all ranks.
        """
        lines = [self._lines.popleft() for _ in taken]
        for number, (line, (sums, _)) in enumerate(zip(lines, taken, strict=True)):
            if sums["digest"] ** 2 != sums["squared digest"] * self._world.size:
                self._write_alike(lines[:number], taken[:number])
                names = " and ".join(sorted(line.values)) or "no value"
                told = self._world.gather(f"step {line.step} with {names}")
                raise AgreedError(difference("metrics.log", told), self._world.rank)
        self._write_alike(lines, taken)

    def _write_alike(self, lines: Sequence["_Line"], taken: Sequence[Sums]) -> None:
        """Write lines that all ranks have with the same names. Collective if names are new."""
        found, own = [sums for sums, _ in taken], [line.own() for line in lines]
        reduced = self._values.take(own, found, self._world.collectives)
        for line, values, (sums, by_rank) in zip(lines, reduced, taken, strict=True):
            if not sums["weight"]:
                message = f"metrics.log({line.step}): the weights of all ranks are 0"
                raise AgreedError(message, self._world.rank)
            means, rounding = dict(line.values), self._world.size * 2**-52
            for name, own_value in line.values.items():  # which stay if only the sum was rounded
                mean = float(values[name].value)
                if not math.isclose(mean, own_value, rel_tol=rounding):
                    means[name] = mean
            self.write({"step": line.step, **means, **line.times, **by_rank})

    def write(self, line: Line, *, own: Mapping[str, float] | None = None) -> None:
        """Append a line that is complete but for the values of each rank, on rank 0.

        Local, and never raises; with values of this rank of its `own` collective, in each step.
        They are in the next line; where nodes train alone, the latest in the line of an exchange.
        """
        if own:
            for taken in self._sums.take():
                line = {**line, **taken.by_rank}
            self._own.update(own)
            if not self._sums.waiting:
                self._sums.start({}, {n: partial(self._own.__getitem__, n) for n in own})
        self._last |= line
        if self._world.master:
            self._opened().write(line)

    def summarize(self, wall_s: float, **figures: float) -> dict[str, Any]:
        """Return the entries of summary.json of jobs and own loops alike. Collective.

        `wall_s` are the seconds so far, and `figures` those of this rank for `resources`, if they
        are more or others than the samples that `world.shard` has handed out.
        """
        return self._summarize(self._last, wall_s, **figures)

    def finish(self, summary: Mapping[str, Any]) -> list[str]:
        """Write summary.json and the page. Collective. Returns what is missing, a text for each."""
        missing = []
        if self._world.master:
            files, self._files = self._opened(), None
            missing = files.finish(summary)
        self._world.watchdog.at_end.remove(self._early_end)
        return self._world.gather(missing)[0]

    def _opened(self) -> MetricsFiles:
        """Return the open files, which a rewind of the directory has replaced. Local."""
        directory = self._directory
        if self._files is None or self._rewinds != directory.rewinds:
            if self._files is not None:
                self._files.close()
            self._rewinds = directory.rewinds
            own = directory.expect_own
            self._files = MetricsFiles(directory.path, self._log, self._world.output.warn, own)
        return self._files

    def open(self) -> None:
        """Open the files now, since copies may take seconds to begin. Local."""
        if self._world.master:
            self._opened()

    def close(self) -> None:
        """Write the last line and summary.json. Collective. Does nothing the second time.

        Raises AgreedError if these, or lines before, could not be written, on a full disk for
        example: training goes on until here, and lines wait in memory.
        """
        self._finish(None)

    def abandon(self) -> None:
        """Close metrics.jsonl without waiting for other ranks; warn if it lacks lines. Local."""
        self._open = False
        files, self._files = self._files, None
        if files is not None:
            files.close()
            if files.missing:
                self._world.output.warn(loss_text(self._directory.path, files.missing))

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
        if not self._directory.begun:  # the restore of its checkpoints was refused
            self.abandon()
            return
        try:
            if error is None:
                self.flush()
            summary = self.summarize(time.perf_counter() - self._start)
            if error is not None:
                summary |= {"status": "failed", "error": str(error)}
            if missing := self.finish(summary):
                text = loss_text(self._directory.path, missing)
                if error is None:
                    raise AgreedError(text, self._world.rank)
                self._world.output.warn(text)
        finally:
            self.abandon()

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
