"""The command `bench`: probe the hardware, measure the collectives, publish the results."""

import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from mntrain._version import __version__
from mntrain.bench import candidates
from mntrain.bench.bench_options import BenchOptions, size_label
from mntrain.bench.hardware_limits import HardwareLimits, copy_speed, link_speed
from mntrain.bench.results import BenchCase, plot, show
from mntrain.comm import mpi
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.errors import AgreedError, expect_same
from mntrain.metrics.report import stdout
from mntrain.world import World, init
from zero.layout import MIB

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def run(options: BenchOptions, words: Sequence[str]) -> int:
    """Run the benchmark on all ranks of the job, and return the exit code. Collective.

    `words` is the command line that the options come from, for the record. Returns 2 for an error
    that all ranks agree on, which rank 0 prints, and 1 if a collective gave a wrong result.
    """
    try:
        with init(
            device=options.device, ranks_per_node=options.comm.ranks_per_node, tune=False
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
    cases: list[BenchCase] = []
    for group in measure(world, comm.as_mpi4py, options, limits, start):
        cases += group
        if world.master:
            _log(f"measured {group[0].verb} {size_label(group[0].size_bytes)}")
    comm.free()
    if world.master:
        seconds = time.perf_counter() - start
        _publish(options, _facts(world, options, limits, words) | {"seconds": seconds}, cases)
    return 1 if any(case.wrong_ranks for case in cases) else 0


def files_problem(options: BenchOptions) -> str:
    """Return why an output file could not be written, with the fix; "" if all can."""
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            return f"{flag} {path}: must be a file in a directory that exists"
    if options.plot is not None and not find_spec("matplotlib"):
        return f"--plot {options.plot}: needs matplotlib: pip install 'mntrain[plot]'"
    return ""


def _limits(world: World, comm: mpi.Communicator, options: BenchOptions) -> HardwareLimits:
    """Probe the link between nodes and the memory bandwidth. Collective."""
    ranks = tuple(map(len, world.topology.nodes))
    link = link_speed(comm, world.topology, seconds=1.0) if len(ranks) > 1 else None
    copy = {}
    for nbytes in options.sizes:
        world.gather(None)  # a barrier: all ranks copy at once
        copy[nbytes] = min(world.gather(copy_speed(nbytes, seconds=0.1)))
    return HardwareLimits(ranks, link, copy)


def measure(
    world: World, comm: Any, options: BenchOptions, limits: HardwareLimits, start: float
) -> Iterator[list[BenchCase]]:
    """Yield the cases of each collective at each size, from the smallest size to the largest.

    Collective; all ranks yield the same. `comm` is an mpi4py communicator over the same ranks.
    `options.seconds` count from `start`, on rank 0's `time.perf_counter`: each collective and size
    gets an equal part of them, and all but the smallest are skipped if they would start later.
    """
    dtype = DTYPES[options.dtype]
    pattern = candidates.Pattern(world.rank, world.size, dtype, world.device)
    native_pattern = candidates.Pattern(world.rank, world.size, torch.float32, torch.device("cpu"))
    budget_s = options.seconds / (len(options.sizes) * len(options.verbs))
    by_algorithm = {
        name: world.collectives.replace(choice=AlgorithmChoice(name)) for name in options.algorithms
    }
    for nbytes in options.sizes:
        tensor = world.collectives.allocate(nbytes // dtype.itemsize, dtype, world.device)
        first = nbytes == options.sizes[0]
        rounds = options.repeats * (4 if nbytes < MIB else 1)
        for verb in options.verbs:
            limit_s = limits.seconds(verb, nbytes)
            cases = [
                *(BenchCase(verb, name, nbytes, options.dtype, limit_s) for name in by_algorithm),
                BenchCase(verb, candidates.NATIVE[verb], nbytes, "fp32", limit_s),
            ]
            if first or comm.bcast(time.perf_counter() - start < options.seconds):
                rivals = [
                    candidates.library_candidate(name, verb, collectives, tensor, pattern)
                    for name, collectives in by_algorithm.items()
                ]
                rivals.append(candidates.mpi_candidate(verb, comm, nbytes, native_pattern))
                # The first size also opens connections: warm up twice.
                samples = candidates.take_turns(comm, rivals, rounds, budget_s, warm_up=1 + first)
                cases = [_with(case, found) for case, found in zip(cases, samples, strict=True)]
            yield cases


def _with(case: BenchCase, samples: Sequence[Sequence[candidates.Sample]]) -> BenchCase:
    """Return the case with the samples of all rounds and ranks."""
    wrong = {rank for turn in samples for rank, (_, correct) in enumerate(turn) if not correct}
    times = tuple(max(seconds for seconds, _ in turn) for turn in samples)
    return replace(case, times_s=times, wrong_ranks=tuple(sorted(wrong)))


def _facts(
    world: World, options: BenchOptions, limits: HardwareLimits, words: Sequence[str]
) -> dict[str, Any]:
    """Return the machine, its limits, the versions, the date and the command. Local."""
    return {
        "command": shlex.join(["python", "-m", "mntrain", "bench", *words]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "topology": str(world.topology),
        "nodes": world.topology.nodes,
        "virtual_ranks_per_node": options.comm.ranks_per_node,
        "ranks": [asdict(place) for place in world.places],
        "library": world.library.name,
        "versions": {
            "mntrain": __version__,
            "torch": torch.__version__,
            "mpi4py": metadata.version("mpi4py"),
            "python": platform.python_version(),
        },
        "dtype": options.dtype,
        "link_bytes_per_s": limits.link,
        "copy": [{"size_bytes": size, "bytes_per_s": speed} for size, speed in limits.copy.items()],
        "limit": limits.description,
    }


def _publish(options: BenchOptions, facts: dict[str, Any], cases: Sequence[BenchCase]) -> None:
    """Print the results, and write the requested files."""
    show(facts, cases, stdout())
    if options.json is not None:
        skipped = [case.to_json() for case in cases if not (case.timed or case.wrong_ranks)]
        wrong = [case.to_json() for case in cases if case.wrong_ranks]
        timed = [case.to_json() for case in cases if case.timed]
        document = {**facts, "results": timed, "skipped": skipped, "wrong": wrong}
        text = json.dumps(document, indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
        _log(f"wrote {options.json}")
    if options.plot is not None:
        plot(facts, cases, options.plot)
        _log(f"wrote {options.plot}")


def _log(line: str) -> None:
    print(f"mntrain: {line}", file=sys.stderr, flush=True)
