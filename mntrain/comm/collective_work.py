"""The `Work` that a caller of the world's collectives gets."""

import time
from collections.abc import Sequence

from mntrain.comm.engine import ProgressEngine
from mntrain.comm.pending import Future
from zero.collectives import Work


class CollectiveWork:
    """The work of one call: its collectives on the engine, and their last part on the device."""

    def __init__(self, engine: ProgressEngine, futures: Sequence[Future[Work]]) -> None:
        self._engine, self._futures = engine, futures
        self._last_parts: list[Work] = []

    def done(self) -> bool:
        """Return whether the collectives have finished, and let them progress; see `Work.done`."""
        self._engine.check_open()
        pending = [future for future in self._futures if not future.done]
        if pending:
            self._engine.progress(pending)
        return not pending

    def wait(self) -> None:
        """Return when the result may be used; see `Work.wait`."""
        start = time.perf_counter()
        if self._futures:
            self._last_parts = [future.wait() for future in self._futures]
            self._futures = ()  # they hold the tensor
        for work in self._last_parts:
            work.wait()
        self._engine.waited_s += time.perf_counter() - start
