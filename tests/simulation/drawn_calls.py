"""Collective calls with a known result, drawn at random, and a program that makes them."""

import random
from dataclasses import dataclass, replace
from functools import cache

import torch
from simulated_ranks import Rank

from mntrain.comm import algorithms
from mntrain.comm.link import Link
from mntrain.comm.ticket import AlgorithmChoice
from mntrain.comm.world_collectives import WorldCollectives
from zero.collectives import Work

SUMS = ("all_reduce", "reduce_scatter")
VERBS = (*SUMS, "all_gather", "broadcast")
WIDE = (torch.float32, torch.float64)  # that may travel in 16 bits
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)


@cache
def values(numel: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + salt) % 11 - 5).to(dtype)


@cache
def total(numel: int, dtype: torch.dtype, salt: int, size: int) -> torch.Tensor:
    """Return the sum of what so many ranks give."""
    every = [values(numel, torch.int64, 3 * rank + salt) for rank in range(size)]
    return torch.stack(every).sum(0).to(dtype)


@dataclass(frozen=True)
class Call:
    """One collective of small whole numbers, whose sums are exact in every dtype.

    Of `gathered_bytes` in all, every rank gathers everything. `delays` are seconds that each rank
    computes before it, and `waits` whether a rank waits for it at once.
    """

    verb: str
    numel: int
    dtype: torch.dtype
    choice: AlgorithmChoice
    root: int = 0
    bounds: tuple[int, ...] | None = None
    wire: torch.dtype | None = None
    gathered_bytes: int = 0
    salt: int = 0
    delays: tuple[float, ...] = ()
    waits: bool = False

    def values(self, rank: int) -> torch.Tensor:
        return values(self.numel, self.dtype, 3 * rank + self.salt)

    def own(self, rank: Rank) -> slice:
        """Return the span of this rank's shard."""
        slot, size = rank.collectives.slot(rank.rank), rank.size
        cut = self.bounds or [place * self.numel // size for place in range(size + 1)]
        return slice(cut[slot], cut[slot + 1])

    def start(self, rank: Rank, collectives: WorldCollectives) -> tuple[Work, torch.Tensor]:
        """Start the call with what this rank gives; return its work and its tensor."""
        tensor = torch.full((self.numel,), -77).to(self.dtype)  # what must not be looked at
        if self.verb == "all_gather":
            own = self.own(rank)
            tensor[own] = self.values(0)[own]
        elif self.verb != "broadcast" or rank.rank == self.root:
            tensor.copy_(self.values(rank.rank))
        collectives = collectives.replace(
            choice=self.choice, small_message_bytes=self.gathered_bytes
        )
        given = {"broadcast": [self.root], "all_reduce": []}.get(self.verb, [self.bounds])
        options = {"wire": self.wire} if self.verb in SUMS else {}
        work: Work = getattr(collectives, self.verb)(tensor, *given, **options)
        return work, tensor

    def check(self, rank: Rank, tensor: torch.Tensor) -> None:
        """Assert that this rank has the result."""
        if self.verb in SUMS:
            expected = total(self.numel, self.dtype, self.salt, rank.size)
        else:
            expected = self.values(self.root if self.verb == "broadcast" else 0)
        mine = self.own(rank) if self.verb == "reduce_scatter" else slice(None)
        assert torch.equal(tensor[mine], expected[mine]), self


Pending = list[tuple[Call, Work, torch.Tensor]]


def start_calls(
    rank: Rank, calls: list[Call], collectives: WorldCollectives, *, waits: bool = True
) -> Pending:
    """Start calls in their order, each after this rank's delay, and wait for some if it `waits`."""
    pending = []
    for call in calls:
        if call.delays and call.delays[rank.rank]:
            rank.compute(call.delays[rank.rank])
        work, tensor = call.start(rank, collectives)
        if call.waits and waits:
            work.wait()
        pending.append((call, work, tensor))
    return pending


def end_calls(rank: Rank, pending: Pending) -> None:
    """Wait for calls, the last one first, and check their results."""
    for call, work, tensor in reversed(pending):
        work.wait()
        call.check(rank, tensor)


def run_calls(rank: Rank, calls: list[Call], collectives: WorldCollectives | None = None) -> None:
    """Make calls, by default over the world, and check their results."""
    end_calls(rank, start_calls(rank, calls, collectives or rank.collectives))


def draw_call(common: random.Random, size: int, sizes: list[int]) -> Call:
    """Draw a call for so many ranks."""
    numel, dtype = common.choice(sizes), common.choice(DTYPES)
    inner = sorted(common.choices(range(numel + 1), k=size - 1))
    # As few as one chunk a lane, or a few dozens.
    chunk_bytes = max(64, numel * dtype.itemsize // common.choice([1, 4, 30]))
    choice = AlgorithmChoice(
        common.choice(algorithms.names()),
        chunk_bytes,
        common.choice([1, 8]),
        link=common.choice([None, Link(1e-6, 5e9), Link(1e-3, 1e8)]),
    )
    late = common.random() < 0.5
    return Call(
        common.choice(VERBS),
        numel,
        dtype,
        common.choice([choice, choice.among_others()]),
        root=common.randrange(size),
        bounds=common.choice([None, (0, *inner, numel)]),
        wire=common.choice([None, torch.bfloat16, torch.float16] if dtype in WIDE else [None]),
        gathered_bytes=common.choice([0, 1 << 20]),
        salt=common.randrange(11),
        delays=tuple(common.choice([0.0, 1e-5, 1e-3]) for _ in range(size)) if late else (),
        waits=common.random() < 0.3,
    )


def spoil(common: random.Random, calls: list[Call], kind: str) -> list[Call]:
    """Return the calls of a rank that disagrees with the others about one of them."""
    place = common.randrange(len(calls))
    call, rest = calls[place], calls[place + 1 :]
    other = next(verb for verb in ("all_gather", "all_reduce") if verb != call.verb)
    changed = {
        "leaves out": [],
        "repeats": [call, call],
        "other verb": [replace(call, verb=other)],
        "other length": [replace(call, numel=call.numel + 1, bounds=None)],
        "other dtype": [
            replace(call, dtype=next(dtype for dtype in DTYPES if dtype != call.dtype))
        ],
    }[kind]
    return [*calls[:place], *changed, *rest]


SPOILS = ("leaves out", "repeats", "other verb", "other length", "other dtype")
