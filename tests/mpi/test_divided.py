"""Loaders whose data are divided between ranks before: refused, or stated by divided=True."""

import numpy as np
import pytest
import torch
from models import net
from mpi4py import MPI
from oracle import SGD, Alone, assert_parity, loss_of, samples
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)
from worlds import refusal

pytestmark = pytest.mark.mpi

RANKS, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
WHOLE = TensorDataset(*samples(24))
MINE = range(RANK, 24, RANKS)


class Stream(IterableDataset):
    """All its samples in every reader; `change` is applied to each."""

    def __init__(self, data, change=lambda sample: sample):
        self.samples, self.change = data, change

    def __iter__(self):
        return map(self.change, self.samples)


class Files(IterableDataset):
    """The files of a reader, of one sample each."""

    def __init__(self, files, change=lambda sample: sample):
        self.files, self.change = files, change

    def __iter__(self):
        info = get_worker_info()
        return map(self.change, self.files[info.id :: info.num_workers])


class OnePass(IterableDataset):
    """An iterator that is used up, as that over a socket."""

    def __init__(self, samples):
        self.samples = iter(samples)

    def __iter__(self):
        return self.samples


class Changed(Dataset):
    """A map-style dataset whose samples are changed."""

    def __init__(self, data, change):
        self.data, self.change = data, change

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.change(self.data[index])


