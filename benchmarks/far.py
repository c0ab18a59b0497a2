"""Time the steps of a loop whose nodes exchange parameters rarely, by the latency of their link.

    sudo python benchmarks/far.py [--delays 0 10 50] [--turns 3] [--before CHECKOUT]

Two emulated nodes of one rank train a GPT of 0.9 M parameters by DiLoCo, with an exchange every 20
steps after 10 synchronous ones. The loop logs metrics, saves by the clock and asks for requests to
stop in each step. What a node sends arrives so many milliseconds later; the link has no rate.
Writes a table to docs/results/far.md: milliseconds of a step, the median over all turns, which
alternate. `--before` adds the rows of another checkout of this repository.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from emulated import Layout, nodes
from results import DOCS, facts, heading, ms, table, write

KINDS = {
    "synchronous": "synchronous step",
    "between": "step between exchanges",
    "exchange": "step with an exchange",
}


def main() -> None:
    """Measure every delay in turns, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 10, 50])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    options = parser.parse_args()
    page = facts()
    checkouts = {"": Path(__file__).parents[1]}
    if options.before:
        checkouts["before: "] = options.before.absolute()
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.turns):
        for delay in options.delays:
            with nodes(Layout((1, 1), "1gbit")) as running, running.cluster.far(delay):
                for name, checkout in checkouts.items():
                    job = running.run("far.py", [], checkout=checkout)
                    row = found.setdefault(f"{name}{delay:g} ms", {kind: [] for kind in KINDS})
                    for kind, seconds in job["seconds"].items():
                        row[kind] += seconds
            print(f"{delay:g} ms", file=sys.stderr)
    publish(page | {"seconds": found, "versions": job["versions"]}, "far", DOCS)


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    rows = [
        [delay, *(ms(median(seconds[kind])) for kind in KINDS)]
        for delay, seconds in page["seconds"].items()
    ]
    title = "Steps on nodes that are far apart"
    lines = heading(page, title, page["versions"], "Milliseconds, the median over all turns.")
    write(output, name, page, [*lines, *table(["each way", *KINDS.values()], rows)])


if __name__ == "__main__":
    main()
