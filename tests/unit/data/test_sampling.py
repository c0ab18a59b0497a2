import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding import Numbers, data_of, sharded, world_of
from torch.utils.data import DataLoader

from mntrain.data.phase_notes import name_samples
from mntrain.data.sampling import (
    LoaderOptions,
    Position,
    SampleOrder,
    ShuffledBatches,
    step_loader,
)
from mntrain.options.config import Config, DataConfig, TrainConfig

PLANS = st.builds(
    SampleOrder,
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 25),
    seed=st.integers(0, 2**32 - 1),
    order=st.sampled_from([None, range(60)]),
)
SIZES = st.integers(1, 9)


def as_list_plus_one(samples):
    return [int(sample) + 1 for sample in samples]


def batches(dataset, order, place, steps, micro_batch_size, **options):
    """The micro-batches of a rank, of so many, in some steps of an order, as a job loads them."""
    rank, size = place
    options = LoaderOptions(rank=rank, micro_batch_size=micro_batch_size, **options)
    shard = sharded(step_loader(dataset, order, options, steps), rank, size, train=True)
    for batch in shard:
        yield batch if shard.sizes[0] else []


# ---- the order ----


@given(PLANS, st.integers(0, 3))
def test_an_epoch_takes_every_sample_once(order, epoch):
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    drawn = [order.share(step, 0, 1) for step in steps]
    assert sorted(torch.cat(drawn).tolist()) == list(range(order.samples))
    assert all(len(indices) == order.batch_size for indices in drawn[:-1])
    assert 1 <= len(drawn[-1]) <= order.batch_size
    assert all(indices.dtype == torch.int64 and indices.dim() == 1 for indices in drawn)


