"""Sharding of map-style loaders: epochs, shares, digests, positions, evaluation."""

import random
import tempfile
import warnings
from itertools import chain

import numpy as np
import pytest
import torch
from sharding import Log, Numbers, concatenated, epoch_of, sharded
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    TensorDataset,
)

from mntrain.data.loader import passes_of
from mntrain.data.sampling import LoaderOptions
from mntrain.data.source import rebuilt


def loader_of(data, batch_size=1, workers=0, **options):
    method = {"multiprocessing_context": "fork"} if workers else {}
    return DataLoader(data, batch_size, num_workers=workers, **{**method, **options})


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "drop_last": True}, {}])
def test_the_parts_of_a_loader_are_the_global_batches(size, options):
    data = TensorDataset(torch.arange(18), torch.arange(18) * 2)
    loader = DataLoader(data, batch_size=4, **options)
    with torch.random.fork_rng(devices=[]):
        whole = concatenated(loader, size)
    assert [len(x) for x, _ in whole] == ([4] * 4 if options.get("drop_last") else [4] * 4 + [2])
    assert all(torch.equal(y, 2 * x) for x, y in whole)
    drawn = torch.cat([x for x, _ in whole]).tolist()
    assert len(set(drawn)) == len(drawn)
    assert (drawn == sorted(drawn)) == ("shuffle" not in options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_loads_its_own_samples_by_the_loaders_collate_or_a_stand_in_of_no_share(workers):
    data = Numbers(7)
    loader = loader_of(data, 5, workers, collate_fn=lambda samples: [int(s) + 1 for s in samples])
    assert epoch_of(loader, rank=0, size=4) == [([1], 1), ([6], 0)]
    assert data.asked == ([0, 5] if not workers else [])
    assert epoch_of(loader, rank=1, size=4) == [([2], 1), ([6], 1)]


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (lambda samples: (torch.zeros(len(samples) - 1, 2), ["a"]), "made 2 rows of the 3 samples"),
        (lambda samples: {"x": np.zeros((1, 5)), "n": len(samples)}, "made 1 rows of the 3"),
        (lambda samples: (torch.zeros(2, 3), torch.zeros(3)), ""),
        (lambda samples: torch.zeros(2 * len(samples), 3), ""),
        (lambda samples: [{"x": torch.zeros(2)}], ""),
        (lambda samples: None, ""),
    ],
)
def test_a_batch_of_fewer_rows_than_samples_is_told_once_unless_weighed(collate, said):
    def train(weight, size):
        loader = DataLoader(Numbers(12), 6, collate_fn=collate)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            list(sharded(loader, 0, size, Log(), weight=weight))
        return [str(one.message) for one in told]

    told = train(None, 2)
    assert len(told) == bool(said)
    assert said in "".join(told)
    assert train(lambda batch: 1, 2) == train(None, 1) == []


