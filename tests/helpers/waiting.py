"""Waiting for what another thread or process does."""

import subprocess
import time
from collections.abc import Callable


def until(condition: Callable[[], object], *running: subprocess.Popen[str]) -> None:
    """Return when the condition holds; fail after 3 min, or if one of some processes ends."""
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end
        for process in running:
            assert process.poll() is None, process.communicate()
        time.sleep(0.005)
