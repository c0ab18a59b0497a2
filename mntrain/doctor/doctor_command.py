"""The command `doctor`: make a world, run all checks, measure the links, report."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from mntrain.alike import rank_facts
from mntrain.checks import local_folder, storage
from mntrain.checks.finding import Finding, passed, worst
from mntrain.comm import mpi
from mntrain.comm.links import LinkSpeed, best_of, measure
from mntrain.doctor import link_findings
from mntrain.doctor.doctor_options import DoctorOptions, mb_per_s
from mntrain.errors import AgreedError
from mntrain.metrics.terminal import stdout
from mntrain.watchdog.start_timer import network_watched
from mntrain.world import World

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
_LINKS_S = 2.0  # for all pairs of nodes
_AGAIN = 3  # measurements more, if one finds something: another program may have had the cores
_LINK_BYTES = 32 << 20  # of the largest message: 100 Gbit/s take 3 ms
# Beginnings of the variables that choose the network.
_VARIABLES = ("FI_", "UCX_", "OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl")


def run(options: DoctorOptions) -> int:
    """Check all ranks of the job, and return the exit code: 1 if a check failed. Collective.

    If MPI cannot start, or ranks differ in their versions, the report has only that. If a node does
    not answer, or after `options.timeout` without progress, the process is killed after one
    sentence on stderr.
    """
    folder = storage.existing_folder(options.run.dir or Path())
    try:
        with network_watched(options.timeout) as moved, World() as world:
            moved()
            return _examine(world, options, folder, moved)
    except AgreedError as error:
        if error.rank == 0:
            start = {"start": Finding("fail", str(error))}
            _print(options, start, [os.uname().nodename], [])
        return 1


def _examine(world: World, options: DoctorOptions, folder: Path, moved: Callable[[], None]) -> int:
    """Run all checks, and report them on rank 0; tell `moved` of progress. Collective."""
    # A communicator of its own, so that MPI calls made here cannot match the world's.
    comm, _ = mpi.start()
    hosts = rank_facts.hosts_apart(world.facts)
    leaders = [ranks[0] for ranks in rank_facts.by_host(world.facts)]
    comm.gather(None)  # ranks that start together meet within less time
    met = time.time()
    comm.gather(None)
    clocks = comm.gather((met, time.time()))
    exact = [replace(fact, clock=clock) for fact, clock in zip(world.facts, clocks, strict=True)]
    findings = {
        "MPI library": _library(world),
        **world.findings,
        "clocks": rank_facts.clocks(exact),
        **storage.examine(comm.gather, comm.rank, folder, hosts),
    }
    if (local := options.checkpoint.local) is not None:
        found = local_folder.examine(comm.gather, comm.rank, local, hosts)
        findings["local checkpoints"] = found
    measured = partial(measure, comm, leaders, _LINKS_S, most_bytes=_LINK_BYTES, at_matching=moved)
    expected = (options.expect, mb_per_s(options.expect)) if options.expect else None
    links = measured()
    for _ in range(_AGAIN):
        if link_findings.judge(links, hosts, expected).status == "pass":
            break
        links = best_of(links, measured())
    findings["links between nodes"] = link_findings.judge(links, hosts, expected)
    comm.free()
    if world.master:
        _print(options, findings, hosts, links)
    return 1 if worst(list(findings.values())) == "fail" else 0


def _library(world: World) -> Finding:
    """Return the MPI library, and the settings that choose its network."""
    device = [line for line in world.library.build.splitlines() if line.startswith("MPICH Device")]
    parts = [f"{world.library.name}, thread level {world.library.threads}"]
    parts += [" ".join(line.split()) for line in device]
    chosen = (
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES)
    )
    parts += sorted(chosen)
    return passed("; ".join(parts))


def _print(
    options: DoctorOptions,
    findings: Mapping[str, Finding],
    hosts: Sequence[str],
    links: Sequence[LinkSpeed],
) -> None:
    """Print the report on stdout: a table and the verdict, or one JSON object."""
    status, names = worst(list(findings.values())), list(dict.fromkeys(hosts))
    if options.json:
        slowest = link_findings.slowest_node(links)
        pairs = [
            asdict(pair)
            | {"mb_per_s": pair.mb_per_s, "hosts": [hosts[pair.one], hosts[pair.other]]}
            for pair in links
        ]
        document = {
            "status": status,
            "ranks": len(hosts),
            "hosts": names,
            "checks": [{"name": name, **asdict(found)} for name, found in findings.items()],
            "links": {"between_nodes": pairs},
            "slowest_node": None if slowest is None else hosts[slowest],
        }
        print(json.dumps(document, indent=1), flush=True)
        return
    ranks = f"{len(hosts)} rank{'s' * (len(hosts) > 1)}"
    title = f"{ranks} on {', '.join(names[:8])}" + ", ..." * (len(names) > 8)
    table = Table(title=title, title_justify="left", show_lines=False)
    table.add_column("check", no_wrap=True)
    table.add_column("")
    table.add_column("finding, and the fix")
    for name, found in findings.items():
        text = Text(found.text)
        if found.fix:
            text.append(f"\nfix: {found.fix}", style="bold")
        table.add_row(name, Text(found.status, style=_STYLES[found.status]), text)
    console = stdout()
    console.print(table)
    verdict = {"pass": "fit to train", "warn": "fit to train, with warnings"}
    console.print(Text(verdict.get(status, "not fit to train"), style=_STYLES[status]))
    sys.stdout.flush()
