"""The hosts that schedulers and hostfiles name."""

import os

import pytest

from mntrain.launch.hosts import Host, expand, merged, of_scheduler, read_hostfile, read_list


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3],login", ["n1", "n2", "n3", "login"]),
        ("gpu[08-10,12]", ["gpu08", "gpu09", "gpu10", "gpu12"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
    ],
)
def test_slurms_lists_of_hosts_are_expanded(text, names):
    assert expand(text) == names


def test_each_schedulers_hosts_and_their_ranks_are_found(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a\na\nb\n")
    slurm = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),3"}
    assert of_scheduler(slurm) == [Host("n1", 4), Host("n2", 4), Host("n3", 3)]
    assert of_scheduler({"SLURM_JOB_NODELIST": "n[1-2]"}) == [Host("n1"), Host("n2")]
    for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        found = of_scheduler({variable: str(tmp_path / "file")})
        assert found == [Host("a", 2), Host("b", 1)]
    assert of_scheduler({"LSB_MCPU_HOSTS": "a 2 b 1"}) == [Host("a", 2), Host("b", 1)]
    flux = tmp_path / "flux"
    flux.write_text('#!/bin/sh\n[ "$*" = "hostlist --expand instance" ] && echo f1 f2\n')
    flux.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    for variable in ("FLUX_JOB_ID", "FLUX_URI"):  # of a batch script only the latter
        assert of_scheduler({variable: "f1"}) == [Host("f1"), Host("f2")]
    assert of_scheduler({}) == []


def test_hostfiles_of_both_libraries_are_read_and_keep_their_lines():
    text = "# two\nn1:2\nn2:4 ifname=ib0 # fast\n\nn3 slots=8 max_slots=9\nn4 slots = 1\nn5\n"
    found = [(host.name, host.slots, host.entry) for host in read_hostfile(text)]
    assert found == [
        ("n1", 2, "n1:2"),
        ("n2", 4, "n2:4 ifname=ib0"),
        ("n3", 8, "n3 slots=8 max_slots=9"),
        ("n4", 1, "n4 slots = 1"),
        ("n5", None, "n5"),
    ]
    assert read_list("n1:2,n2") == [Host("n1", 2, "n1:2"), Host("n2", None, "n2")]


def test_a_host_takes_a_rank_for_each_line_if_any_has_several():
    once = [Host("a"), Host("b")]
    assert merged(once) == once
    assert merged([*once, Host("b")]) == [Host("a", 1), Host("b", 2)]
    assert merged([Host("a", 2), Host("b"), Host("b", 3)]) == [Host("a", 2), Host("b", 4)]
