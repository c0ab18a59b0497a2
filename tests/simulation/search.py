"""The number of random programs that tests run: as always, or as SIMULATED_PROGRAMS says."""

import os

from hypothesis import Phase, settings

WANTED = os.environ.get("SIMULATED_PROGRAMS")


def searched(usual: int) -> settings:
    """Return settings of a test that runs the same programs each time; others if more are asked.

    A program that fails is told as it is: to look for a shorter one takes minutes.
    """
    return settings(
        max_examples=int(WANTED or usual),
        derandomize=WANTED is None,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
    )
