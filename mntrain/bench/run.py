"""The run: a world, what its machine allows, the measurement, and what comes of it."""

import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mntrain._version import __version__
from mntrain.bench.bench_options import BenchOptions
from mntrain.bench.limits import HardwareLimits
from mntrain.bench.measure import Measurement
from mntrain.bench.plot import missing, plot
from mntrain.bench.printing import show
from mntrain.bench.results import BenchResults
from mntrain.comm import link_speed, mpi
from mntrain.errors import AgreedError, expect_same
from mntrain.metrics.terminal import stdout
from mntrain.world import World, init

COPY_S = 0.1  # for the probe of memory, at each size
LINK_SHARE = 1 / 30  # of the time that is given, for the probe of the link,
LINK_S = (0.2, 2.0)  # within these bounds


def run(options: BenchOptions, words: Sequence[str]) -> int:
    """Measure as the options say, on all ranks of the job. Collective; gives the exit code.

    `words` are the command line that the options come from, for the record. What all ranks agree is
    wrong is printed once, by the master, and gives 2; a wrong result of a collective gives 1.
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
    # A communicator of its own: what is called here directly meets nothing of the world's. It is
    # freed at the end only: an exception before that ends the job, or all ranks have it alike.
    comm, _ = mpi.start()
    measurement = Measurement(
        world,
        comm.as_mpi4py,  # MPI's own collectives are for this command only
        options=options,
        limits=_limits(world, comm, options),
        end=start + options.seconds,
        say=_say if world.master else lambda _: None,
    )
    measurement.run()
    comm.free()
    if world.master:
        facts = _facts(world, options, words) | {"seconds": time.perf_counter() - start}
        _publish(measurement.results(facts), options)
    return 1 if measurement.wrong else 0


def files_problem(options: BenchOptions) -> str:
    """What would fail after all the work, with the option's name and the fix; "" if nothing."""
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and path.is_dir():
            return f"{flag} {path}: is a folder; name a file in it"
        if path is not None and not path.parent.is_dir():
            return f"{flag} {path}: there is no folder {path.parent}; make it first"
    if options.plot is not None and (why := missing()):
        return f"--plot {options.plot}: {why}"
    return ""


def _limits(world: World, comm: mpi.Communicator, options: BenchOptions) -> HardwareLimits:
    """What the machine allows, by probing it. Collective."""
    ranks = tuple(map(len, world.topology.nodes))
    link = None
    if len(ranks) > 1:
        least, most = LINK_S
        seconds = min(most, max(least, LINK_SHARE * options.seconds))
        link = link_speed.link_speed(comm, world.topology, seconds)
    copy = {}
    for nbytes in options.sizes if len(ranks) == 1 else options.sizes[-1:]:
        world.gather(None)  # all at once
        copy[nbytes] = min(world.gather(link_speed.copy_speed(nbytes, COPY_S)))
    return HardwareLimits(ranks, link, copy)


def _facts(world: World, options: BenchOptions, words: Sequence[str]) -> dict[str, Any]:
    """What ran where, when and with what. Local."""
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
    """Show the results, and write the files that were asked for."""
    show(results, stdout())
    if options.json is not None:
        options.json.write_text(json.dumps(results.to_json(), indent=1) + "\n", encoding="utf-8")
        _written(options.json)
    if options.plot is not None:
        plot(results, options.plot)
        _written(options.plot)


def _written(path: Path) -> None:
    print(f"mntrain: wrote {path}", file=sys.stderr)


def _say(line: str) -> None:
    print(f"mntrain: {line}", file=sys.stderr, flush=True)
