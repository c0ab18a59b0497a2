"""Command lines of the commands that run in one process, with errors of one line.

Needs the standard library alone.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn

_ALIKE = 0.75  # of two spellings, at least, for one to be a hint for the other


class CommandParser(ArgumentParser):
    """A parser that raises ValueError with one line where argparse prints its usage and exits."""

    def read(self, words: Sequence[str]) -> Namespace:
        """Return the values of a command line. Raises SystemExit with code 0 after --help."""
        given, unknown = self.parse_known_args(words)
        if unknown:
            raise ValueError(unknown_word(unknown[0].partition("=")[0], self.prog))
        return given

    def error(self, message: str) -> NoReturn:
        """Raise ValueError: argparse calls it for words that it cannot take."""
        raise ValueError(f"{message}; see {self.prog} --help")


def unknown_word(word: str, prog: str, allowed: Iterable[str] = ()) -> str:
    """Return the error for a word that is no option; for an option, with a hint if one is close."""
    if word.startswith("-"):
        return unknown_option(word, prog, allowed)
    return f"{word}: no option takes it; see {prog} --help"


def unknown_option(name: str, prog: str, allowed: Iterable[str]) -> str:
    """Return the error for an unknown option, with the allowed ones that may be meant.

    Those are the options whose last part (batch_size of train.batch_size) is most like its last
    part in spelling, or of these the ones in its section.
    """
    keys: dict[str, list[str]] = {}
    for option in allowed:
        keys.setdefault(_parts(option)[1], []).append(option)
    section, key = _parts(name)
    near = [option for k in get_close_matches(key, keys, 1, _ALIKE) for option in keys[k]]
    meant = [option for option in near if _parts(option)[0] == section] or near
    return f"{name}: no such option; " + (
        f"did you mean {' or '.join(meant)}?" if meant else f"{prog} --help lists all"
    )


def _parts(option: str) -> tuple[str, str]:
    """Return the section and the last part of an option's name, as they stand in a file."""
    section, _, key = option.lstrip("-").replace("-", "_").rpartition(".")
    return section, key
