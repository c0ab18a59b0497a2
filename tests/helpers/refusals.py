"""Command lines that are refused, for the tests of options."""

import contextlib
import io

import pytest

from mntrain.options.command_line import parse


def refused(*argv: object) -> list[str]:
    """The lines on stderr with which `parse` refuses a command line."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as exit_,
    ):
        parse(list(map(str, argv)))
    assert exit_.value.code == 2
    assert out.getvalue() == ""
    assert err.getvalue().endswith("\n")
    return err.getvalue().removesuffix("\n").split("\n")
