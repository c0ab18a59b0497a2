"""The command `bench`: probe the hardware, measure the collectives, publish the results."""

import json
import os
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
from mntrain.bench.advice import advice
from mntrain.bench.bench_options import BenchOptions, size_label
from mntrain.bench.hardware_limits import HardwareLimits, copy_speed, link_speed
from mntrain.bench.results import BenchCase, plot, show
from mntrain.bench.time_plan import TimePlan
from mntrain.comm import mpi
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.errors import AgreedError
from mntrain.metrics.terminal import stdout
from mntrain.world import World, init
from zero.layout import MIB

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

_LONG_S = 0.25  # a collective that takes longer at the hardware's limit is measured without warm-up


def run(options: BenchOptions, words: Sequence[str]) -> int:
    """Run the benchmark on all ranks of the job, and return the exit code. Collective.

    `words` is the command line that the options come from, for the record. Returns 2 for an error
    that all ranks agree on, which rank 0 prints, and 1 if a collective gave a wrong result.
    """
    try:
        with init(device=options.device, ranks_per_node=options.comm.ranks_per_node) as world:
            return _bench(world, options, words)
    except AgreedError as error:
        error.report()
        return 2


def _bench(world: World, options: BenchOptions, words: Sequence[str]) -> int:
    start = time.perf_counter()
    problem = world.gather(files_problem(options) if world.master else "")[0]
    if problem:
        raise AgreedError(problem, world.rank)
    # A communicator of its own, so that MPI calls made here cannot match the world's. An exception
    # before `free` ends the job.
    comm, _ = mpi.start()
    limits = _limits(world, comm, options)
    plan = make_plan(options, limits)
    prepared_s = time.perf_counter() - start
    cases: list[BenchCase] = []
    for group in measure(world, comm.as_mpi4py, options, limits, plan, start=start):
        cases += group
        if world.master and group[0].times_s:
            _log(f"measured {group[0].verb} {size_label(group[0].size_bytes)}")
    comm.free()
    if world.master:
        facts = _facts(world, options, limits, words)
        spent_s = time.perf_counter() - start
        enough_s = plan.enough_s(prepared_s, spent_s, options.seconds)
        facts |= {"seconds": spent_s, "enough_s": enough_s}
        _publish(options, facts | {"advice": advice(facts, cases)}, cases)
    return 1 if any(case.wrong_ranks for case in cases) else 0


def files_problem(options: BenchOptions) -> str:
    """Return why an output file could not be written, with the fix; "" if all can."""
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (os.path.isdir(path) or not os.path.isdir(path.parent)):
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


def make_plan(options: BenchOptions, limits: HardwareLimits) -> TimePlan:
    """Return the least time that one round of all collectives takes at each size. Local."""
    rivals = len(options.algorithms) + 1
    return TimePlan(
        {
            nbytes: rivals * sum(limits.seconds(verb, nbytes) for verb in options.verbs)
            for nbytes in options.sizes
        }
    )


def measure(
    world: World,
    comm: Any,
    options: BenchOptions,
    limits: HardwareLimits,
    plan: TimePlan,
    *,
    start: float,
) -> Iterator[list[BenchCase]]:
    """Yield the cases of each collective at each size, from the smallest size to the largest.

    Collective; all ranks yield the same. `comm` is an mpi4py communicator over the same ranks.
    `options.seconds` count from `start`, on rank 0's `time.perf_counter`. Sizes that do not fit
    into them, except for the smallest, are left out for all collectives: their cases have no times.
    """
    dtype = DTYPES[options.dtype]
    patterns = [
        candidates.Pattern(world.rank, world.size, *place)
        for place in ((dtype, world.device), (torch.float32, torch.device("cpu")))
    ]
    by_algorithm = {
        name: world.collectives.replace(choice=AlgorithmChoice(name)) for name in options.algorithms
    }
    for nbytes in options.sizes:
        first = nbytes == options.sizes[0]
        left_s = comm.bcast(options.seconds - (time.perf_counter() - start))
        budget_s = plan.budget_s(nbytes, left_s)
        groups = [_unmeasured(options, limits, verb, nbytes) for verb in options.verbs]
        if budget_s is None and not first:
            yield from groups
            continue
        tensor = world.collectives.allocate(nbytes // dtype.itemsize, dtype, world.device)
        for cases in groups:
            verb = cases[0].verb
            rivals = [
                candidates.library_candidate(name, verb, collectives, tensor, patterns[0])
                for name, collectives in by_algorithm.items()
            ]
            rivals.append(candidates.mpi_candidate(verb, comm, nbytes, patterns[1]))
            rounds = options.repeats * (4 if nbytes < MIB else 1)
            # The first size also opens connections. If a collective takes long, a warm-up costs
            # more time than the page faults that it takes out of the result.
            warm_up = 1 + first if cases[0].limit_s < _LONG_S else 0
            samples = candidates.take_turns(
                comm, rivals, rounds, (budget_s or 0.0) / len(groups), warm_up=warm_up
            )
            yield [_with(case, found) for case, found in zip(cases, samples, strict=True)]


def _unmeasured(
    options: BenchOptions, limits: HardwareLimits, verb: str, nbytes: int
) -> list[BenchCase]:
    """Return the cases of one collective at one size, without times."""
    limit_s = limits.seconds(verb, nbytes)
    return [
        *(BenchCase(verb, name, nbytes, options.dtype, limit_s) for name in options.algorithms),
        BenchCase(verb, candidates.NATIVE[verb], nbytes, "fp32", limit_s),
    ]


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
