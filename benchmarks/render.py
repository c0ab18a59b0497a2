"""Write pages and plots again from the figures in docs/results/*.json, without measuring.

python benchmarks/render.py [NAME ...]
"""

import argparse
import json
import sys
from pathlib import Path

import checkpoint
import collectives
import far
import gpu
import local_checkpoints
import outage
import scale
import slow_links
import step
import unequal
from results import DOCS

PUBLISHERS = {
    "cadence": unequal.publish_losses,
    "checkpoint": checkpoint.publish,
    "collectives": collectives.publish,
    "far": far.publish,
    "gpu": gpu.publish,
    "local": local_checkpoints.publish,
    "outage": outage.publish,
    "scale": scale.publish,
    "slow": slow_links.publish,
    "step": step.publish,
    "unequal": unequal.publish,
}


def main() -> int:
    """Render the named pages, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of files in docs/results/")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    for path in sorted((options.output / "results").glob("*.json")):
        if not options.names or path.stem in options.names:
            kind = path.stem.partition("-")[0]
            publish = PUBLISHERS.get(path.stem) or PUBLISHERS[kind]
            publish(json.loads(path.read_text()), path.stem, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
