"""Hosts that count as silent, and how they are asked."""

import os
import shlex
import subprocess
from itertools import pairwise
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


def test_where_no_other_host_answers_none_is_silent_unless_it_is_asked_by_itself(monkeypatch):
    """A busy scheduler delays the questions to all other hosts, and none to this one."""
    own, others = Host("localhost"), [Host("n1"), Host("n2")]
    way = answers.Hosts([own, *others], {}, "agent")
    way.names = {host: host.name for host in (own, *others)}
    failed = [question("x", others[0]) for _ in range(2)]
    for asked in failed:
        asked.hosts, asked.found = [own, *others], {own: "localhost"}
        asked.began = answers.time.monotonic() + 100
    way._regular = failed
    assert way.silent("folder", [own, *others]) == []
    assert way.silent("folder", others[:1]) == others[:1]  # which ranks wait for
    for asked in failed:
        asked.found = {own: "localhost", others[1]: "n2"}
    assert way.silent("folder", [own, *others]) == others[:1]


def test_questions_become_rare(monkeypatch):
    now, asked = [0.0], []

    def ask(*_):
        asked.append(now[0])
        return SimpleNamespace(began=now[0], over=True, hosts=[], found={}, end=dict)

    monkeypatch.setattr(answers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(answers, "_Question", ask)
    way = answers.Hosts([Host("n1")], {}, "agent")
    while now[0] < 3600:
        way.silent("folder", [])
        now[0] += 0.5
    apart = [after - before for before, after in pairwise(asked)]
    assert (apart[0], max(apart), sorted(apart) == apart) == (3.5, 30.5, True)


@pytest.mark.parametrize("argument", ["/tmp/a folder", "it's"])
def test_a_script_reaches_sh_through_another_shell_in_one_line(argument):
    way = answers.Hosts([Host("n1")], {}, "agent")
    script = "for i in 1 2; do\n! false && printf '%s;' \"$0 $i\\n\"\ndone"
    agent, host, line = way.words(Host("n1"), script, argument)
    assert (agent, host) == ("agent", "n1")
    assert not {"\n", "!"} & {*line}
    assert all(word.isprintable() for word in shlex.split(line))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"{argument} 1\\n;{argument} 2\\n;"


def test_flux_is_asked_by_the_rank_of_a_hosts_broker_and_other_hosts_by_ssh(tmp_path, monkeypatch):
    flux = tmp_path / "flux"
    flux.write_text('#!/bin/sh\n[ "$*" = "hostlist --expand instance" ] && echo n1 n2 n3\n')
    flux.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = [Host("n3"), Host("n2"), Host("other")]  # as in a hostfile
    way = answers.Hosts(hosts, {"FLUX_URI": "x"}, "")
    asked = [way.words(host, "true", "") for host in hosts]
    assert [words[:4] for words in asked[:2]] == [
        ["flux", "exec", "-n", f"--rank={rank}"] for rank in (2, 1)
    ]
    assert asked[2][0] == "ssh"
