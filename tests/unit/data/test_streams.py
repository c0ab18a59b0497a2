"""Loaders over an IterableDataset: each sample goes to one rank, whatever workers read it."""

import itertools
import random
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from sharding import Log, alone, in_turns, sharded
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SIZES = [1, 3]
WORKERS = [0, pytest.param(2, marks=pytest.mark.thorough)]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Entire(IterableDataset):
    """Yields all samples, whoever asks; shuffles by a default generator."""

    def __init__(self, n, shuffle=False):
        self.n, self.shuffle = n, shuffle

    def __iter__(self):
        order = torch.randperm(self.n).tolist() if self.shuffle else range(self.n)
        return iter(order)


class Seekable(Entire):
    """Continues where its state says, and counts what it reads."""

    start = at = read = 0

    def __iter__(self):
        first, self.start = self.start, 0
        for sample in range(first, self.n):
            self.read, self.at = self.read + 1, sample + 1
            yield sample

    def state_dict(self):
        return {"next": self.at}

    def load_state_dict(self, state):
        self.start = state["next"]


class Parted(Entire):
    """Yields its worker's samples: every n-th, and of the first `long` ones the first worker's."""

    long = 0

    def samples(self):
        info = get_worker_info()
        here, of = (info.id, info.num_workers) if info else (0, 1)
        rest = range(self.long + here, self.n, of)
        return [*range(self.long if here == 0 else 0), *rest]

    def __iter__(self):
        return iter(self.samples())


class PartedSeekable(Parted):
    start = at = 0

    def __iter__(self):
        first, self.start = self.start, 0
        for at, sample in enumerate(self.samples()[first:], first + 1):
            self.at = at
            yield sample

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


class Uneven(Parted):
    long = 9


class Empty(Parted):
    """Only the last reader has samples."""

    def samples(self):
        info = get_worker_info()
        return range(self.n) if info.id == info.num_workers - 1 else []


class Ranged(Entire):
    """Yields a range that a worker_init_fn cuts, as in torch's documentation."""

    def __iter__(self):
        first, last = getattr(self, "bounds", (0, self.n))
        return iter(range(first, last))


def cut_range(worker):
    info = get_worker_info()
    assert info.id == worker
    n = info.dataset.n
    info.dataset.bounds = n * info.id // info.num_workers, n * (info.id + 1) // info.num_workers


class Chunks(Entire):
    """Yields whole batches, of unequal sizes."""

    def __iter__(self):
        bounds = itertools.accumulate(itertools.cycle([4, 1, 3]), initial=0)
        for low, high in itertools.pairwise(bounds):
            if low >= self.n:
                return
            yield torch.arange(low, min(high, self.n))


def loader(dataset, workers=0, batch_size=4, **options):
    method = {"multiprocessing_context": "fork"} if workers else {}
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, **{**method, **options})


def run(make, size, body):
    """Return what body(parts, log) gives on each of the ranks, each with a loader of its own."""

    def rank_body(rank, gather):
        log = Log()
        return body(sharded(make(), rank, size, log, gather=gather), log)

    return in_turns(size, rank_body)


def epoch(parts, log):
    """The samples and the shares of an epoch's batches."""
    start = len(log.expected)
    got = [batch.tolist() for batch in parts]
    return [
        (part, own, total) for part, (own, total, _) in zip(got, log.expected[start:], strict=True)
    ]


def global_batches(ranks):
    """The batches of all ranks together; checks that shares are what ranks have."""
    whole = []
    for parts in zip(*ranks, strict=True):
        assert all(len(part) == own or own == 0 for part, own, _ in parts)
        together = [sample for part, own, _ in parts if own for sample in part]
        assert {total for _, _, total in parts} == {len(together)}
        whole.append(together)
    return whole


def evaluate(parts, log):
    with torch.no_grad():
        return [sample for batch in parts for sample in batch.tolist()]