def test_the_share_matches_the_yielded_batch_while_workers_load_ahead():
    options = {"prefetch_factor": 4, "persistent_workers": True}
    loader = loader_of(Numbers(31), workers=2, batch_sampler=UnevenBatches(), **options)
    log = Log()
    parts = sharded(loader, 0, 2, log)
    for _ in range(2):  # the second time after one broken off
        for batch in parts:
            assert len(batch) == log.shares[-1]
            if len(log.shares) == 2:
                break
    assert log.shares == [1, 2, *(n // 2 for n in UnevenBatches.SIZES)]
    assert [total for _, total, _ in log.expected[2:]] == list(UnevenBatches.SIZES)
    assert len(log.dropped) == 1


class UnevenBatches(Sampler):
    SIZES = (2, 4, 10, 6, 8)

    def __iter__(self):
        start = 0
        for n in self.SIZES:
            yield range(start, start + n)
            start += n

    def __len__(self):
        return len(self.SIZES)


def test_length_is_the_loaders():
    loader = DataLoader(Numbers(10), batch_size=4)
    assert len(sharded(loader, 0, 3)) == 3
    assert len(sharded([torch.zeros(2)] * 5, 0, 3)) == 5
    with pytest.raises(TypeError):
        len(sharded(iter([torch.zeros(2)]), 0, 3))


def test_a_loader_that_is_sharded_already_is_refused():
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    for options in ({"sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 2, False)}):
        with pytest.raises(ValueError, match="DistributedSampler"):
            sharded(DataLoader(Numbers(8), **options), 0, 2)


# ---- epochs ----


def drawn(parts):
    return [batch.tolist() for batch in parts]


def test_epochs_advance_also_with_a_new_shard_or_loader_for_each_pass():
    data = Numbers(20)
    loader = DataLoader(data, batch_size=20, shuffle=True)
    parts = sharded(loader)
    expected = [drawn(parts) for _ in range(4)]
    assert len({str(epoch) for epoch in expected}) == 4

    passes = {}
    got = [
        drawn(sharded(loader, passes=passes_of(passes, loader.dataset, loader))) for _ in range(2)
    ]
    for _ in range(2):
        another = DataLoader(data, batch_size=20, shuffle=True)
        got.append(drawn(sharded(another, passes=passes_of(passes, another.dataset, another))))
    assert got == expected
    parts.epoch = 1
    assert drawn(parts) == expected[1]
    assert [batch.tolist() for batch, _ in epoch_of(loader, 0, 1, epoch=0)] == expected[0]
    assert [batch.tolist() for batch, _ in epoch_of(loader, 0, 1, seed=1)] != expected[0]


def test_the_passes_over_a_dataset_are_forgotten_with_it():
    passes = {}
    for _ in range(3):
        loader = DataLoader(Numbers(4), shuffle=True)
        assert passes_of(passes, loader.dataset, loader).epoch == 0
        drawn(sharded(loader, passes=passes_of(passes, loader.dataset, loader)))
        assert passes_of(passes, loader.dataset, loader).epoch == 1
        del loader
    assert not passes
    listed = DataLoader([1, 2], batch_size=2)  # a list takes no weak references
    assert passes_of(passes, listed.dataset, listed) is passes_of(passes, listed)
    assert passes_of(passes, [1]) is None


class RandomDraws(Numbers):
    def __getitem__(self, index):
        return torch.rand(()), random.random(), np.random.random()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_augment_each_epoch_and_rank_differently(persistent):
    loader = loader_of(RandomDraws(4), 4, 1, persistent_workers=persistent)
    seen = []
    for rank in range(2):
        parts = sharded(loader, rank, 2)
        seen += [str(batch) for _ in range(2) for batch in parts]
    assert len(set(seen)) == 4


# ---- what the optimizers are told ----


def test_batches_of_a_pass_that_was_left_are_forgotten_when_the_next_begins():
    log = Log()
    parts = sharded(DataLoader(Numbers(6), batch_size=2), 0, 1, log)
    batch = next(iter(parts))  # its iterator is gone, but the batch may still be trained
    assert (len(batch), log.shares, log.dropped) == (2, [2], [])
    batches = iter(parts)
    assert (log.shares, len(log.dropped)) == ([2], 1)
    next(batches)
    assert (log.shares, len(log.dropped)) == ([2, 2], 1)
    assert len(list(batches)) == 2
    assert (len(list(parts)), len(log.dropped)) == (3, 1)


def test_a_weight_takes_the_place_of_the_number_of_samples():
    tokens = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    loader = DataLoader(TensorDataset(tokens), batch_size=3)
    told = []
    for rank in range(2):
        log = Log()
        parts = sharded(loader, rank, 2, log, weight=lambda batch: batch[0].sum())
        told.append([(batch[0].tolist(), *log.expected[-1][:2]) for batch in parts])
    assert told == [
        [([[1, 1, 0]], 2, None), ([[0, 0, 0]], 0, None)],
        [([[1, 0, 0], [1, 1, 1]], 4, None), ([[0, 0, 0]], 0, None)],
    ]
    assert (log.dropped, log.ended) == ([], 1)
    one = DataLoader(Numbers(1))
    list(sharded(one, 0, 2, log, weight=lambda batch: 1 / 0))  # a stand-in is not weighed
    assert log.shares[-1] == 0
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight"):
            list(sharded(one, 1, 2, weight=lambda batch, bad=bad: bad))


class Draws(Sampler):
    """Draws its indices from one of the default generators."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return (self.draw() for _ in range(12))

    def __len__(self):
        return 12


GENERATORS = {
    "torch": lambda: int(torch.randint(50, (1,))),
    "python": lambda: random.randrange(50),
    "numpy": lambda: int(np.random.randint(50)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_ranks_agree_on_samplers_that_draw_from_any_default_generator(name):
    draw = GENERATORS[name]
    loader = DataLoader(Numbers(50), batch_size=4, sampler=Draws(draw))
    ranks = []
    for rank in range(2):
        log, draws = Log(), []
        for passes in (range(3), sharded(loader, rank, 2, log)):
            random.seed(rank)
            np.random.seed(rank)
            torch.manual_seed(rank)
            draws.append([draw() for _ in passes])
        assert draws[0] == draws[1]  # the caller's draws are as without a loader
        ranks.append(log.expected)
    assert ranks[0] == ranks[1]
    assert len({digest for _, _, digest in ranks[0]}) == 3


class Anything(Numbers):
    def __getitem__(self, index):
        return 0


def test_the_digest_tells_batches_of_other_indices_apart():
    batches = [[1, 2], [2, 1], [1, 2, 3], list(torch.tensor([1, 2])), ["a", "a"], [(1,), (2, 3)]]
    log = Log()
    list(sharded(DataLoader(Anything(9), batch_sampler=batches), 0, 2, log))
    [one, order, longer, tensors, words, unknown] = [digest for _, _, digest in log.expected]
    assert one == tensors
    assert unknown == len(batches)  # the number of the batch
    assert len({one, order, longer, words, unknown}) == 5


# ---- evaluation and positions ----


def test_an_evaluation_sees_each_sample_once():
    with torch.no_grad():
        ranks = [[*chain(*drawn(sharded(loader_of(Numbers(5), 4), r, 7)))] for r in range(7)]
    assert sorted(chain(*ranks)) == list(range(5))
    assert [len(samples) for samples in ranks] == [0, 1, 0, 1, 0, 1, 2]


def test_a_position_is_that_of_training_and_does_not_follow_evaluations():
    data = Numbers(6)
    parts = sharded(DataLoader(data, batch_size=2))
    training = iter(parts)
    next(training)
    state = parts.state_dict()
    with torch.no_grad():
        list(parts)
    assert parts.state_dict() == state
    list(training)
    assert (parts.state_dict()["epoch"], parts.state_dict()["batches"]) == (1, 0)
    parts.load_state_dict(state)
    data.asked.clear()
    assert len(list(parts)) == 2
    assert data.asked == [2, 3, 4, 5]  # not those that are done
    parts.load_state_dict(state)
    parts.epoch = 7
    assert (parts.state_dict()["epoch"], parts.state_dict()["batches"]) == (7, 0)


@pytest.mark.parametrize(("length", "workers"), [(75, 1), (76, 0), (76, 1), (90, 2)])
def test_workers_need_a_temporary_folder_with_a_short_path(monkeypatch, length, workers):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (length - 1))
    loader = DataLoader(TensorDataset(torch.zeros(4)), batch_size=2, num_workers=workers)
    shape = {"rank": 0, "micro_batch_size": 1}
    for make in (
        lambda: rebuilt(loader, batch_size=2),
        lambda: LoaderOptions(**shape, workers=workers),
    ):
        if length == 75 or not workers:
            make()
        else:
            with pytest.raises(
                ValueError, match=f"has {length} bytes, and may have 75: set TMPDIR"
            ):
                make()
