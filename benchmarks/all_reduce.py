"""All-reduce between emulated nodes: every algorithm, beside MPI_Allreduce and gloo, in one run.

    sudo python benchmarks/all_reduce.py [--ranks 2,2] [--link 1gbit] [--mib 1 16 64]

Nodes are network namespaces joined by links of the given rate. The limit is what the wire allows:
an all-reduce of S bytes over M nodes sends at least 2 (M - 1) / M S bytes a node each way, at the
payload rate of the link. Prints a table; writes it and every figure to docs/results/.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "cluster"))
from nodes import Cluster, available  # noqa: E402

RESULTS = HERE.parent / "docs" / "results"
# Of 1 Gbit/s as tc counts it, what is left for bytes after Ethernet, IP and TCP headers.
PAYLOAD_BYTES_PER_GBIT = 119e6


def main() -> int:
    """Run the ranks on emulated nodes and write what they measured."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--ranks", default="2,2", help="ranks on each node")
    options.add_argument("--link", default="1gbit", help="rate of each node's link, in gbit")
    options.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64])
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    if reason := available():
        sys.exit(f"all_reduce.py: emulated nodes cannot be made here: {reason}")
    ranks = [int(number) for number in given.ranks.split(",")]
    command = [sys.executable, str(HERE / "ranks" / "all_reduce.py")]
    command += ["--repeats", str(given.repeats)]
    command += ["--mib", *map(str, given.mib)]
    with Cluster(ranks=ranks, link=given.link) as cluster:
        line, environment = cluster.mpirun(command)
        done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    rate = float(given.link.removesuffix("gbit")) * PAYLOAD_BYTES_PER_GBIT
    nodes = len(ranks)
    for row in measured["results"]:
        limit = 2 * (nodes - 1) / nodes * row["mib"] * 2**20 / rate
        row["share_of_limit"] = limit / row["median_s"]
    measured |= {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "command": " ".join(["python", "benchmarks/all_reduce.py", *sys.argv[1:]]),
        "link": given.link,
    }
    report = table(measured)
    print(report)
    RESULTS.mkdir(parents=True, exist_ok=True)
    library = measured["library"].split()[0].lower()
    name = f"all-reduce-{given.ranks.replace(',', '+')}-{library}"
    (RESULTS / f"{name}.json").write_text(json.dumps(measured, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(report)
    return 0


def table(measured: dict) -> str:
    """The results as a page of Markdown."""
    sizes = sorted({row["mib"] for row in measured["results"]})
    cells = {(row["what"], row["mib"]): row for row in measured["results"]}
    lines = [
        f"# All-reduce, {measured['topology']}, links of {measured['link']}",
        "",
        f"{measured['date']}; {measured['machine']}; {measured['library']}, torch "
        f"{measured['torch']}, Python {measured['python']}, mntrain {measured['mntrain']}. "
        "fp32, median milliseconds, and the share of the wire's limit; all in one run, by:",
        "",
        f"    {measured['command']}",
        "",
        "| | " + " | ".join(f"{size:g} MiB" for size in sizes) + " |",
        "|---|" + "--:|" * len(sizes),
    ]
    for what in dict.fromkeys(row["what"] for row in measured["results"]):
        row = [cells[what, size] for size in sizes]
        times = " | ".join(
            f"{cell['median_s'] * 1e3:.1f} ({cell['share_of_limit']:.0%})" for cell in row
        )
        lines.append(f"| {what} | {times} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
