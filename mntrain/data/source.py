"""Common parts of the sources of a sharded loader: its context, a pass, and a part of a batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader

from mntrain.data.cutting import Rows, share_of
from mntrain.data.first_batch import FirstBatch
from mntrain.data.loader_balance import LoaderBalance
from mntrain.data.shares import BatchNumber
from zero.gradients.weights import BatchSource


@dataclass(frozen=True)
class ShardContext:
    """The ranks that share a loader, and who learns of their batches.

    expect(own, total, digest, source) is called before a batch is handed out, with a total of None
    if own is not in samples; forget(drawn) when a pass ends, and with drawn=True to drop batches
    that no backward followed (`ZeroOptimizer`). note(record) is called when a pass begins, before
    each batch, and when it ends.
    """

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]  # collective: every rank's object, by rank
    expect: Callable[[float, int | None, int | None, BatchSource], None]
    forget: Callable[[bool], None]
    balance: LoaderBalance | None = None  # None: equal parts
    compare: Callable[[FirstBatch], None] | None = None  # collective; None: nothing is compared
    note: Callable[["PassRecord"], None] = lambda record: None

    def alone(self) -> "ShardContext":
        """Return the context of a rank that takes the whole of every batch."""
        return ShardContext(0, 1, lambda value: [value], self.expect, self.forget)

    def part_of(self, samples: int, this: "Pass", number: int) -> "Share":
        """Return this rank's part of a batch of a pass."""
        bounds, plan = None, 0
        if self.balance is not None and this.stand_ins:
            batch = BatchNumber(this.number, number)
            bounds, plan = self.balance.bounds(samples, batch), self.balance.plan(batch)
        return Share(*share_of(samples, self.rank, self.size, bounds), plan)


class Pass(NamedTuple):
    """One iteration over a loader, on one rank."""

    rank_seed: int  # differs between ranks
    seed: int  # is the same on all
    done: int  # batches to skip, of a pass that was begun before
    stream: Any  # where a stream continues; None: behind `done` batches
    stand_ins: bool  # whether a rank without samples gets some of another
    number: int = 0  # of the training passes of its loader
    compare: Callable[[FirstBatch], None] | None = None  # for the first batch; collective


@dataclass(eq=False)
class PassRecord:
    """The batches that a pass has handed out on this rank, whose samples may be put in order.

    Of each its number among the global batches, None where ranks have batches of their own; this
    rank's samples in it, 0 for a stand-in; and those of all ranks.
    """

    batches: list[tuple[int | None, int, int]] = field(default_factory=list)


class Share(NamedTuple):
    """The place of this rank's part of a global batch, or of its stand-in."""

    rows: Rows
    own: int  # samples of this rank, 0 for a stand-in
    plan: int  # number of the plan by which the batch is divided; 0: the first, or equal parts


class Part(NamedTuple):
    """This rank's part of a global batch, or its stand-in."""

    batch: Any
    own: int  # samples of this rank, 0 for a stand-in
    total: int  # samples of the global batch
    digest: int | None = None  # 16 bits of the samples' indices; the same on all ranks
    stream: Any = None  # where a stream continues behind this batch
    plan: int = 0  # `Share.plan`
    number: int | None = None  # of the global batch in its pass; None: ranks have batches apart


class Source(Protocol):
    """A loader whose batches can be taken in parts."""

    def parts(self, this: Pass) -> Iterator[Part]:
        """Yield this rank's part of each batch of a pass."""


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader of the same dataset and settings, but for `changes` and its sampler."""
    kept = (
        "dataset",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "prefetch_factor",
        "persistent_workers",
    )
    return DataLoader(**{name: getattr(loader, name) for name in kept} | changes)
