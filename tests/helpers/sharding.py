"""One process in the place of several ranks that share a loader."""

import math
import threading
from types import SimpleNamespace

import torch
from torch.utils.data import Dataset

from mntrain.data.balancing import LoaderBalancing
from mntrain.data.loader import Passes, ShardedLoader, ShardOptions, ShardRegistry
from mntrain.options.config import Config
from mntrain.train.job_data import JobData


class Numbers(Dataset):
    """Item i is i, and is remembered as asked for. At module level, for spawned workers."""

    def __init__(self, n):
        self.n, self.asked = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.asked.append(index)
        return torch.tensor(index)


class Clock:
    """A time that its test sets, in seconds, and what of it this rank has waited."""

    now = waited = 0.0

    def mark(self):
        return self.now - self.waited

    def own_s(self, start, end):
        return end - start

    def perf_counter(self):
        return self.now


def alone(value):
    return [value]


class Log(ShardRegistry):
    """A registry of shards that notes what a sharded loader tells the optimizers.

    A backward uses each batch, unless `trains` is False.
    """

    trains = True

    def __init__(self):
        self.expected, self.dropped, self.ended, self.warnings = [], [], 0, []
        output = SimpleNamespace(warn=self.warnings.append)
        ranks = SimpleNamespace(rank=0, size=1, output=output)
        super().__init__(ranks, [], observe=lambda *span: None)

    def expect(self, batch):
        self.expected.append((batch.own, batch.total, batch.digest))
        batch.source.used = batch.number if self.trains else 0

    def check_optimizers(self):
        """It stands for a rank of a world whose optimizers it only notes."""

    def end_pass(self):
        self.ended += 1

    def drop(self, source):
        self.dropped.append(source)

    @property
    def shares(self):
        return [own for own, _, _ in self.expected]


def sharded(loader, rank=0, size=1, log=None, *, passes=None, gather=alone, **options):
    log = log or Log()
    log.rank, log.size, log.gather = rank, size, gather
    known, batches = options.pop("known", None), options.pop("batches", None)
    given = {"options": ShardOptions(**options), "batches": batches}
    return ShardedLoader(loader, log, passes or Passes(), known, **given)


def balancing_of(size, gather, clock, *, room=math.inf, warnings=None):
    """The balancing of a loader, with a memory that may grow by a factor; it appends warnings."""
    places = [SimpleNamespace(host=f"host{number}") for number in range(size)]
    ranks = SimpleNamespace(size=size, gather=gather, waits=clock, places=places)
    ranks.memory_room = lambda: room
    ranks.output = SimpleNamespace(warn=[].append if warnings is None else warnings.append)
    return LoaderBalancing(ranks)


def world_of(rank=0, size=1, gather=alone):
    """One of several ranks of a world, for its data alone."""

    def shard(loader, seed, *, train, balance=False):
        options = {"gather": gather, "seed": seed, "train": train, "balance": balance}
        return sharded(loader, rank, size, **options)

    nodes = SimpleNamespace(nodes=((0,),))
    return SimpleNamespace(rank=rank, size=size, gather=gather, shard=shard, topology=nodes)


def data_of(world, train, valid=None, *, config=None, collate=None, resumed=None):
    """The data of a job whose task has these datasets."""
    task = SimpleNamespace(dataset={"train": train, "valid": valid}.get, collate=collate)
    return JobData(world, config or Config(task="own:Task"), task, resumed)


def epoch_of(loader, rank, size, epoch=0, **options):
    """One rank's epoch, as (what it got, its share) a batch."""
    log = Log()
    parts = sharded(loader, rank, size, log, **options)
    parts.epoch = epoch
    return [(batch, log.expected[-1][0]) for batch in parts]


def concatenated(loader, size, **options):
    """The global batches, from all ranks' parts of two tensors; checks the stand-ins."""
    ranks = [epoch_of(loader, rank, size, **options) for rank in range(size)]
    whole = []
    for parts in zip(*ranks, strict=True):
        shares = [share for _, share in parts]
        assert max(shares) - min(shares) <= 1
        assert all(len(x) == max(1, share) for (x, _), share in parts)
        own = [part for part, share in parts if share]
        whole.append([torch.cat(column) for column in zip(*own, strict=True)])
        assert all(bool(torch.isin(x, whole[-1][0]).all()) for (x, _), _ in parts)
    return whole


def in_turns(size, body):
    """Call body(rank, gather) for all ranks in threads, of which one runs at a time."""
    running, barrier = threading.Lock(), threading.Barrier(size, timeout=30)
    values, results, errors = [None] * size, [None] * size, []

    def run(rank):
        def gather(value):
            values[rank] = value
            running.release()
            barrier.wait()
            everyone = list(values)
            barrier.wait()
            running.acquire()
            return everyone

        with running:
            try:
                results[rank] = body(rank, gather)
            except BaseException as error:
                errors.append(error)
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
