"""Weights of shards from the free memory of ranks."""

from types import SimpleNamespace

import pytest
import torch

from mntrain.run import shard_sizes
from mntrain.run.shard_sizes import check_shard_by, describe, free_by_rank, weigh

GB = 10**9


def places(*words):
    """Places from words such as "a" for a host, and "a/0" for a GPU of it."""
    return [SimpleNamespace(host=w.partition("/")[0], gpu=w.partition("/")[2]) for w in words]


@pytest.mark.parametrize(
    ("free", "where", "expected"),
    [
        ([64, 62, 30], "a a b", [31, 31, 30]),  # measured one after the other
        ([60, 60, 60], "a a a", [20, 20, 20]),  # virtual nodes of one host
        ([80, 40, 38, 24], "a/0 a/1 a/1 b/0", [80, 19, 19, 24]),
        ([-5, 10], "a b", [0, 10]),  # a cgroup above its limit
    ],
)
def test_ranks_share_the_memory_of_their_host_and_gpu(free, where, expected):
    assert free_by_rank(free, places(*where.split())) == expected


@pytest.mark.parametrize(
    ("free", "slots", "weights"),
    [
        ([30 * GB, 10 * GB], [0, 1], [100, 33]),
        ([30 * GB, 10 * GB], [1, 0], [33, 100]),  # slots are not in the order of ranks
        ([64 * GB, 64 * GB - 9, 64 * GB + 8], [0, 1, 2], [100, 100, 100]),
        ([10 * GB, 10, 0], [0, 1, 2], [100, 0, 0]),
        ([0, 0, 0], [0, 1, 2], [1, 1, 1]),
        ([7], [0], [100]),
        ([30, 90, 60, 10], [0, 1, 0, 1], [100, 33]),  # two nodes, each a sharding group
    ],
)
def test_weights_are_percents_of_the_most(free, slots, weights):
    assert weigh(free, slots) == weights


def test_the_line_names_each_ranks_part():
    assert describe([25, 75], [1, 0]) == "zero: shards by memory: ranks have 75, 25 %"
    line = describe([1] + [3] * 33, range(34))
    assert line == "zero: shards by memory: ranks have 1 to 3 %"


def test_unknown_memory_is_refused_where_it_counts(monkeypatch):
    monkeypatch.setattr(shard_sizes, "free_memory", lambda device: None)
    ranks = SimpleNamespace(device=torch.device("cpu"))
    check_shard_by(ranks, "equal", 1)
    with pytest.raises(ValueError, match="free memory is unknown here"):
        check_shard_by(ranks, "memory", 1)