def seed_by_reader(worker):
    np.random.seed(get_worker_info().seed % 2**32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("workers", WORKERS)
def test_whole_streams_make_the_same_global_batches_everywhere(size, workers):
    expected = [list(range(low, min(low + 4, 13))) for low in range(0, 13, 4)]
    for drop_last, count in ((False, 4), (True, 3)):
        make = partial(
            loader, Entire(13), workers, drop_last=drop_last, worker_init_fn=seed_by_reader
        )
        trained = run(make, size, lambda parts, log: (epoch(parts, log), evaluate(parts, log)))
        assert global_batches([whole for whole, _ in trained]) == expected[:count]
        seen = [sample for _, samples in trained for sample in samples]
        assert sorted(seen) == list(chain(*expected[:count]))
    make = partial(loader, Chunks(11), workers, batch_size=None)
    assert global_batches(run(make, size, epoch)) == [[0, 1, 2, 3], [4], [5, 6, 7], [8, 9, 10]]
    assert run(partial(loader, Parted(0), workers), size, epoch) == [[]] * size


@pytest.mark.parametrize(
    ("workers", "persistent"),
    [
        (0, False),
        *(pytest.param(2, kept, marks=pytest.mark.thorough) for kept in (False, True)),
    ],
)
def test_every_epoch_of_a_shuffling_stream_has_its_own_order(workers, persistent):
    def two_epochs(parts, log):
        random.seed(parts._shards.rank)
        torch.manual_seed(parts._shards.rank)
        before = torch.get_rng_state()
        epochs = epoch(parts, log), epoch(parts, log)
        assert torch.equal(torch.get_rng_state(), before) or workers
        return epochs

    options = {"persistent_workers": True} if persistent else {}
    orders = []
    for size in (1, 2):
        make = partial(loader, Entire(10, shuffle=True), workers, **options)
        ranks = run(make, size, two_epochs)
        orders.append([global_batches(epochs) for epochs in zip(*ranks, strict=True)])
    assert orders[0] == orders[1]
    first, second = [list(chain(*batches)) for batches in orders[0]]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(10))


@pytest.mark.parametrize(
    ("kind", "size", "workers"),
    [
        *((kind, 3, 0) for kind in (Parted, Empty, Ranged, PartedSeekable)),
        (Uneven, 3, 2),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [*((kind, 3, 2) for kind in (Parted, Empty, Ranged)), (Ranged, 1, 2)]
        ),
    ],
)
def test_streams_of_their_own_give_each_sample_once(kind, size, workers):
    options = {"worker_init_fn": cut_range} if kind is Ranged else {}
    make = partial(loader, kind(23), workers, **options)
    trained = run(make, size, lambda parts, log: (epoch(parts, log), evaluate(parts, log)))
    ranks = [whole for whole, _ in trained]
    assert len({len(parts) for parts in ranks}) == 1
    assert sorted(chain(*global_batches(ranks))) == list(range(23))
    assert all(part for parts in ranks for part, _, _ in parts)  # stand-ins, too
    seen = [sample for _, samples in trained for sample in samples]
    assert sorted(seen) == list(range(23))


class Buffered(Parted):
    """Shuffles by a buffer, with a default generator."""

    def __iter__(self):
        buffer = []
        for sample in self.samples():
            buffer.append(sample)
            if len(buffer) > 5:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


class Tardy(Entire):
    def __iter__(self):
        yield 0
        assert get_worker_info().id is not None
        yield 1


def test_a_dataset_that_asks_late_for_its_worker_is_refused():
    with pytest.raises(RuntimeError, match="Tardy read get_worker_info\\(\\) after its first"):
        list(sharded(loader(Tardy(2)), gather=alone))
    for _ in sharded(loader(Parted(4), batch_size=2), gather=alone):
        assert get_worker_info() is None  # between samples


class Drawing(Entire):
    """Draws from every default generator, in a stream of its own."""

    def __iter__(self):
        here = get_worker_info().id
        for _ in range(self.n):
            yield here, random.random(), np.random.random(), float(torch.rand(()))


