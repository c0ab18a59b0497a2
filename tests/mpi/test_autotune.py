"""Autotuning on real ranks: all agree, and a cached result is not measured again."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI
from worlds import RANKS, have, refusal

import mntrain
from mntrain.comm import algorithms, autotune
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.comm.autotune import cache_path, store

COMM = MPI.COMM_WORLD
LAYOUTS = [None, *range(1, min(RANKS, 3))]
SHORT_S = 0.2  # budget of a measurement in tests

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("own_cache")]
several = pytest.mark.mpi(min_size=2)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Give all ranks the same empty cache."""
    monkeypatch.setattr(autotune, "BUDGET_S", SHORT_S)
    monkeypatch.setenv("XDG_CACHE_HOME", COMM.bcast(str(tmp_path)))
    yield
    COMM.Barrier()  # until no rank reads the folder any more


def tuned(**options):
    return mntrain.init(**({"device": "cpu", "bucket_mb": 0.5} | options))


@pytest.fixture
def runs(monkeypatch):
    """Return a list with one entry for every measurement of this rank."""
    log = []
    measure = autotune.measure

    def logged(*arguments):
        log.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(autotune, "measure", logged)
    return log


def same_everywhere(value):
    return COMM.allgather(value) == [value] * RANKS


@several
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_make_the_same_choice_among_the_candidates(layout):
    with tuned(ranks_per_node=layout) as world:
        choice = world.collectives.choice
        assert same_everywhere((choice, world.tuning, world.algorithm))
        assert choice.algorithm == world.algorithm
        assert world.algorithm in algorithms.candidates()
        assert world.tuning.startswith(world.algorithm)


@several
def test_the_chosen_algorithm_sums_correctly():
    with tuned(ranks_per_node=2) as world:
        for numel in (1, 1001, 1 << 17):
            tensor = world.collectives.allocate(numel, torch.float32, world.device)
            tensor.fill_(world.rank + 1)
            world.collectives.all_reduce(tensor).wait()
            assert (tensor == RANKS * (RANKS + 1) / 2).all()


@several
def test_ranks_whose_clocks_disagree_choose_the_same(monkeypatch):
    perf_counter = time.perf_counter
    clock = SimpleNamespace(**vars(time))
    clock.perf_counter = lambda: perf_counter() * 3**COMM.rank  # of another speed on every rank
    monkeypatch.setattr(autotune, "time", clock)
    with tuned() as world:
        assert same_everywhere((world.collectives.choice, world.tuning))


@several
def test_a_second_world_measures_nothing(runs):
    with tuned() as first:
        choice, line = first.collectives.choice, first.tuning
    assert len(runs) == 1
    with tuned() as second:
        assert second.collectives.choice == choice
        assert second.tuning.startswith(f"{line} (measured 2")
        assert same_everywhere(second.tuning)
    assert len(runs) == 1


@several
def test_another_layout_or_bucket_size_is_measured_again(runs):
    for options in ({}, {"bucket_mb": 0.25}, {"ranks_per_node": 1}, {}):
        tuned(**options).close()
    assert len(runs) == 3


@several
def test_all_ranks_use_the_entry_cached_by_rank_0(runs):
    tuned().close()
    file = cache_path()
    if COMM.rank == 0:
        (key,) = json.loads(file.read_text())
        store(key, ("leader", "as it was"))
    with tuned() as world:
        assert world.collectives.choice == AlgorithmChoice("leader")
        assert world.algorithm == "leader"
        assert world.tuning.startswith("as it was (measured ")
    assert len(runs) == 1


@several
@pytest.mark.parametrize("content", ["", "{", '{"a": 5}'])
def test_a_damaged_cache_is_measured_again(runs, content):
    file = cache_path()
    if COMM.rank == 0:
        file.parent.mkdir(parents=True)
        file.write_text(content)
    tuned().close()
    tuned().close()
    assert len(runs) == 1


@several
def test_every_world_measures_where_no_cache_can_be_written(runs, monkeypatch):
    if COMM.rank == 0:
        blocked = cache_path().parent
        blocked.parent.mkdir(exist_ok=True)
        blocked.write_text("in the way")
    COMM.Barrier()
    for _ in range(2):
        with tuned() as world:
            assert same_everywhere(world.collectives.choice)
    assert len(runs) == 2


@several
def test_without_tuning_auto_is_lanes(runs):
    with tuned(tune=False) as world:
        assert world.collectives.choice == AlgorithmChoice("lanes")
        assert world.algorithm == "lanes"
        assert world.tuning.endswith("not tuned")
    assert not runs
    assert COMM.rank or not cache_path().exists()


@pytest.mark.parametrize("algorithm", algorithms.names())
def test_an_algorithm_given_by_name_is_not_timed(runs, algorithm):
    with tuned(algorithm=algorithm) as world:
        assert world.collectives.choice == AlgorithmChoice(algorithm)
        assert (world.algorithm, world.tuning) == (algorithm, "")
    assert not runs


def test_a_world_of_one_measures_nothing(runs):
    with tuned(comm=MPI.COMM_SELF) as world:
        assert (world.algorithm, world.tuning) == ("lanes", "")
    assert not runs


@several
def test_ranks_must_agree_on_whether_to_tune():
    words = refusal(tuned, tune=COMM.rank == 0)
    assert words == f"tune differs between ranks: rank 0 has True, {have(range(1, RANKS))} False"


@several
def test_tuning_leaves_no_traffic_memory_or_open_file_behind():
    def left(**options):
        with tuned(ranks_per_node=2, **options) as world:
            maps = Path("/proc/self/maps").read_text().splitlines()
            shared = sum("memfd:mntrain" in line for line in maps)
            usage = world.usage()[world.rank]
            sent = usage.node_messages, usage.node_bytes, usage.cross_messages, usage.cross_bytes
            return shared, sent, len(list(Path("/proc/self/fd").iterdir()))

    tuned(ranks_per_node=1).close()  # connections stay open
    assert left() == left(tune=False)
