"""How many threads torch gets."""

import pytest
import torch

from mntrain.checks import all_ranks, facts

CORES = 8  # of which two each are hyperthreads of one core


@pytest.fixture
def threads(monkeypatch):
    """Return the threads of a rank among others with the same cores."""
    state = {"count": CORES // 2}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(facts.os, "sched_getaffinity", lambda pid: state["cores"])
    monkeypatch.setattr(facts.os, "cpu_count", lambda: CORES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["count"])
    monkeypatch.setattr(facts, "_physical_core", lambda core: str(core // 2))

    def threads(ranks, before=CORES // 2, cores=range(CORES)):
        state.update(count=before, cores=set(cores))
        own = facts.collect(
            host="n", host_key=0, gpu="", library="MPICH", size=ranks, clock=(0.0, 0.0)
        )
        return own.threads or all_ranks.fair_threads([own] * ranks, 0)

    return threads


@pytest.mark.parametrize(("ranks", "count"), [(1, 4), (2, 2), (3, 1), (4, 1), (16, 1)])
def test_ranks_share_the_physical_cores(threads, ranks, count):
    assert threads(ranks) == count
    assert threads(ranks, before=CORES) == count  # torch's default without MKL


def test_a_rank_that_is_bound_to_one_hyperthread_of_each_core_has_as_many_threads(threads):
    assert threads(1, before=2, cores=[0, 2]) == 2
    assert threads(2, before=1, cores=[0, 1]) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_count_that_the_user_has_set_stays(threads, count):
    assert threads(4, before=count) == count
    assert threads(1, before=count) == count


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_count_in_the_environment_stays(threads, monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert threads(2, before=3) == 3


def test_a_variable_counts_for_more_than_what_torch_makes_of_it(threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads(2, before=1, cores=[0]) == 4


def test_logical_cores_of_a_physical_core_have_the_same_key():
    assert facts._physical_core(0) == facts._physical_core(0)
    assert facts._physical_core(10**9) == str(10**9)  # where the system tells nothing
