"""Write pages and plots again from the figures in docs/results/*.json, without measuring.

python benchmarks/render.py [NAME ...]
"""

import argparse
import json
import sys
from pathlib import Path

import checkpoint
import collectives
import compare_checkouts
import gpu_page
import long_run
import loss_curves
import slow_page
import slower_link
import step_page
import unequal
import unequal_losses
from emulated import HERE

PUBLISHERS = {
    "cadence": unequal_losses.publish,
    "checkpoint": checkpoint.publish,
    "collectives": collectives.publish,
    "gpu": gpu_page.publish,
    "long": long_run.publish,
    "refactor": compare_checkouts.publish,
    "slow": slow_page.publish,
    "slower": slower_link.publish,
    "step": step_page.publish,
    "unequal": unequal.publish,
    "wire": loss_curves.publish,
}


def main() -> int:
    """Render the named pages, by default all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of files in docs/results/")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    paths = sorted((options.output / "results").glob("*.json"))
    for path in paths:
        publish = PUBLISHERS.get(path.stem.partition("-")[0])
        if publish and (not options.names or path.stem in options.names):
            publish(json.loads(path.read_text()), path.stem, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
