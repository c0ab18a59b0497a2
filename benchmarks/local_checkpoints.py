"""Benchmark checkpoints in the nodes' memory: what saves and copies cost a step.

    python benchmarks/local_checkpoints.py [--layout 2,2] [--link 1gbit] [--model 10.9M] [--stage 1]

One job on emulated nodes, which needs root. In turns, in changing order, it trains a block of steps
without saves, one that saves after every --every steps, and one with "auto". Writes a page and its
figures to docs/results/. Takes about 10 minutes.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from emulated import Layout, nodes
from results import DOCS, facts, heading, ratios, spread, table, write


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layout", default="2,2", help="ranks of each node")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--model", default="10.9M")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60, help="of a block")
    parser.add_argument("--rounds", type=int, default=5, help="after a warm-up")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    page, layout = facts(), Layout.of(options.layout, options.link)
    with nodes(layout) as running, tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={getattr(options, name)}" for name in ("model", "stage", "steps")]
        words += [f"--rounds={options.rounds}", f"--every={options.every}", f"--folder={folder}"]
        page |= running.run("local_checkpoints.py", words)
    page |= {"layout": str(layout), "stage": options.stage, "rounds": options.rounds}
    publish(page | {"block": options.steps}, "local-checkpoints", options.output)
    return 0


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    about = (
        f"{page['layout']}; a GPT of {page['parameters'] / 1e6:.1f} M parameters in fp32 with "
        f"AdamW, {12e-6 * page['parameters']:.0f} MB of state, at stage {page['stage']}; "
        f"{page['rounds']} rounds of {page['block']} steps each way."
    )
    lines = heading(page, "Checkpoints in the nodes' memory", page["versions"], about)
    names = list(dict.fromkeys(turn["what"] for turn in page["turns"]))
    turns = {
        what: [turn for turn in page["turns"] if turn["round"] and turn["what"] == what]
        for what in names
    }
    plain = [mean(turn["steps_s"]) for turn in turns[names[0]]]
    plain_cpu = [turn["cpu_s"] for turn in turns[names[0]]]
    rows = []
    for what in names:
        steps = [mean(turn["steps_s"]) for turn in turns[what]]
        cpu = [turn["cpu_s"] for turn in turns[what]]
        cells = [spread(steps, 3), spread(ratios(steps, plain), 3)]
        cells += [f"{median(cpu):.3f}", spread(ratios(cpu, plain_cpu), 3)]
        if local := page["saves"].get(what, {}).get("local"):
            cells += [str(local["saved"]), f"{local['waited_s'] / max(1, local['saved']):.3f}"]
        rows.append([what, *cells, *[""] * (6 - len(cells))])
    heads = ["saves", "step, s", "of that without", "CPU of a rank, s", "of that without"]
    lines += table([*heads, "complete, with copies", "pause of each, s"], rows)
    lines += [
        "",
        "Means over the steps of a block; medians (least to most) of the blocks, each compared "
        "with the block without saves of its round. Saves are those of all blocks, the warm-up "
        "included. Time in which other blocks ran does not count for the interval `auto`, which "
        f"was {page['auto']['auto']:.0f} s in the end.",
    ]
    write(output, name, page, lines)


if __name__ == "__main__":
    sys.exit(main())
