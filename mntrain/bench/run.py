"""The command `bench`: probe the hardware, measure the collectives, publish the results."""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from mntrain.bench import candidates
from mntrain.bench.bench_options import BenchOptions, size_label
from mntrain.bench.hardware_limits import HardwareLimits, copy_speed, link_speed
from mntrain.bench.results import BenchCase, advice, show
from mntrain.comm import mpi
from mntrain.comm.ticket import AlgorithmChoice
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
    cases: list[BenchCase] = []
    for group in measure(world, comm.as_mpi4py, options, limits, start=start):
        cases += group
        if world.master and group[0].times_s:
            _log(f"measured {group[0].verb} {size_label(group[0].size_bytes)}")
    comm.free()
    if world.master:
        facts = _facts(world, options, limits, words)
        facts["seconds"] = time.perf_counter() - start
        _publish(options, facts | {"advice": advice(facts, cases)}, cases)
    return 1 if any(case.wrong_ranks for case in cases) else 0


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
    world: World, comm: Any, options: BenchOptions, limits: HardwareLimits, *, start: float
) -> Iterator[list[BenchCase]]:
    """Yield the cases of each collective at each size, from the smallest size to the largest.

    Collective; all ranks yield the same. `comm` is an mpi4py communicator over the same ranks.
    `options.seconds` count from `start`, on rank 0's `time.perf_counter`: each size has an equal
    part of what is left. A size, other than the smallest, of which one turn does not fit is left
    out: its cases have no times.
    """
    dtype = DTYPES[options.dtype]
    pattern = candidates.Pattern(world.rank, world.size, dtype, world.device)
    by_algorithm = {
        name: world.collectives.replace(choice=AlgorithmChoice(name, link=world.link))
        for name in options.algorithms
    }
    for number, nbytes in enumerate(options.sizes):
        limits_s = {verb: limits.seconds(verb, nbytes) for verb in options.verbs}
        turn_s = sum(limits_s.values()) * len(by_algorithm)
        left_s = comm.bcast(options.seconds - (time.perf_counter() - start))
        fits = number == 0 or turn_s <= left_s
        tensor = world.collectives.allocate(
            nbytes // dtype.itemsize if fits else 0, dtype, world.device
        )
        budget_s = left_s / (len(options.sizes) - number) / len(options.verbs)
        for verb, limit_s in limits_s.items():
            cases = [BenchCase(verb, it, nbytes, options.dtype, limit_s) for it in by_algorithm]
            if fits:
                rivals = [
                    candidates.library_candidate(name, verb, collectives, tensor, pattern)
                    for name, collectives in by_algorithm.items()
                ]
                turns = options.repeats * (4 if nbytes < MIB else 1)
                samples = candidates.take_turns(comm, rivals, turns, budget_s)
                cases = [_timed(*each) for each in zip(cases, samples, strict=True)]
            yield cases


def _timed(case: BenchCase, samples: Sequence[Sequence[candidates.Sample]]) -> BenchCase:
    """Return a case with its times and wrong ranks, of samples by turn and rank."""
    return replace(
        case,
        times_s=tuple(max(sample.seconds for sample in turn) for turn in samples),
        wrong_ranks=tuple(
            sorted({rank for turn in samples for rank, it in enumerate(turn) if not it.correct})
        ),
    )


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
        "versions": world.facts[0].versions,
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
