"""Ctrl-C as a request: noted by a handler, acted on by all ranks at the next step."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """While entered, the first SIGINT sets `requested`; a second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> Self:
        """Take over SIGINT."""
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give SIGINT back."""
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
