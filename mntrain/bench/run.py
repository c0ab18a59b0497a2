"""The command `bench`: probe the hardware, measure the collectives, publish the results."""

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from importlib import metadata
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import torch

from mntrain._version import __version__
from mntrain.bench import candidates
from mntrain.bench.bench_options import BenchOptions, size_label
from mntrain.bench.hardware_limits import HardwareLimits, copy_speed, link_speed
from mntrain.bench.results import BenchCase, advice, show
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
# The hardware limit is a lower bound. Collectives also wait for each other and are verified.
_MARGIN = 1.25


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
    problem = world.gather(file_problem(options.json) if world.master else "")[0]
    if problem:
        raise AgreedError(problem, world.rank)
    # A communicator of its own, so that MPI calls made here cannot match the world's. An exception
    # before `free` ends the job.
    comm, _ = mpi.start()
    limits = _limits(world, comm, options)
    rounds_s = {  # the least time of one round of all collectives, by size
        nbytes: (len(options.algorithms) + 1)
        * sum(limits.seconds(verb, nbytes) for verb in options.verbs)
        for nbytes in options.sizes
    }
    prepared_s = time.perf_counter() - start
    cases: list[BenchCase] = []
    for group in measure(world, comm.as_mpi4py, options, limits, rounds_s, start=start):
        cases += group
        if world.master and group[0].times_s:
            _log(f"measured {group[0].verb} {size_label(group[0].size_bytes)}")
    comm.free()
    if world.master:
        facts = _facts(world, options, limits, words)
        spent_s = time.perf_counter() - start
        enough = enough_s(sum(rounds_s.values()), prepared_s, spent_s, options.seconds)
        facts |= {"seconds": spent_s, "enough_s": enough}
        _publish(options, facts | {"advice": advice(facts, cases)}, cases)
    return 1 if any(case.wrong_ranks for case in cases) else 0


def time_budget_s(rounds_s: Sequence[float], left_s: float) -> float | None:
    """Return the seconds to spend on a size if `left_s` are left for it and all larger ones.

    `rounds_s` are their least times of a round. An equal part of the time that remains when one
    round of each size that fits has been set aside; None if not even the first one fits.
    """
    fitting = list(takewhile(lambda end_s: end_s <= left_s, accumulate(rounds_s)))
    return rounds_s[0] + (left_s - fitting[-1]) / len(fitting) if fitting else None


def enough_s(rounds_s: float, prepared_s: float, spent_s: float, given_s: float) -> int:
    """Return a time limit within which every size fits, in a run like one that has ended.

    A round of all sizes takes at least `rounds_s`. The run was to take `given_s`, and took
    `spent_s`, of which `prepared_s` for preparations.
    """
    limits = [10 * math.ceil(_MARGIN * (s + rounds_s) / 10) for s in (prepared_s, spent_s)]
    # Otherwise collectives are so slow that what they have taken tells more than the hardware.
    return limits[0] if limits[0] > given_s else limits[1]


def file_problem(path: Path | None) -> str:
    """Return why the output file could not be written, with the fix; "" if it can."""
    if path is not None and (os.path.isdir(path) or not os.path.isdir(path.parent)):
        return f"--json {path}: must be a file in a directory that exists"
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
    world: World,
    comm: Any,
    options: BenchOptions,
    limits: HardwareLimits,
    rounds_s: dict[int, float],
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
    for number, nbytes in enumerate(options.sizes):
        first = number == 0
        left_s = comm.bcast(options.seconds - (time.perf_counter() - start))
        budget_s = time_budget_s(list(rounds_s.values())[number:], left_s)
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
            for index, by_round in enumerate(samples):
                wrong = {rank for turn in by_round for rank, (_, ok) in enumerate(turn) if not ok}
                times = tuple(max(seconds for seconds, _ in turn) for turn in by_round)
                cases[index] = replace(
                    cases[index], times_s=times, wrong_ranks=tuple(sorted(wrong))
                )
            yield cases


def _unmeasured(
    options: BenchOptions, limits: HardwareLimits, verb: str, nbytes: int
) -> list[BenchCase]:
    """Return the cases of one collective at one size, without times."""
    limit_s = limits.seconds(verb, nbytes)
    return [
        *(BenchCase(verb, name, nbytes, options.dtype, limit_s) for name in options.algorithms),
        BenchCase(verb, candidates.NATIVE[verb], nbytes, "fp32", limit_s),
    ]


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
    """Print the results, and write the requested file."""
    show(facts, cases, stdout())
    if options.json is not None:
        kinds: dict[str, list[dict[str, Any]]] = {"results": [], "skipped": [], "wrong": []}
        for case in cases:
            kind = "wrong" if case.wrong_ranks else "results" if case.timed else "skipped"
            kinds[kind].append(case.to_json())
        document = {**facts, **kinds}
        text = json.dumps(document, indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
        _log(f"wrote {options.json}")


def _log(line: str) -> None:
    print(f"mntrain: {line}", file=sys.stderr, flush=True)
