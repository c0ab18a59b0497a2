"""The `Work` that a caller of the world's collectives gets."""

from collections.abc import Sequence

from mntrain.comm.engine import ProgressEngine
from mntrain.comm.pending import Future
from zero.collectives import Work


class CollectiveWork:
    """The work of one call: its collectives on the engine, and their last part on the device.

    `others` are works that do not use the engine.
    """

    def __init__(
        self,
        engine: ProgressEngine,
        futures: Sequence[Future[Work]] = (),
        others: Sequence[Work] = (),
    ) -> None:
        self._engine, self._futures, self._last_parts = engine, futures, others

    def done(self) -> bool:
        """Return whether the collectives have finished, and let them progress; see `Work.done`."""
        self._engine.check_open()
        pending = [future for future in self._futures if not future.done]
        if pending:
            self._engine.progress(pending)
        return not pending and all(work.done() for work in self._last_parts)

    def wait(self) -> None:
        """Return when the result may be used; see `Work.wait`."""
        with self._engine.waits.waiting():
            if self._futures:
                self._last_parts = [future.wait() for future in self._futures]
                self._futures = ()  # they hold the tensor
            for work in self._last_parts:
                work.wait()
