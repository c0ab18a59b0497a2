"""The file in which a rank leaves its last events, and how it is read after the rank's end.

    header      HEADER_BYTES: magic, length, and a JSON object with the facts of `Header`
    ring        CAPACITY records of RECORD_BYTES; the event with number n is record n % CAPACITY
    signs       2 records, written in turn, of the last sign of life
    crash       text of Python's faulthandler, if native code has crashed

A record is RECORD: number, time, collective or step, awaited rank, kind, stream or phase, text and
call site. Its number is 0 if there is none. It lies within a page of the file, and is written by
one call. All numbers are little-endian.
"""

import json
import re
import struct
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path

from mntrain.recorder.late_ranks import Wait

MAGIC = b"mntrain recording 1\n"
HEADER_BYTES, CAPACITY, SIGNS = 4096, 1000, 2
SITE = 96  # bytes of a call site, whose beginning is cut
RECORD = struct.Struct(f"<QdqiH30s100s{SITE}s")
RECORD_BYTES = RECORD.size
RING_BYTES = (CAPACITY + SIGNS) * RECORD_BYTES  # with the signs of life
FILE_BYTES = HEADER_BYTES + RING_BYTES
_LENGTH = struct.Struct("<I")

ALL_RANKS, GROUP = -1, -2  # awaited: every rank of the world; the ranks of the stream's group


JOB = "job"  # name of a SHARED_ERROR by which a rank has ended all
MPI = "MPI"  # name of a CRASH in a call of MPI, which may come of another rank's end


class Kind(IntEnum):
    """Kinds of events."""

    COLLECTIVE_BEGINS = 1
    COLLECTIVE_ENDS = 2
    PHASE_BEGINS = 3
    PHASE_ENDS = 4
    SIGNAL = 5
    ERROR = 6  # of this rank alone
    SHARED_ERROR = 7  # that other ranks raise too
    END = 8  # the world was closed, or the interpreter ends
    SIGN_OF_LIFE = 9
    PEER_ENDED = 10  # the process of a rank, the number, was seen to end without a word
    CRASH = 11  # of native code, as the text at the file's end says; read, never recorded


@dataclass(frozen=True)
class Header:
    """Facts about a rank and its process. Times are those at which the file was made."""

    rank: int
    size: int
    job: str  # the same for all ranks of a job, and no other
    host: str
    pid: int
    process_start: str  # in clock ticks since boot, as /proc says
    boot: str  # identifier of the host's boot
    pid_namespace: str
    wall: float  # seconds since the epoch
    monotonic: float  # seconds; all ranks make their files at about the same time
    oom_file: str = ""  # in which the kernel counts out-of-memory kills of the rank's cgroup
    oom_kills: int = 0
    jobs: dict[str, str] = field(default_factory=dict)  # identifiers of schedulers, by variable

    def to_bytes(self) -> bytes:
        """Return the first bytes of a file."""
        text = json.dumps(vars(self)).encode()
        return (MAGIC + _LENGTH.pack(len(text)) + text).ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True)
class Event:
    """One record. `time` is in seconds since the file was made, negative before."""

    time: float
    kind: Kind
    number: int = 0  # of a collective in its stream, of a training step, or of a signal
    awaited: int = ALL_RANKS  # the rank for which a collective waits, or ALL_RANKS or GROUP
    name: str = ""  # of a stream or phase
    text: str = ""  # what is called, or type and message of an error
    site: str = ""  # file:line


