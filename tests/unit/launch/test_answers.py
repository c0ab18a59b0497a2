"""When a host counts as silent: pure."""

from types import SimpleNamespace

import pytest

from mntrain.launch import answers
from mntrain.launch.hosts import Host


def question(kind, host):
    """Make a question that was answered (.), has failed (x), is open (?), or open too long (o)."""
    found = {host: "n1"} if kind == "." else {}
    over = kind != "?"
    return SimpleNamespace(hosts=[host], found=found, late=kind == "o", is_over=lambda _: over)


@pytest.mark.parametrize(
    ("asked", "silent"),
    {
        "": False,
        "x": False,
        "o": False,
        "xx": True,
        "xx.": False,
        ".xx": True,
        "x.x": False,
        "??": False,
        "x?": False,
        "?x": False,
        "?????": False,
        "o?": True,
        "o??": True,
        "o.": False,
        ".o?": True,
        "?.??": False,
    }.items(),
)
def test_a_host_is_silent_after_two_failures_in_a_row_or_when_the_first_takes_too_long(
    asked, silent
):
    host = Host("n1")
    questions = [question(kind, host) for kind in asked]
    assert answers._is_silent(host, questions) == silent
    elsewhere = question("x", Host("n2"))
    assert answers._is_silent(host, [elsewhere, *questions, elsewhere]) == silent
