"""Choice of the algorithm for `auto`: the candidates are timed on this world at one size.

Rank 0 owns the clock and the cache; every rank gets its result. The cache is a file of the user,
whose entries are valid for 30 days. If it cannot be read or written, it counts as empty.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from mntrain._version import __version__
from mntrain.comm.algorithms import AlgorithmChoice, candidates
from mntrain.comm.collectives import WorldCollectives
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator

T = TypeVar("T")

DEFAULT, BASELINE = "lanes", "flat"
MAX_BYTES = 4 << 20  # larger tensors take longer, in the same proportions
BUDGET_S = 0.8  # for all repetitions
REPETITIONS = 5  # of each algorithm, if the budget allows; one at least
# An algorithm must be this much faster than the default to replace it. On a busy machine, a brief
# measurement is wrong by a fifth: with 1.1, 2 of 12 jobs chose an algorithm that made steps slower.
MARGIN = 1.5
MAX_AGE_S = 30 * 24 * 3600

Tuning = tuple[str, str]  # an algorithm, and the reason in one line


def tune(
    make_collectives: Callable[[Communicator], WorldCollectives],
    comm: Communicator,
    engine: ProgressEngine,
    device: torch.device,
    *,
    bucket_bytes: int,
    facts: Sequence[object],
) -> Tuning:
    """Return the tuning for buckets of `bucket_bytes` on `device`, cached or measured. Collective.

    `make_collectives` makes collectives over a communicator, on the communication thread. `facts`
    are JSON values of this rank that the result depends on, such as its host and its MPI library.
    The result is the same on all ranks. A measurement takes about a second.
    """
    affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count()
    key = key_of(_gather(engine, comm, (*facts, cores, device.type)), bucket_bytes)
    cached = _gather(engine, comm, find(key) if comm.rank == 0 else None)[0]
    if cached is not None:
        return cached
    if comm.rank == 0:
        print("mntrain: timing the all-reduce algorithms, about a second", file=sys.stderr)
    nbytes = max(4, min(bucket_bytes, MAX_BYTES))
    times = measure(make_collectives, comm, engine, device, nbytes)
    tuning = choose(times), explain(times, nbytes)
    if comm.rank == 0:
        store(key, tuning)
    return tuning


def measure(
    make_collectives: Callable[[Communicator], WorldCollectives],
    comm: Communicator,
    engine: ProgressEngine,
    device: torch.device,
    nbytes: int,
) -> dict[str, float]:
    """Return the seconds of an all-reduce of `nbytes` by each candidate. Collective.

    Each is the median over rounds of the slowest rank's time, the same on all ranks. Candidates
    take turns, so that noise affects all; the first round warms up. The collectives and their
    communicator are made for this, so that no memory remains and no traffic is counted.
    """
    own = engine.call(lambda: comm.split(0, comm.rank, "tuning")).wait()
    collectives = engine.call(lambda: make_collectives(own)).wait()
    tensor = collectives.allocate(nbytes // 4, torch.float32, device)
    rounds: list[list[float]] = []
    start, late = time.perf_counter(), False
    while len(rounds) < 2 or not (late or len(rounds) > REPETITIONS):
        local = []
        for name in candidates():
            _gather(engine, comm, None)
            began = time.perf_counter()
            collectives.replace(choice=AlgorithmChoice(name)).all_reduce(tensor).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            local.append(time.perf_counter() - began)
        by_rank = _gather(engine, comm, (local, time.perf_counter() - start > BUDGET_S))
        rounds.append([max(times) for times in zip(*(row[0] for row in by_rank), strict=True)])
        late = by_rank[0][1]
    engine.call(own.free).wait()
    medians = [median(times) for times in zip(*rounds[1:], strict=True)]
    return dict(zip(candidates(), medians, strict=True))


def _gather(engine: ProgressEngine, comm: Communicator, value: T) -> list[T]:
    return engine.call(lambda: comm.gather_objects(value)).wait()


def choose(times: Mapping[str, float]) -> str:
    """Return the fastest algorithm, or the default unless that is slower by more than `MARGIN`."""
    fastest = min(times, key=lambda name: times[name])
    return fastest if times[fastest] * MARGIN < times[DEFAULT] else DEFAULT


def explain(times: Mapping[str, float], nbytes: int) -> str:
    """Return the choice and its advantage in one line: "lanes: 1.9x flat at 4 MiB"."""
    choice = choose(times)
    other = BASELINE if choice == DEFAULT else DEFAULT
    ratio = times[other] / times[choice]
    return f"{choice}: {ratio:.1f}x {other} at {nbytes / (1 << 20):.3g} MiB"


def key_of(*facts: object) -> str:
    """Return a short key that depends on the facts, given as JSON values, and on the versions."""
    everything = [*facts, candidates(), __version__, torch.__version__]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:32]


def cache_path() -> Path:
    """Return the cache file, in $XDG_CACHE_HOME or ~/.cache. Raises RuntimeError without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "mntrain" / "tuning.json"


def find(key: str) -> Tuning | None:
    """Return the cached tuning of a key, with the date of its measurement. Local."""
    algorithm, line, measured = _read_cache().get(key, ("", "", 0.0))
    if algorithm not in candidates():
        return None
    return algorithm, f"{line} (measured {time.strftime('%Y-%m-%d', time.gmtime(measured))})"


def store(key: str, tuning: Tuning) -> None:
    """Add a tuning to the cache and drop old ones. Local.

    The file is replaced atomically. If two jobs write at once, one tuning may be lost.
    """
    entries = {**_read_cache(), key: (*tuning, time.time())}
    with suppress(OSError, RuntimeError):
        path = cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(entries, indent=1), encoding="utf-8")
        temporary.replace(path)


def _read_cache() -> dict[str, tuple[str, str, float]]:
    """Return algorithm, line and time of each entry that is younger than 30 days, by its key."""
    now = time.time()
    try:
        entries = json.loads(cache_path().read_text(encoding="utf-8")).items()
        return {
            key: (algorithm, line, measured)
            for key, (algorithm, line, measured) in entries
            if 0 <= now - measured <= MAX_AGE_S
        }
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError, OverflowError):
        return {}
