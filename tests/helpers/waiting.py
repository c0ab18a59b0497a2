"""Waiting for what another thread or process does."""

import time


def until(condition):
    """Return when the condition holds; fail if it does not for long."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
