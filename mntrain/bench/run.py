"""The command `bench`: probe the hardware, measure the collectives, publish the results."""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from mntrain.bench import candidates
from mntrain.bench.bench_options import VERBS, BenchOptions, size_label
from mntrain.bench.hardware_limits import link_speed, minimum_traffic
from mntrain.bench.results import BenchCase, show
from mntrain.comm import mpi
from mntrain.comm.ticket import AlgorithmChoice
from mntrain.errors import AgreedError
from mntrain.metrics.terminal import stdout
from mntrain.world import World, init
from zero.layout import MIB

_TURNS = 20  # at most; a quarter of them from 1 MiB on
_LIMIT = (
    "the bytes that a node must send or receive, over the speed of the measured link; short "
    "messages, which fit into buffers, may be faster"
)


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
    several = len(world.topology.nodes) > 1
    link = link_speed(comm, world.topology, seconds=1.0) if several else None
    cases: list[BenchCase] = []
    for group in measure(world, comm.as_mpi4py, options, link, start=start):
        cases += group
        if world.master:
            _log(f"measured {group[0].verb} {size_label(group[0].size_bytes)}")
    comm.free()
    if world.master:
        facts = _facts(world, options, link, words)
        facts["seconds"] = time.perf_counter() - start
        _publish(options, facts, cases)
    return 1 if any(case.wrong_ranks for case in cases) else 0


def file_problem(path: Path | None) -> str:
    """Return why the output file could not be written, with the fix; "" if it can."""
    if path is not None and (os.path.isdir(path) or not os.path.isdir(path.parent)):
        return f"--json {path}: must be a file in a directory that exists"
    return ""


def measure(
    world: World, comm: Any, options: BenchOptions, link: float | None, *, start: float
) -> Iterator[list[BenchCase]]:
    """Yield the cases of each collective at each size, from the smallest size to the largest.

    Collective; all ranks yield the same. `comm` is an mpi4py communicator over the same ranks.
    `options.seconds` count from `start`, on rank 0's `time.perf_counter`: each size has an equal
    part of what is left. The `link` carries so many bytes/s; None on one node.
    """
    by_algorithm = {
        name: world.collectives.replace(choice=AlgorithmChoice(name, link=world.link))
        for name in options.algorithms
    }
    for number, nbytes in enumerate(options.sizes):
        left_s = comm.bcast(options.seconds - (time.perf_counter() - start))
        budget_s = left_s / (len(options.sizes) - number) / len(VERBS)
        tensor = world.collectives.allocate(nbytes // 4, torch.float32, world.device)
        pattern = candidates.Pattern(world.rank, world.size, tensor)
        for verb in VERBS:
            rivals = [
                candidates.library_candidate(name, verb, collectives, tensor, pattern)
                for name, collectives in by_algorithm.items()
            ]
            limit_s = None
            if link is not None:
                ranks = tuple(map(len, world.topology.nodes))
                limit_s = minimum_traffic(verb, ranks) * nbytes / link
            turns = _TURNS if nbytes < MIB else _TURNS // 4
            yield [
                _case(verb, rival.name, nbytes, limit_s, samples)
                for rival, samples in zip(
                    rivals, candidates.take_turns(comm, rivals, turns, budget_s), strict=True
                )
            ]
        del rivals, pattern, tensor  # before those of the next size, which are larger


def _case(
    verb: str,
    algorithm: str,
    nbytes: int,
    limit_s: float | None,
    samples: Sequence[Sequence[candidates.Sample]],
) -> BenchCase:
    """Return the case of samples by turn and rank."""
    times_s = tuple(max(sample.seconds for sample in turn) for turn in samples)
    wrong = {rank for turn in samples for rank, it in enumerate(turn) if not it.correct}
    return BenchCase(verb, algorithm, nbytes, limit_s, times_s, tuple(sorted(wrong)))


def _facts(
    world: World, options: BenchOptions, link: float | None, words: Sequence[str]
) -> dict[str, Any]:
    """Return the machine, its link, the versions, the date and the command. Local."""
    return {
        "command": shlex.join(["python", "-m", "mntrain", "bench", *words]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "topology": str(world.topology),
        "nodes": world.topology.nodes,
        "virtual_ranks_per_node": options.comm.ranks_per_node,
        "ranks": [asdict(place) for place in world.places],
        "library": world.library.name,
        "versions": world.facts[0].versions,
        "link_bytes_per_s": link,
        "limit": None if link is None else _LIMIT,
    }


def _publish(options: BenchOptions, facts: dict[str, Any], cases: Sequence[BenchCase]) -> None:
    """Print the results, and write the requested file."""
    show(facts, cases, stdout())
    if options.json is not None:
        kinds: dict[str, list[dict[str, Any]]] = {"results": [], "wrong": []}
        for case in cases:
            kinds["wrong" if case.wrong_ranks else "results"].append(case.to_json())
        document = {**facts, **kinds}
        text = json.dumps(document, indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
        _log(f"wrote {options.json}")


def _log(line: str) -> None:
    print(f"mntrain: {line}", file=sys.stderr, flush=True)