@pytest.mark.parametrize("workers", WORKERS)
def test_readers_of_their_own_streams_draw_unlike_random_numbers(workers):
    def batches(parts, log):
        return [
            tuple(sample)
            for batch in parts
            for sample in zip(*[c.tolist() for c in batch], strict=True)
        ]

    def collate(samples):
        return torch.tensor(samples, dtype=torch.float64).unbind(1)

    ranks = run(partial(loader, Drawing(6), workers, collate_fn=collate), 2, batches)
    drawn = [sample[1:] for samples in ranks for sample in samples]
    # The first sample of a stream is drawn before it is known to be one.
    assert len(set(drawn)) == len(drawn) - (2 * max(1, workers) - 1)


def states_behind(make, size):
    """The state before the first batch of an epoch on `size` ranks, and behind each of them."""

    def train(parts, log):
        return [parts.state_dict(), *(parts.state_dict() for _ in parts)]

    states, *others = run(make, size, train)
    assert all(other == states for other in others)
    return states


def continued(make, size, state):
    """The global batches of the rest of an epoch behind a state."""

    def train(parts, log):
        parts.load_state_dict(state)
        return epoch(parts, log)

    return global_batches(run(make, size, train))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, sizes) for kind in (Entire, Seekable) for sizes in [(1, 1), (2, 1), (1, 3)]),
        *((kind, (2, 2)) for kind in (Uneven, PartedSeekable, Buffered)),  # streams of their own
        (Buffered, (1, 1)),
    ],
)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_stream_is_resumed_behind_the_last_batch(kind, sizes, workers):
    make = partial(loader, kind(29), workers)
    expected, states = global_batches(run(make, sizes[0], epoch)), states_behind(make, sizes[0])
    for done in (0, 1, 3, len(expected) - 1, len(expected)):
        assert continued(make, sizes[1], states[done]) == expected[done:]


def test_a_stateful_stream_is_not_read_again():
    data = Seekable(30)
    parts = sharded(loader(data))
    list(itertools.islice(parts, 3))
    fresh = Seekable(30)
    resumed = sharded(loader(fresh))
    resumed.load_state_dict(parts.state_dict())
    got = [batch.tolist() for batch in resumed]
    assert got[0] == [12, 13, 14, 15]
    assert fresh.read == 18
    assert next(iter(resumed)).tolist() == [0, 1, 2, 3]


class Torn(Parted):
    """Cannot read its sixth sample on the first rank."""

    def samples(self):
        for place, sample in enumerate(super().samples()):
            if place == 5 and get_worker_info().id == 0:
                raise OSError("torn")
            yield sample


def test_other_ranks_go_on_to_the_end_of_a_step_in_which_one_cannot_read():
    def body(parts, log):
        seen = []
        try:
            for batch in parts:
                seen.append(len(batch))
                if len(seen) == 3:
                    break
        except OSError:
            seen.append("torn")
        return seen, log.shares

    first, second = run(lambda: loader(Torn(30)), 2, body)
    assert first == ([2, 2, "torn"], [2, 2])
    assert second == ([2, 2, 2], [2, 2, 2])


def test_streams_of_their_own_are_resumed_by_as_many_readers():
    state = run(
        partial(loader, Parted(30), 1),
        2,
        lambda parts, log: [next(iter(parts)), parts.state_dict()],
    )[0][1]
    for size, workers, message in ((1, 1, "on 2 ranks, but"), (2, 2, "of 1 readers .* here are 2")):
        parts = sharded(loader(Parted(30), workers), 0, size)
        parts.load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            next(iter(parts))


def test_passes_over_one_stream_do_not_mix():
    parts = sharded(loader(Entire(8)))
    first, second = iter(parts), iter(parts)
    assert next(first).tolist() == next(second).tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="another pass over this stream has begun"):
        next(first)
    assert [batch.tolist() for batch in second] == [[4, 5, 6, 7]]