@dataclass
class Recording:
    """The last events of one rank, the oldest first, and the state in which they end.

    `complete`: no event was overwritten. `sign`: the last sign of life, if any.
    """

    header: Header
    events: tuple[Event, ...]
    complete: bool = True
    sign: Event | None = None

    def __post_init__(self) -> None:
        self.begun: dict[str, int] = {}  # number of collectives by stream
        self.signals: list[str] = []
        self.error: Event | None = None
        self.phase: Event | None = None  # the innermost; after an error, that of the error
        self.unfinished: dict[tuple[str, int], Event] = {}  # collectives
        self.ended = bool(self.events) and self.events[-1].kind == Kind.END  # cleanly
        last = [*self.events[-1:], *([self.sign] if self.sign else [])]
        self.last_seen = max((event.time for event in last), default=0.0)
        phases: list[Event] = []
        for event in self.events:
            key = event.name, event.number
            if event.kind in (Kind.COLLECTIVE_BEGINS, Kind.COLLECTIVE_ENDS):
                self.begun[event.name] = max(event.number + 1, self.begun.get(event.name, 0))
                self.unfinished.pop(key, None)
                if event.kind == Kind.COLLECTIVE_BEGINS:
                    self.unfinished[key] = event
            elif event.kind == Kind.PHASE_BEGINS:
                phases.append(event)
            elif event.kind == Kind.PHASE_ENDS and event.name in [phase.name for phase in phases]:
                while phases.pop().name != event.name:
                    pass
            elif event.kind == Kind.SIGNAL:
                self.signals.append(event.text)
            elif event.kind in (Kind.ERROR, Kind.SHARED_ERROR, Kind.CRASH) and not self.error:
                self.error = event
            if not self.error or event is self.error:
                self.phase = phases[-1] if phases else None

    @property
    def waits(self) -> list[Wait]:
        """The collectives that have begun and are not done, the oldest first."""
        return list(map(self.wait_of, self.unfinished.values()))

    def wait_of(self, event: Event) -> Wait:
        """Return a collective that has begun, and the time since then."""
        seconds, root = self.last_seen - event.time, event.awaited if event.awaited >= 0 else None
        return Wait(event.name, event.number, event.text, event.site, seconds, root)


def recordings(run_dir: Path, local: Path | None = None) -> Path:
    """Return the folder of the recordings of a run: one of its own under `local`, if given."""
    if local is None:
        return run_dir / "recorder"
    return local / str(run_dir.resolve()).strip("/").replace("/", "-")


def read(path: Path) -> Recording:
    """Read a file, whose rank may still write it. Raises OSError, and ValueError for another file.

    What changes between two looks is left out, and what a file lacks that was cut.
    """
    data, again = path.read_bytes(), path.read_bytes()
    if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
        raise ValueError(f"{path} is no recording of this version of mntrain")
    data, again = (content.ljust(FILE_BYTES, b"\0") for content in (data, again))
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    start = len(MAGIC) + _LENGTH.size
    try:
        content = json.loads(data[start : start + length])
        header = Header(**{item.name: content[item.name] for item in fields(Header)})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from None
    ring, signs, kinds = {}, {}, set(Kind)
    for record in range(CAPACITY + SIGNS):
        start = HEADER_BYTES + record * RECORD_BYTES
        place = slice(start, start + RECORD_BYTES)
        number, seconds, count, awaited, kind, *texts = RECORD.unpack(data[place])
        if number and data[place] == again[place] and kind in kinds:
            name, text, site = (value.rstrip(b"\0").decode(errors="replace") for value in texts)
            event = Event(seconds - header.monotonic, Kind(kind), count, awaited, name, text, site)
            if record >= CAPACITY:
                signs[number] = event
            elif record == number % CAPACITY:
                ring[number] = event
    sign = signs[max(signs)] if signs else None
    events = [ring[number] for number in sorted(ring)]
    last = max((event.time for event in [*events, *signs.values()]), default=0.0)
    events += _crash(data[FILE_BYTES:].decode(errors="replace"), last)
    return Recording(header, tuple(events), complete=max(ring, default=0) < CAPACITY, sign=sign)


def _crash(text: str, time: float) -> list[Event]:
    """Return the crash of native code that faulthandler's text tells of, if any.

    Its site is the innermost line outside of installed libraries, if there is one.
    """
    if (kind := re.search(r"^Fatal Python error: (.*)", text, re.MULTILINE)) is None:
        return []
    frames = re.findall(r'^  File "(.*)", line (\d+) in ', text, re.MULTILINE)
    own = [frame for frame in frames if not re.search(r"/(site|dist)-packages/|/lib/py", frame[0])]
    site = ":".join((own or frames)[0]) if frames else ""
    name = MPI if frames and frames[0][0].endswith("/mntrain/comm/mpi.py") else ""
    return [Event(time, Kind.CRASH, name=name, text=kind[1].strip(), site=site)]
