"""Lines of notes and warnings for the user."""

import sys
from collections.abc import Callable


class Output:
    """Notes of events, and warnings of problems, which rank 0 shows to the user. Local.

    Warnings are printed on stderr, and notes nowhere, unless a display shows both.
    """

    def __init__(self, master: bool) -> None:
        self._note: Callable[[str], None] = lambda text: None
        self._warn: Callable[[str], None] = print_warning if master else self._note

    def show_by(self, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """Let a display, which is silent on other ranks, show what follows."""
        self._note, self._warn = note, warn

    def note(self, text: str) -> None:
        """Tell of an event."""
        self._note(text)

    def warn(self, text: str) -> None:
        """Tell of a problem."""
        self._warn(text)


def print_warning(text: str) -> None:
    """Print a warning on stderr. Local."""
    print(f"mntrain: warning: {text}", file=sys.stderr, flush=True)
