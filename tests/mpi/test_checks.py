"""Checks over real ranks: what they find, what they cost, and what the doctor measures."""

import json
import os

import pytest
import torch
from mpi4py import MPI

import mntrain
from mntrain.__main__ import main
from mntrain.comm import mpi
from mntrain.comm.links import matchings, measure
from mntrain.errors import AgreedError

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
LAST = SIZE - 1


@pytest.fixture
def comm():
    made, _ = mpi.start()
    yield made
    made.free()


def test_the_checks_see_every_rank(capfd):
    with mntrain.init() as world:
        assert len(world.facts) == SIZE
        assert world.findings["world size"].text.startswith(f"{SIZE} rank")
        assert {fact.host for fact in world.facts} == {world.places[0].host}
        crowded = len(os.sched_getaffinity(0)) < SIZE
        assert world.findings["cores"].status == ("warn" if crowded else "pass")
    warnings = capfd.readouterr().err.count("mntrain: warning: ")
    assert warnings == (crowded if RANK == 0 else 0)


def test_another_version_on_one_rank_is_one_error_on_all(monkeypatch):
    if RANK == LAST:
        monkeypatch.setattr(torch, "__version__", "0.0")
    with pytest.raises(AgreedError, match=rf"torch differs between ranks.*rank {LAST} .* has 0\.0"):
        mntrain.init()


def test_every_pair_is_measured_once_and_alike_on_all_ranks(comm):
    found = measure(comm, range(SIZE), 0.5, most_bytes=1 << 22)
    assert [(link.one, link.other) for link in found] == sorted(
        tuple(sorted(pair)) for pairs in matchings(range(SIZE)) for pair in pairs
    )
    assert all(link.latency_us > 0 and link.mb_per_s > 1 for link in found)
    assert COMM.allgather(found) == [found] * SIZE


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_doctor_reports_once_and_leaves_no_file(words, tmp_path, capfd):
    folder = COMM.bcast(tmp_path)
    code = main(["doctor", "--run.dir", str(folder / "run"), *words])
    output = capfd.readouterr().out
    assert code == 0
    assert COMM.allgather(bool(output)) == [True] + [False] * LAST
    if RANK:
        return
    assert list(folder.iterdir()) == []
    if words:
        report = json.loads(output)
        checks = {check["name"]: check for check in report["checks"]}
        assert report["ranks"] == SIZE
        assert report["links"] == {"between_nodes": []}
        assert checks["clocks"]["status"] == "pass"
        assert {"versions", "clocks", "shared memory", "run directory"} <= set(checks)
        assert all(check["fix"] for check in checks.values() if check["status"] != "pass")
    else:
        assert "fit to train" in output
        assert "run directory" in output