class Batches:
    """An iterable of batches without a length."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return iter(self.make())


def all_samples():
    return [WHOLE[i] for i in range(24)]


def my_samples():
    return [WHOLE[i] for i in MINE]


def augmented(sample):
    """Change inputs by a generator that no seed reaches."""
    return sample[0] + float(np.random.default_rng().normal()), sample[1]


def flipped(sample):
    """Change inputs by the default generator of torch, in some of the draws."""
    return (-sample[0] if torch.rand(()) < 0.5 else sample[0]), sample[1]


def unlabelled(sample):
    return augmented(sample)[0]


def batches_of(data, size=3):
    return list(DataLoader(data, batch_size=size))


DIVIDED = {
    "subset": lambda: DataLoader(Subset(WHOLE, MINE), batch_size=4, shuffle=True),
    "subset with workers": lambda: DataLoader(
        Subset(WHOLE, MINE), batch_size=4, num_workers=1, multiprocessing_context="fork"
    ),
    "augmented subset": lambda: DataLoader(Subset(Changed(WHOLE, augmented), MINE), batch_size=9),
    "flipped subset": lambda: DataLoader(Subset(Changed(WHOLE, flipped), MINE), batch_size=9),
    "lengths": lambda: DataLoader(Subset(WHOLE, range(12 + RANK)), batch_size=4),
    "batch sizes": lambda: DataLoader(WHOLE, batch_size=4 + RANK, drop_last=True),
    "sampler": lambda: DataLoader(WHOLE, batch_size=4, sampler=MINE),
    "batches": lambda: batches_of(WHOLE)[RANK::RANKS],
    "iterable": lambda: Batches(lambda: batches_of(Subset(WHOLE, MINE))),
    "iterator": lambda: iter(batches_of(Subset(WHOLE, MINE))),
    "random batches": lambda: Batches(lambda: batches_of(Changed(WHOLE, unlabelled))),
    "stream": lambda: DataLoader(Stream(my_samples()), batch_size=4),
    "stream with workers": lambda: DataLoader(
        Stream(my_samples()), batch_size=4, num_workers=2, multiprocessing_context="fork"
    ),
    "augmented stream": lambda: DataLoader(Stream(my_samples(), augmented), batch_size=9),
    "used up stream": lambda: DataLoader(OnePass(my_samples()), batch_size=4),
    "files": lambda: DataLoader(Files(my_samples()), batch_size=4),
    "files with workers": lambda: DataLoader(
        Files(my_samples()), batch_size=4, num_workers=2, multiprocessing_context="fork"
    ),
    "a rank without files": lambda: DataLoader(Files(my_samples()[: 9 * RANK]), batch_size=4),
    "tensors": lambda: DataLoader(torch.arange(9.0) + RANK, batch_size=4),
    "names": lambda: DataLoader([f"/data{RANK}/{i}-{RANK}.png" for i in range(9)], batch_size=4),
}

EQUAL = {
    "subset": lambda: DataLoader(Subset(WHOLE, range(1, 24, 2)), batch_size=4, shuffle=True),
    "augmented": lambda: DataLoader(Changed(WHOLE, augmented), batch_size=4),
    "unlabelled": lambda: DataLoader(Changed(WHOLE, unlabelled), batch_size=4),
    "flipped": lambda: DataLoader(Changed(WHOLE, flipped), batch_size=4, shuffle=True),
    "augmented batches": lambda: Batches(lambda: batches_of(Changed(WHOLE, augmented))),
    "flipped stream": lambda: DataLoader(Stream(all_samples(), flipped), batch_size=4),
    "augmented stream": lambda: DataLoader(Stream(all_samples(), augmented), batch_size=4),
    "used up stream": lambda: DataLoader(OnePass(all_samples()), batch_size=4),
    "files": lambda: DataLoader(
        Files(all_samples()), batch_size=4, num_workers=2, multiprocessing_context="fork"
    ),
    "augmented files": lambda: DataLoader(Files(all_samples(), unlabelled), batch_size=4),
    "mounted elsewhere": lambda: DataLoader([f"/data{RANK}/{i}.png" for i in range(9)]),
    "no samples": lambda: DataLoader(TensorDataset(torch.empty(0, 3)), batch_size=4),
    "rounding": lambda: DataLoader(torch.rand(9, generator=torch.Generator()) + 1e-7 * RANK),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", DIVIDED)
def test_data_that_were_divided_before_are_refused_at_the_first_batch(world, name):
    for training in (True, False):  # an evaluation would be of a part of the data
        with torch.set_grad_enabled(training):
            assert "divided=True" in refusal(next, iter(world.shard(DIVIDED[name]())), None)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", EQUAL)
def test_equal_data_are_not_refused_whatever_is_random_in_them(world, name):
    for training in (True, False):
        with torch.set_grad_enabled(training):
            assert len(world.gather(len(list(world.shard(EQUAL[name]()))))) == RANKS


@pytest.mark.mpi(min_size=2)
def test_each_new_loader_is_compared_once(world, monkeypatch):
    compared = []
    monkeypatch.setattr(world._shards, "compare", lambda first: compared.append(first.sizes))
    loader = DataLoader(WHOLE, batch_size=4)
    for _ in range(3):
        list(world.shard(loader))
        with torch.no_grad():
            list(world.shard(loader))
    assert len(compared) == 1
    list(world.shard(DataLoader(WHOLE, batch_size=6)))
    assert len(compared) == 2


def test_a_dataset_is_read_twice_more_and_not_changed_by_the_comparison(world):
    class Counted(Dataset):
        def __init__(self):
            self.reads, self.generator = [], torch.Generator().manual_seed(3)

        def __len__(self):
            return 40

        def __getitem__(self, index):
            self.reads.append(index)
            return torch.rand((), generator=self.generator)

    data = Counted()
    expected = torch.rand(20 // RANKS, generator=torch.Generator().manual_seed(3))
    batch = next(iter(world.shard(DataLoader(data, batch_size=20 // RANKS * RANKS))))
    torch.testing.assert_close(batch, expected)
    assert len(data.reads) == len(batch) + (2 if RANKS > 1 else 0)


# divided=True.


def my_part(seed=2):
    """Unlike numbers of samples: the first rank has fewest, of four the last none."""
    return samples(3 + 4 * RANK if RANK < 3 else 0, seed)


def own_loaders():
    part = my_part()
    data = TensorDataset(*part)
    size = 2 + RANK
    rows = list(zip(*part, strict=True))
    return {
        "map": DataLoader(data, batch_size=size, shuffle=bool(len(data))),
        "workers": DataLoader(data, batch_size=size, num_workers=1, multiprocessing_context="fork"),
        "stream": DataLoader(Stream(rows), batch_size=size),
        "readers": DataLoader(
            Files(rows), batch_size=size, num_workers=2, multiprocessing_context="fork"
        ),
        "batches": [tuple(c[i : i + size] for c in part) for i in range(0, len(part[0]), size)],
    }


def together(world, batch, own):
    """The batch of all ranks, without stand-ins."""
    parts = world.gather([column[:own] for column in batch])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", ["map", "workers", "stream", "readers", "batches"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_divided_loaders_train_as_one_process_on_all_parts(world, make, stage, kind):
    model = net()
    alone, optimizer = Alone(model, SGD), make(model, SGD, stage=stage)
    loader, seen, own_seen = own_loaders()[kind], [], 0
    total = sum(world.gather(len(my_part()[0])))
    for _ in range(2):
        before = len(seen)
        for batch in world.shard(loader, divided=True):
            own = world._shards.latest[-1][1]
            assert own in (0, len(batch[0]))
            own_seen += own
            whole = together(world, batch, own)
            seen += whole[0][:, 0].tolist()
            loss_of(model, batch).backward()
            assert optimizer.step().weight == len(whole[0])
            optimizer.zero_grad()
            alone.step(loss_of(alone.model, whole))
        assert len(seen) - before == total
    everything = torch.cat([part[0][:, 0] for part in world.gather(my_part())])
    assert sorted(seen) == sorted(2 * everything.tolist())
    assert own_seen == 2 * len(my_part()[0])
    assert_parity(world, model, alone)


def test_a_divided_evaluation_sees_each_sample_once(world):
    with torch.no_grad():
        seen = [x for x, _ in world.shard(own_loaders()["map"], divided=True)]
    assert sum(map(len, seen)) == len(my_part()[0])


def test_a_divided_loader_may_have_a_distributed_sampler(world):
    sampler = DistributedSampler(WHOLE, num_replicas=RANKS, rank=RANK)
    shard = world.shard(DataLoader(WHOLE, batch_size=2, sampler=sampler), divided=True)
    seen = {int(i) for x, _ in shard for i in x[:, 0] * 1e6}
    seen = set().union(*world.gather(seen))
    assert seen == {int(i) for i in WHOLE.tensors[0][:, 0] * 1e6}


def test_the_length_is_that_of_the_longest_divided_loader(world):
    shard = world.shard(own_loaders()["map"], divided=True)
    assert len(shard) == sum(1 for _ in shard)
    with pytest.raises(TypeError):
        len(world.shard(own_loaders()["stream"], divided=True))


@pytest.mark.parametrize("kind", ["map", "stream", "readers", "batches"])
def test_a_divided_pass_is_resumed_on_as_many_ranks(world, kind):
    shard = world.shard(own_loaders()[kind], seed=5, divided=True)
    whole = [batch[0].tolist() for batch in shard]
    for done in (1, len(whole) - 1):
        parts = iter(world.shard(own_loaders()[kind], seed=5, divided=True))
        first = world.shard(own_loaders()[kind], seed=5, divided=True)
        parts = iter(first)
        for _ in range(done):
            next(parts)
        state = first.state_dict()
        assert world.gather(state) == [state] * RANKS
        resumed = world.shard(own_loaders()[kind], seed=5, divided=True)
        resumed.load_state_dict(state)
        rest, weights = [], []
        for batch in resumed:
            weights.append(world._shards.latest[-1][1])
            rest.append(batch[0].tolist())
        assert len(rest) == len(whole) - done
        own = [batch for batch, weight in zip(rest, weights, strict=True) if weight]
        assert own == whole[done : done + len(own)]
    state["stream"] = {"divided": [None] * (RANKS + 1)}
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match=f"on {RANKS + 1} ranks"):
        next(iter(resumed))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree_about_divided_are_told_so(world):
    loader = DataLoader(WHOLE, batch_size=4)

    def draw():
        return next(iter(world.shard(loader, divided=RANK == 0)))

    assert "divided of world.shard differs between ranks" in refusal(draw)


def test_divided_with_balance_is_refused(world):
    with pytest.raises(ValueError, match="leave one of the two out"):
        world.shard(DataLoader(WHOLE), balance=True, divided=True)


def test_a_divided_loader_and_another_have_no_common_weight(world, make):
    model = net()
    make(model, SGD)
    both = world.shard(own_loaders()["map"], divided=True), world.shard(batches_of(WHOLE, 8))
    pair = [next(iter(shard)) for shard in both]
    with pytest.raises(RuntimeError, match="divided=True gives a rank another part of each"):
        sum(loss_of(model, batch) for batch in pair).backward()