@given(PLANS, st.integers(0, 200), SIZES, st.integers(1, 7))
def test_shares_and_micro_batches_put_together_are_the_global_batch_at_any_size(
    order, step, size, micro_batch_size
):
    shares = [order.share(step, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(shares), order.share(step, 0, 1))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    for rank, share in enumerate(shares):
        pieces = order.micro_batches(step, rank, size, micro_batch_size)
        assert list(chain.from_iterable(pieces)) == share.tolist()
        lengths = [len(piece) for piece in pieces]
        assert all(1 <= length <= micro_batch_size for length in lengths)
        assert max(lengths, default=0) - min(lengths, default=0) <= 1
        assert len(pieces) == -(-sum(lengths) // micro_batch_size)


def test_epochs_and_seeds_shuffle_differently_and_an_order_is_kept():
    order = SampleOrder(samples=100, batch_size=100, seed=0)
    orders = [
        order.share(0, 0, 1),
        order.share(1, 0, 1),
        SampleOrder(100, 100, seed=1).share(0, 0, 1),
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert SampleOrder(5, 2, seed=0, order=[2, 0, 8, 3, 4]).share(4, 0, 1).tolist() == [8, 3]


@given(st.integers(12, 40), st.integers(1, 12), st.booleans(), st.integers(0, 60))
def test_a_plan_goes_on_where_another_has_ended(samples, batch_size, drop_last, step):
    whole = SampleOrder(samples, batch_size, seed=2, drop_last=drop_last)
    rest = replace(whole, origin=whole.position(step))
    for later in range(step, step + 8):
        assert torch.equal(rest.share(later, 0, 1), whole.share(later, 0, 1))
        assert rest.position(later) == whole.position(later)
        assert len(rest.batch(later)) == len(whole.share(later, 0, 1))


@given(st.integers(12, 40), st.integers(1, 12), st.integers(1, 12), st.integers(0, 12))
def test_another_batch_size_goes_on_after_the_samples_that_were_seen(samples, before, after, step):
    first = SampleOrder(samples, before, seed=2)
    begin = first.position(step)
    second = SampleOrder(samples, after, seed=2, origin=begin)
    seen = [
        i
        for s in range(step)
        if first.position(s).epoch == begin.epoch
        for i in first.share(s, 0, 1).tolist()
    ]
    later = step
    while second.position(later).epoch == begin.epoch:
        seen += second.share(later, 0, 1).tolist()
        later += 1
    assert sorted(seen) == list(range(samples))
    assert second.position(later) == (later, begin.epoch + 1, 0)


def test_the_last_batch_of_an_epoch_is_left_out_if_it_is_smaller():
    order = SampleOrder(samples=11, batch_size=4, seed=0, drop_last=True)
    assert order.steps_per_epoch == 2
    assert [len(order.batch(step)) for step in range(5)] == [4] * 5
    assert len(set(order.share(2, 0, 1).tolist() + order.share(3, 0, 1).tolist())) == 8
    assert SampleOrder(12, 4, seed=0, drop_last=True).steps_per_epoch == 3
    with pytest.raises(ValueError, match=r"3 samples, fewer than a batch of 4, .*--data.drop-last"):
        SampleOrder(samples=3, batch_size=4, seed=0, drop_last=True)
    with pytest.raises(ValueError, match="no samples"):
        SampleOrder(samples=0, batch_size=1, seed=0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [4, 11, 7])
@pytest.mark.parametrize("origin", [(0, 0, 0), (5, 1, 8), (9, 2, 10)])
def test_the_steps_until_epochs_end_are_those_of_the_plan(size, origin, drop_last):
    order = SampleOrder(11, size, seed=0, drop_last=drop_last, origin=Position(*origin))
    for epochs in range(order.origin.epoch + 1, 5):
        end = order.steps_until(epochs)
        assert order.position(end) == (end, epochs, 0)
        assert end == origin[0] or order.position(end - 1).epoch == epochs - 1
    assert SampleOrder(11, size, seed=0, origin=Position(5, 3, 0)).steps_until(3) == 5


def test_a_plan_over_very_many_samples_computes_only_what_it_is_asked_for():
    order = SampleOrder(samples=10**12, batch_size=64, seed=0)
    last = order.steps_per_epoch - 1
    assert order.position(last + 1) == (last + 1, 1, 0)
    assert order.position(7 * 10**11 // 64) == (7 * 10**11 // 64, 0, 7 * 10**11)
    share = order.share(last, rank=3, size=4)
    assert len(share) == 16
    assert all(0 <= sample < 10**12 for sample in share.tolist())


@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffled_batches_are_of_each_sample_once_in_another_order_each_pass(drop_last):
    sampler = ShuffledBatches(23, 7, drop_last=drop_last)
    loader = DataLoader(Numbers(23), batch_sampler=sampler)
    whole = sharded(loader, train=True)
    passes = [[batch.tolist() for batch in whole] for _ in range(3)]
    assert len({str(found) for found in passes}) == 3
    for found in passes:
        assert [len(batch) for batch in found] == [7, 7, 7, 2][: len(sampler)]
        assert len(set(chain(*found))) == (21 if drop_last else 23)
    parts = [[b.tolist() for b in sharded(loader, rank, 2, train=True)] for rank in range(2)]
    assert [list(chain(*batch)) for batch in zip(*parts, strict=True)] == passes[0]
    resumed = sharded(loader, train=True)
    resumed.load_state_dict({"epoch": 1, "batches": 2, "stream": None})
    assert [batch.tolist() for batch in resumed] == passes[1][2:]


def test_a_part_of_a_batch_is_computed_alone(monkeypatch):
    order = SampleOrder(1000, 400, seed=3)
    whole = order.share(3, 0, 1).tolist()  # the second epoch's first, behind a smaller batch
    asked = []
    monkeypatch.setattr(SampleOrder, "samples_at", counted(SampleOrder.samples_at, asked))
    batch = order.batch(3)
    assert len(batch) == 400
    assert batch[7:19] == whole[7:19]
    assert (batch[0], batch[-1], batch[5:5]) == (whole[0], whole[-1], [])
    assert order.batch(3, keyed=True)[1:3] == [(3, whole[1]), (3, whole[2])]
    assert asked == [12, 1, 1, 2]
    assert (batch[3:9:2], batch[::-1], batch[9:2:-3]) == (whole[3:9:2], whole[::-1], whole[9:2:-3])
    assert list(batch) == whole
    others = [order.batch(4), replace(order, seed=4).batch(3), replace(order, samples=999).batch(3)]
    assert len({batch.digest, *(other.digest for other in others)}) == 4
    assert batch.digest == replace(order).batch(3).digest


def counted(method, asked):
    def call(order, epoch, start, stop):
        asked.append(stop - start)
        return method(order, epoch, start, stop)

    return call


def test_shuffled_batches_of_any_number_of_samples_take_no_memory_of_all():
    assert len(set(next(iter(ShuffledBatches(10**12, 64))))) == 64
    with pytest.raises(ValueError, match="fewer than a batch of 4, which drop_last"):
        ShuffledBatches(3, 4, drop_last=True)
    for wrong in ((0, 4), (10, 0), (10, -1), (10, 2.5), (True, 2)):
        with pytest.raises(ValueError, match=r"of ShuffledBatches is .*: give an int above 0"):
            ShuffledBatches(*wrong)


# ---- loading by the order ----


@pytest.mark.parametrize(
    ("size", "workers"),  # of 11 ranks some have no sample
    [
        pytest.param(1, (1, "spawn"), marks=pytest.mark.thorough),
        (3, (0, "spawn")),
        pytest.param(3, (2, "fork"), marks=pytest.mark.thorough),
        (11, (2, "fork")),
    ],
)
def test_batches_are_the_plans_micro_batches_over_epochs(size, workers):
    order = SampleOrder(samples=23, batch_size=9, seed=1)
    start, stop = 2, 7
    for rank in {0, size - 1}:
        steps = range(start, stop)
        options = {"workers": workers[0], "start_method": workers[1]}
        got = batches(Numbers(order.samples), order, (rank, size), steps, 2, **options)
        expected = [order.micro_batches(step, rank, size, 2) for step in range(start, stop)]
        assert [[piece.tolist() for piece in pieces] for pieces in got] == expected


class IndexAndDraws(Numbers):
    """Item i is i, and what each of the default generators draws for it."""

    def __getitem__(self, index):
        return index, random.random(), np.random.random(), torch.rand(2).tolist()


def drawn(size, start, stop, workers, micro_batch_size):
    """Return the random draws of all ranks for their samples, by step and sample."""
    order = SampleOrder(23, batch_size=7, seed=5)
    found = {}
    for rank in range(size):
        shape = (rank, size), range(start, stop), micro_batch_size
        options = {"workers": workers, "start_method": "fork", "collate": list}
        steps = batches(IndexAndDraws(23), order, *shape, **options)
        for step, micro_batches in enumerate(steps, start):
            for samples in micro_batches:
                found |= {(step, one[0]): one[1:] for one in samples}
    return found


def test_random_draws_of_a_sample_do_not_depend_on_the_loading_rank():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    whole = drawn(size=1, start=0, stop=8, workers=0, micro_batch_size=7)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == states
    assert len({str(one) for one in whole.values()}) == len(whole) == 2 * 23
    for size, start, workers, micro_batch_size in ((3, 0, 0, 2), (2, 3, 0, 1), (1, 5, 2, 3)):
        part = drawn(size, start, 8, workers, micro_batch_size)
        assert part == {key: one for key, one in whole.items() if key[0] >= start}


@pytest.mark.parametrize(
    "workers", [(0, "spawn"), pytest.param((2, "fork"), marks=pytest.mark.thorough)]
)
def test_validation_visits_the_whole_dataset_once(workers):
    seen = []
    for rank in range(3):
        config = Config(
            task="own:Task",
            train=TrainConfig(micro_batch_size=2),
            data=DataConfig(workers=workers[0], worker_start=workers[1]),
        )
        given = world_of(rank, 3), Numbers(3), Numbers(13)
        data = data_of(*given, config=config, collate=as_list_plus_one)
        found = list(data.validation_batches(""))
        names = [name_samples([i - 1 for i in batch], "validation data") for _, batch in found]
        assert [name for name, _ in found] == names
        seen.append([batch for _, batch in found])
    assert all(len(piece) <= 2 for pieces in seen for piece in pieces)
    assert sorted(chain(*chain(*seen))) == list(range(1, 14))
    assert [len(pieces) for pieces in seen] == [2, 2, 3]


def test_a_dataset_that_fetches_many_samples_at_once_does_so():
    class Fetching(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor([index, len(indices)]) for index in indices]

    order = SampleOrder(12, 6, seed=0)
    steps = batches(Fetching(12), order, (0, 1), range(2), 3)
    got = torch.cat([batch for step in steps for batch in step]).tolist()
    assert sorted(got) == [[index, 3] for index in range(12)]
