"""The command `bench`: probe the hardware, measure the collectives, publish the results."""

import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from typing import Any

import torch

from mntrain._version import __version__
from mntrain.bench.bench_options import BenchOptions, size_label
from mntrain.bench.limits import HardwareLimits
from mntrain.bench.link_speed import copy_speed, link_speed
from mntrain.bench.measure import measure
from mntrain.bench.plot import missing, plot
from mntrain.bench.printing import show
from mntrain.bench.results import BenchCase, BenchResults
from mntrain.comm import mpi
from mntrain.errors import AgreedError, expect_same
from mntrain.metrics.registry import short_time
from mntrain.metrics.report import stdout
from mntrain.world import World, init

COPY_S = 0.1  # for the memory probe, at each size
LINK_S = 1.0  # for the link probe


def run(options: BenchOptions, words: Sequence[str]) -> int:
    """Run the benchmark on all ranks of the job, and return the exit code. Collective.

    `words` is the command line that the options come from, for the record. Returns 2 for an error
    that all ranks agree on, which rank 0 prints, and 1 if a collective gave a wrong result.
    """
    try:
        with init(
            device=options.device, ranks_per_node=options.ranks_per_node, tune=False
        ) as world:
            return _bench(world, options, words)
    except AgreedError as error:
        error.report()
        return 2


def _bench(world: World, options: BenchOptions, words: Sequence[str]) -> int:
    start = time.perf_counter()
    expect_same(world.gather(asdict(options)), world.rank)
    problem = world.gather(files_problem(options) if world.master else "")[0]
    if problem:
        raise AgreedError(problem, world.rank)
    # A communicator of its own, so that MPI calls made here cannot match the world's. An exception
    # before `free` ends the job.
    comm, _ = mpi.start()
    limits = _limits(world, comm, options)
    cases = []
    for group in measure(world, comm.as_mpi4py, options, limits, start):
        cases += group
        if world.master:
            _log(_progress(group))
    comm.free()
    facts = _facts(world, options, words) | {"seconds": time.perf_counter() - start}
    results = BenchResults(facts, limits, tuple(cases))
    if world.master:
        _publish(results, options)
    return 1 if any(case.wrong_ranks for case in cases) else 0


def files_problem(options: BenchOptions) -> str:
    """Return why an output file could not be written, with the fix; "" if all can."""
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and path.is_dir():
            return f"{flag} {path}: is a directory; give a file in it"
        if path is not None and not path.parent.is_dir():
            return f"{flag} {path}: directory {path.parent} does not exist; create it first"
    if options.plot is not None and (why := missing()):
        return f"--plot {options.plot}: {why}"
    return ""


def _limits(world: World, comm: mpi.Communicator, options: BenchOptions) -> HardwareLimits:
    """Probe the link between nodes and the memory bandwidth. Collective."""
    ranks = tuple(map(len, world.topology.nodes))
    link = link_speed(comm, world.topology, LINK_S) if len(ranks) > 1 else None
    copy = {}
    for nbytes in options.sizes if len(ranks) == 1 else options.sizes[-1:]:
        world.gather(None)  # a barrier: all ranks copy at once
        copy[nbytes] = min(world.gather(copy_speed(nbytes, COPY_S)))
    return HardwareLimits(ranks, link, copy)


def _facts(world: World, options: BenchOptions, words: Sequence[str]) -> dict[str, Any]:
    """Return the machine, the versions, the date and the command. Local."""
    return {
        "command": shlex.join(["python", "-m", "mntrain", "bench", *words]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "topology": str(world.topology),
        "nodes": world.topology.nodes,
        "virtual_ranks_per_node": options.ranks_per_node,
        "ranks": [asdict(place) for place in world.places],
        "library": world.library.name,
        "versions": {
            "mntrain": __version__,
            "torch": torch.__version__,
            "mpi4py": metadata.version("mpi4py"),
            "python": platform.python_version(),
        },
        "dtype": options.dtype,
    }


def _publish(results: BenchResults, options: BenchOptions) -> None:
    """Print the results, and write the requested files."""
    show(results, stdout())
    if options.json is not None:
        options.json.write_text(json.dumps(results.to_json(), indent=1) + "\n", encoding="utf-8")
        _log(f"wrote {options.json}")
    if options.plot is not None:
        plot(results, options.plot)
        _log(f"wrote {options.plot}")


def _progress(cases: Sequence[BenchCase]) -> str:
    """Return a line on one collective at one size."""
    times = [f"{case.algorithm} {short_time(case.median_s)}" for case in cases if case.timed]
    times += [f"{case.algorithm} wrong" for case in cases if case.wrong_ranks]
    label = f"{cases[0].verb} {size_label(cases[0].size_bytes)}"
    return f"{label}: {', '.join(times) or 'skipped for lack of time'}"


def _log(line: str) -> None:
    print(f"mntrain: {line}", file=sys.stderr, flush=True)
