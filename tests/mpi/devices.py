"""Devices that live on the host: what is given to them happens later, in the order of streams."""

import queue
import random
import threading
import time
from contextlib import contextmanager

import torch

from mntrain.comm.device_copy import laid_out


class Stream:
    """A queue of work, which a thread does, each piece after a moment."""

    def __init__(self, seed):
        self._work = queue.Queue()
        self._delays = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def give(self, work):
        self._work.put(work)

    def close(self):
        self._work.put(None)
        self._thread.join()

    def _run(self):
        while (work := self._work.get()) is not None:
            time.sleep(self._delays.choice((0, 0, 0, 3e-4)))
            work()


class Event:
    """See `copies.Mark`."""

    def __init__(self, device, stream):
        self._device, self._happened = device, threading.Event()
        stream.give(self._happened.set)

    def over(self):
        return self._happened.is_set()

    def order(self):
        self._device.current.give(self._happened.wait)


class LateDevice:
    """See `copies.Copier`: memory is the host's, but it is written and read late.

    `fetched` and `brought` count elements.
    """

    concern = ""

    def __init__(self, seed=0):
        self._mine = []  # tensors, which stay: what an address belongs to
        self._local = threading.local()
        self._caller, self._down, self._up, self._beside = (Stream(seed + i) for i in range(4))
        self.fetched = self.brought = 0
        self.pinned = 0  # how many pieces of memory are

    @property
    def current(self):
        return getattr(self._local, "stream", self._caller)

    def tensor(self, numel, dtype=torch.float32):
        """Memory of the device, of which nobody knows what is in it."""
        made = torch.zeros(numel, dtype=dtype)
        self._mine.append(made)
        return made

    def run(self, work):
        """Give the device something to do, after what the caller gave it before."""
        self.current.give(work)

    def synchronize(self):
        done = Event(self, self.current)
        while not done.over():
            time.sleep(1e-4)

    def close(self):
        for stream in (self._caller, self._down, self._up, self._beside):
            stream.close()

    def has(self, tensor):
        at = tensor.data_ptr()
        return any(
            mine.data_ptr() <= at < mine.data_ptr() + max(1, mine.numel() * mine.element_size())
            for mine in self._mine
        )

    def mark(self):
        return Event(self, self.current)

    @contextmanager
    def beside(self):
        before, self._local.stream = self.current, self._beside
        try:
            yield
        finally:
            self._local.stream = before

    def pin(self, memory):
        self.pinned += 1
        return self._unpin

    def _unpin(self):
        self.pinned -= 1

    def fetch(self, host, parts, after):
        self.fetched += sum(map(len, parts))
        return self._copy(self._down, zip(laid_out(host, parts), parts, strict=True), after)

    def bring(self, parts, host, after):
        self.brought += sum(map(len, parts))
        return self._copy(self._up, zip(parts, laid_out(host, parts), strict=True), after)

    def _copy(self, stream, pairs, after):
        before, self._local.stream = self.current, stream
        for mark in after:
            mark.order()
        for to, source in pairs:
            stream.give(lambda to=to, source=source: to.copy_(source))
        self._local.stream = before
        return Event(self, stream)


class PromptDevice(LateDevice):
    """A device that does at once what it is given: for what computes on it."""

    def run(self, work):
        work()

    def _copy(self, stream, pairs, after):
        for to, source in pairs:
            to.copy_(source)
        return Event(self, stream)


class HostGroup:
    """See `nodefirst.NodeGroup`: what NCCL does, by MPI, on memory of the host."""

    def __init__(self, node, devices):
        self.rank, self.size = node.rank, node.size
        self._node = node
        self.closed = False

    def exchange(self, sends, receives):
        def bytes_of(messages):
            return [(peer, tensor.view(torch.uint8).numpy()) for peer, tensor in messages]

        self._node.exchange(bytes_of(sends), bytes_of(receives))

    def close(self):
        self.closed = True
