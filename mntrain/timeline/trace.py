"""The timeline of some steps: recorded by all ranks, and written by rank 0 as one file.

    begin     compare clocks | each rank logs its events
    end       compare clocks | gather the events of each rank as JSON, by the clock of rank 0 |
              rank 0 writes the file

The file is in the Trace Event Format, which `mntrain.timeline.tracks` makes.
"""

import json
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from mntrain._version import __version__
from mntrain.errors import AgreedError, raised_by_all
from mntrain.metrics.files import json_text, write_whole
from mntrain.ranks import Ranks
from mntrain.timeline.clocks import ClockReading, read_clocks, to_master
from mntrain.timeline.event_log import EventLog
from mntrain.timeline.tracks import trace_events

FILE = "timeline.json.gz"
MOST_EVENTS = 50_000, 1_000_000  # of a rank, and of all ranks: at most 1 kB each in the file


class Timeline:
    """A context manager that records what all ranks do in its block. See `World.timeline`."""

    def __init__(self, world: Ranks, path: str | Path) -> None:
        self._world, self._path = world, Path(path)
        self._log: EventLog | None = None
        self._begun: ClockReading

    def __enter__(self) -> Self:
        world = self._world
        with world.agreement():
            if world.recorder.timeline is not None:
                raise ValueError("a timeline is being recorded: end its `with` block before")
            if world.master:
                _try_file(self._path)
        self._date = datetime.now(UTC)
        self._begun = self._read_clocks()
        self._tell(EventLog(min(MOST_EVENTS[0], MOST_EVENTS[1] // world.size)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        log = self._log
        self._tell(None)
        if log is not None and raised_by_all(error):
            log.close()
            with suppress(AgreedError) if error else nullcontext():  # the first error counts
                self._write(log)

    @property
    def records(self) -> bool:
        """True between begin and end."""
        return self._log is not None

    def _tell(self, log: EventLog | None) -> None:
        """Let a log be told of all events from here on."""
        self._log = self._world.recorder.timeline = self._world._comm.traffic.timeline = log

    def _read_clocks(self) -> ClockReading:
        collectives, comm = self._world.collectives, self._world._comm
        return collectives.call_together(lambda: read_clocks(comm), "world.timeline").wait()

    def _write(self, log: EventLog) -> None:
        """Gather the events of all ranks, and write the file on rank 0. Collective."""
        world, last = self._world, self._read_clocks()
        origin = world.gather(self._begun.master)[0]
        to_rank_0 = to_master(self._begun, last)

        def microseconds(own: float) -> int:
            return round((to_rank_0(own) - origin) * 1e6)

        place = world.places[world.rank]
        lines = map(json.dumps, trace_events(log, place, microseconds))
        packed = zlib.compress(",\n".join(lines).encode())
        facts: dict[str, Any] = {
            "rank": world.rank,
            "lacks_events": log.lacks,
            "clock_error_us": 1e6 * max(self._begun.error, last.error),
        }
        by_rank = world.gather((packed, facts))
        about = {
            "mntrain": __version__,
            "start": self._date.isoformat(),
            "ranks": [other for _, other in by_rank],
        }
        with world.agreement():
            if world.master:
                parts = _content(about, [piece for piece, _ in by_rank])
                write_whole(self._path, _gzipped(parts) if self._path.suffix == ".gz" else parts)
        lacking = sum(other["lacks_events"] for _, other in by_rank)
        if lacking:
            world.output.warn(f"{self._path} lacks the last {lacking:,} events: record fewer steps")


class StepTimeline:
    """The timeline of the steps of a job that --log.timeline gives: FILE in the run's folder.

    A context manager around the steps, which at its end writes what there is. Collective are the
    begin of the first of these steps, and the end of the last one, or of the block before it. What
    goes wrong with the file is a warning. Raises ValueError for steps that the run does not have.
    """

    def __init__(self, world: Ranks, run_dir: Path, steps: str | None, run_steps: int) -> None:
        self._first, self._last = map(int, steps.split(":")) if steps else (0, 0)
        if self._last > run_steps:
            raise ValueError(
                f"--log.timeline {steps}: the run has {run_steps} steps; give the first and the "
                "last step to record, such as 2:4"
            )
        self._world, self._path = world, run_dir / FILE
        self._timeline = Timeline(world, self._path)
        self._step, self._start = 0, 0.0  # the step that has begun, and when

    def before_step(self, step: int) -> None:
        """Begin or end the recording, if that is due before a step. Collective then."""
        if step > self._last:
            self.__exit__(None, None, None)
        elif self._timeline.records:
            self._world.recorder.span(f"step {self._step}", self._start)
        elif self._first <= step:
            self._first = self._last + 1  # one attempt: it is collective, and a warning
            with self._warning():
                self._timeline.__enter__()
        self._step, self._start = step, time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._timeline.records:
            return
        self._world.recorder.span(f"step {self._step}", self._start)
        with self._warning():
            self._timeline.__exit__(kind, error, trace)
            if raised_by_all(error):
                self._world.output.note(f"timeline of the steps to {self._step}: {self._path}")

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except AgreedError as error:
            self._world.output.warn(str(error))


def _try_file(path: Path) -> None:
    """Raise ValueError if no file can be made at a path. Makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            if path.is_dir():
                raise IsADirectoryError("it is a folder")
    except OSError as error:
        raise ValueError(
            f"no timeline can be written to {path} ({error}): give a file in a folder in which "
            "files can be made"
        ) from error


def _content(about: Mapping[str, Any], pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of the file, of the events of each rank."""
    head = json_text({"displayTimeUnit": "ms", "otherData": about}).removesuffix("}")
    yield f'{head}, "traceEvents": [\n'.encode()
    for number, piece in enumerate(pieces):
        yield b",\n" * (number > 0) + zlib.decompress(piece)
    yield b"\n]}\n"


def _gzipped(parts: Iterable[bytes]) -> Iterator[bytes]:
    compressor = zlib.compressobj(wbits=31)
    for part in parts:
        yield compressor.compress(part)
    yield compressor.flush()
