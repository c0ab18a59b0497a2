"""The comparison of how fast ranks multiply matrices."""

import math

import pytest
import torch
from reports import places

from mntrain.train import hardware
from mntrain.train.hardware import Speeds, matrix_flops, slow_links

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_speed_is_that_of_real_products_and_leaves_no_trace(dtype):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert 1e8 < matrix_flops(CPU, dtype, 1) < 1e14
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("threads", "cores", "counted"), [(1, 4, 1), (3, 4, 3), (64, 2, 2)])
def test_threads_count_as_far_as_there_are_cores(monkeypatch, threads, cores, counted):
    before, during = torch.get_num_threads(), []

    def product(device, dtype):
        during.append(torch.get_num_threads())
        return 1e-3

    monkeypatch.setattr(hardware, "_fastest_s", product)
    torch.set_num_threads(threads)
    try:
        assert matrix_flops(CPU, torch.float32, cores) == counted * 2 * 256**3 / 1e-3
        assert during == [1]
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_product_that_is_not_possible_is_no_error_and_ranks_count_as_equal():
    unknown = matrix_flops(CPU, torch.uint16, 1)
    assert math.isnan(unknown)
    speeds = Speeds([5e9, unknown])
    assert speeds.gain(8, None) == 1.0
    assert speeds.slow_ranks(places(2, 1)) == ""


def test_the_gain_is_the_time_of_equal_shares_over_that_of_shares_by_speed():
    speeds = Speeds([3e9, 2e9, 1e9, 2e9])
    assert speeds.gain(24, None) == pytest.approx((6 / 1) / (24 / 8))
    assert speeds.gain(24, 6) == 1.0  # no rank may have more than its equal share
    assert speeds.gain(4, None) == 1.0  # each rank needs its only sample
    assert Speeds([5e9]).gain(8, None) == 1.0


def test_speeds_are_relative_to_the_fastest():
    assert Speeds([4e9, 1e9]).relative() == {0: 1.0, 1: 0.25}


@pytest.mark.parametrize(
    ("flops", "named"),
    [
        ([5e9], ""),
        ([5e9, 4.8e9, 5e9], ""),
        ([5e9, 2e9, 5e9], "rank 1 on n1 multiplies matrices at 0.40 of the speed of the fastest "),
        ([2e9, 1e9, 5e9], "ranks 0, 1 on n0, n1 multiply matrices at 0.20 to 0.40 of the speed"),
        (
            [5e9] + [1e9] * 5,
            "ranks 1 to 5 on n1, n2, n3 and 2 more hosts multiply matrices at 0.20",
        ),
    ],
)
def test_ranks_that_hold_others_up_are_named(flops, named):
    said = Speeds(flops).slow_ranks(places(len(flops), 1))
    assert said.startswith(named)
    assert bool(said) == bool(named)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ([], ""),
        ([1e9, 0.51e9, 0.9e9], ""),
        (
            [117e6, 11.6e6, 115e6],
            "the link of node 1 (n1) carries 12 MB/s, where the fastest carries 117: "
            "every exchange between nodes waits for it",
        ),
        (
            [1e9, 2e8, 1e8],
            "the links of nodes 1, 2 (n1, n2) carry 100 MB/s, where the fastest carries 1,000: "
            "every exchange between nodes waits for it",
        ),
    ],
)
def test_nodes_with_slow_links_are_named(links, said):
    assert slow_links(links, places(6, 2)) == said


def test_nodes_of_one_host_have_no_links_of_their_own():
    assert slow_links([1e9, 1e8], places(4, 2, host="n")) == ""
