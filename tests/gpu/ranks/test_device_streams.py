"""Collectives are ordered by streams: callers need no other synchronisation.

Memory holds NaN until the input of a collective is written, late and on the stream, and again as
soon as the result has been read. An access at a wrong time finds the NaN. A longer run:

    MNTRAIN_SOAK=20000 python tests/helpers/launch.py 4 tests/gpu/ranks/test_device_streams.py
"""

import math
import os
import random

import pytest
import torch
from cases import RANK, UNIT, VERBS, shard
from worlds import RANKS

from gpu.place import ON, gpu, on, sleep, streams, synchronize
from gpu.ranks.transports import transports
from mntrain.comm import algorithms
from mntrain.comm.ticket import AlgorithmChoice

pytestmark = [pytest.mark.mpi, *gpu]

CALLS = int(os.environ.get("MNTRAIN_SOAK", "2000" if ON == "cuda" else "300"))
SIZES = [0, 1, 7, 100, 1003, 5003, 20011, 40000, 300_007]
MOST_UNDER_WAY = 16
LONG = 2_000_000  # cycles: about a millisecond


def poison(tensor):
    tensor.fill_(math.nan if tensor.dtype.is_floating_point else -99)


class StreamCall:
    """A random collective with a known result, on streams of this rank's choice, with delays.

    `common` draws the same on all ranks, and `own` what is this rank's.
    """

    def __init__(self, common, own, world, choices):
        self.numel, self.dtype = common.choice(SIZES), common.choice(list(UNIT))
        self.verb, self.root = common.choice(VERBS), common.randrange(RANKS)
        inner = sorted(common.choices(range(self.numel + 1), k=RANKS - 1))
        self.bounds = common.choice([None, [0, *inner, self.numel]])
        # As few as one piece a lane, or a few dozens.
        piece_bytes = max(64, self.numel * self.dtype.itemsize // common.choice([1, 4, 30]))
        choice = AlgorithmChoice(common.choice(algorithms.names()), piece_bytes)
        self.collectives = world.collectives.replace(choice=choice)
        self.salt = common.randrange(100)
        self.about = f"{self.verb} of {self.numel} {self.dtype} by {choice}, {self.root}, {inner}"
        self._own, self._device = own, world.device
        self.launched = own.choice(choices)
        self.waited = own.choice([self.launched, own.choice(choices)])
        if RANKS == 1:  # the collectives of one rank order nothing
            self.waited = self.launched

    def _values(self, rank):
        """Small whole numbers: sums of them are exact in every dtype."""
        index = torch.arange(self.numel, device=self._device)
        return (index * 7 + 3 * rank + self.salt) % 11 - 5

    def _delay(self):
        if self._own.random() < 0.2:
            sleep(self._own.randrange(LONG))

    def start(self):
        """Launch the collective before the tensor has been filled."""
        with on(self.launched):
            self.tensor = torch.empty(self.numel, dtype=self.dtype, device=self._device)
            poison(self.tensor)
            self._delay()
            self._launch()
            self._delay()

    def _launch(self):
        """Write what this rank gives, and start."""
        if self.verb == "all_gather":
            own = shard(self.collectives, self.numel, self.bounds)
            self.tensor[own] = self._values(0)[own].to(self.dtype)
        elif self.verb != "broadcast" or self.root == RANK:
            self.tensor.copy_(self._values(RANK))
        given = {"broadcast": [self.root], "all_reduce": []}.get(self.verb, [self.bounds])
        self.work = getattr(self.collectives, self.verb)(self.tensor, *given)

    def finish(self):
        """Read and overwrite the result as soon as the stream may. Never wait for the device."""
        with on(self.waited):
            self.work.wait()
            found = self.tensor.clone()
            poison(self.tensor)
            self._delay()
            right = self._right(found)
            if self.waited is not self.launched:
                self.tensor.record_stream(self.waited)
        del self.tensor, self.work
        return right, self.about

    def _right(self, tensor):
        """Return whether this rank has its result, as one element on the device."""
        if self.verb in ("all_reduce", "reduce_scatter"):
            expected = sum(self._values(rank) for rank in range(RANKS))
        else:
            expected = self._values(self.root if self.verb == "broadcast" else 0)
        mine = slice(None)
        if self.verb == "reduce_scatter":
            mine = shard(self.collectives, self.numel, self.bounds)
        return (tensor[mine].double() == expected[mine].double()).all()


@pytest.mark.timeout(100 + CALLS / 20)
@transports
def test_thousands_of_collectives_on_late_streams(worlds, transport):
    world = worlds(transport)
    common, own = random.Random(7), random.Random(RANK)
    choices = streams(world.device, 3)
    under_way, found = [], []
    for _ in range(CALLS):
        under_way.append(StreamCall(common, own, world, choices))
        under_way[-1].start()
        while len(under_way) > common.randrange(MOST_UNDER_WAY):
            found.append(under_way.pop(own.randrange(len(under_way))).finish())
    found += [call.finish() for call in under_way]
    synchronize()
    assert len(found) == CALLS
    assert [about for right, about in found if not right] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@transports
def test_a_collective_and_its_stream_wait_for_each_other(worlds, transport, dtype):
    world = worlds(transport)
    for stream in streams(world.device, 1):
        for numel in (1, 1001, 1_000_003):
            with on(stream):
                tensor = torch.full((numel,), math.nan, dtype=dtype, device=world.device)
                sleep(50 * LONG)  # the fill below has not happened when the call is made
                tensor.fill_(RANK + 1)
                world.collectives.all_reduce(tensor).wait()
                doubled = tensor * 2  # with no other synchronisation
            synchronize()
            assert (doubled == RANKS * (RANKS + 1)).all()


@transports
def test_a_launch_does_not_wait_for_the_device(worlds, transport):
    """The stream still sleeps when all launches have returned."""
    world = worlds(transport)
    tensors = [torch.ones(20011, device=world.device) for _ in range(5)]
    synchronize()
    sleep(500 * LONG)
    asleep = torch.cuda.Event() if ON == "cuda" else None
    if asleep is not None:
        asleep.record()
    works = [world.collectives.all_reduce(tensor) for tensor in tensors]
    assert asleep is None or not asleep.query()
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert (tensor == RANKS).all()
