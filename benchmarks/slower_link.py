"""Throughput of two nodes of which one has a slower link, by how they divide and exchange the work.

    python benchmarks/slower_link.py [--link 0.1gbit] [--rounds 3]

Two emulated nodes of one rank each train the built-in task. The first one's link has 1 Gbit/s, the
second one's less; in half of the jobs three processes also compute on the core of its rank. Ways to
divide the work take turns. The ideal is the sum of what both ranks compute in a second of their own
time, in the job with equal parts of the same round. Writes docs/results/slower-link.md and its
figures. Needs root and two cores. Takes about 35 minutes.
"""

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import option_types
import torch
import unequal
from emulated import (
    HEAP,
    HERE,
    LIMIT_S,
    facts,
    folders,
    heading,
    need_nodes,
    output_of,
    table,
    write,
)
from nodes import Cluster

COMPETITORS = (0, 3)
EQUAL = "equal parts"
BATCH = 32
SHARED = (
    "python -m mntrain --task unequal_task:UnequalTask --train.micro-batch-size 4 "
    "--train.eval-every 0"
)
BATCHES = f"--train.steps 60 --train.batch-size {BATCH}"
CADENCE = "--train.steps 24 --balance.mode cadence --balance.max-anchor 0"
WAYS = {
    EQUAL: BATCHES,
    "`--balance.mode throughput`": f"{BATCHES} --balance.mode throughput",
    "`--balance.mode cadence`": CADENCE,
    "the same, `--balance.overhead-target 0.05`": f"{CADENCE} --balance.overhead-target 0.05",
    "throughput, and parameters every 50 steps": (
        f"--train.steps 200 --train.batch-size {BATCH} --balance.mode throughput "
        "--sync.mode local-sgd --sync.every 50"
    ),
}
WARM = 0.5  # of the steps of a job, in which plans may still change


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--link", type=option_types.rate, default="0.1gbit")
    parser.add_argument("--rounds", type=option_types.count, default=3)
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    need_nodes()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, one for each rank")
    page: dict[str, Any] = {**facts(), "torch": torch.__version__, "jobs": []}
    page["link"] = options.link
    with Cluster((1, 1), ("1gbit", options.link)) as cluster:
        for number in range(options.rounds):
            for competitors in COMPETITORS:
                for way in list(WAYS)[:: 1 if number % 2 else -1]:
                    job = train(cluster, way, competitors)
                    page["jobs"].append({"round": number, **job})
                    print(f"round {number}: {competitors}, {way}", file=sys.stderr, flush=True)
    publish(page, "slower-link", options.output)
    return 0


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page `name`."""
    write(folders(output)[0], name, page, report(page))


def train(cluster: Cluster, way: str, competitors: int) -> dict[str, Any]:
    """Train once, and return the command and what ranks have done."""
    command = f"{SHARED} {WAYS[way]}"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        env = {**HEAP, **unequal.settings(competitors, 1, 10**9)}
        line, env = cluster.mpirun([*shlex.split(command), "--run.dir", str(run)], env=env)
        output_of(line, env, LIMIT_S)
        records, summary = unequal.read(run)
    steady = records[int(WARM * len(records)) :]
    counts = (summary.get("cadence") or [{"batch_counts": None}])[-1]["batch_counts"]
    parts = (summary.get("shares") or [{"samples": [BATCH // 2] * 2}])[-1]["samples"]
    return {
        "command": command,
        "way": way,
        "competitors": competitors,
        "samples_per_s": sum(r["samples"] for r in steady) / sum(r["step_s"] for r in steady),
        "own_samples_per_s": [rank["samples"] / rank["own_s"] for rank in summary["ranks"]],
        "samples": [4 * count for count in counts] if counts else parts,
    }


def report(page: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    about = (
        "Two emulated nodes of one rank, which is bound to a core; the first one's link has 1 "
        f"Gbit/s, the second one's {page['link'].replace('gbit', ' Gbit/s')}. The built-in task "
        f"with its default model of 0.9 M parameters, {BATCH} windows of 128 "
        "bytes a step where steps have a batch size. The "
        f"median over rounds (least to most) of samples per second in the last {1 - WARM:.0%} of "
        "the steps, over the ideal: the sum of what both ranks compute in a second of their own "
        "time, in the job with equal parts of the same round."
    )
    rows = []
    for competitors in COMPETITORS:
        for way in WAYS:
            jobs = jobs_of(page, competitors, way)
            bases = [sum(job["own_samples_per_s"]) for job in jobs_of(page, competitors, EQUAL)]
            ratio = unequal.ratio([job["samples_per_s"] for job in jobs], bases)
            samples = " + ".join(
                f"{median(s):.0f}" for s in zip(*(j["samples"] for j in jobs), strict=True)
            )
            rows.append([str(competitors), way, ratio, samples])
    head = ["processes that compete with rank 1", "way", "of the ideal"]
    head.append("samples of ranks in a step")
    first = heading(page, "A node with a slower link", {"torch": page["torch"]}, about)
    return "\n".join([*first, *table(head, rows, texts=2)]) + "\n"


def jobs_of(page: dict[str, Any], competitors: int, way: str) -> list[dict[str, Any]]:
    """Return the jobs of one way, in the order of their rounds."""
    found = (j for j in page["jobs"] if (j["competitors"], j["way"]) == (competitors, way))
    return sorted(found, key=lambda job: job["round"])


if __name__ == "__main__":
    sys.exit(main())
