import time

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that the test sets, by changing clock[0]."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now
