"""Devices emulated on the host: their work happens later, in the order of streams."""

import os
import queue
import random
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo

from mntrain.comm.nccl import shared_store
from mntrain.comm.staging import DeviceCopy, StreamOrderedWork
from zero.kernels import add


class EmulatedStream:
    """A queue of work for a thread, which sometimes pauses before a piece of it."""

    def __init__(self, seed):
        self._work = queue.Queue()
        self._delays = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, work):
        self._work.put(work)

    def close(self):
        self._work.put(None)
        self._thread.join()

    def _run(self):
        while (work := self._work.get()) is not None:
            time.sleep(self._delays.choice((0, 0, 0, 3e-4)))
            work()


class StreamEvent:
    """A point in the work of an emulated stream."""

    def __init__(self, stream):
        self._happened = threading.Event()
        self.wait = self._happened.wait
        stream.add(self._happened.set)

    def query(self):
        return self._happened.is_set()


class TimedStreamEvent(StreamEvent):
    """A point whose time is noted when the stream comes to it."""

    def __init__(self, stream):
        stream.add(self._note)
        super().__init__(stream)

    def _note(self):
        self._at = time.perf_counter()

    def synchronize(self):
        self.wait()

    def elapsed_time(self, end):
        return 1e3 * (end._at - self._at)


class LateDevice(DeviceCopy):
    """One whose memory is the host's, but is written and read late.

    `to_host` and `to_device` count the elements copied.
    """

    device, warning = torch.device("cpu"), ""

    def __init__(self, seed=0):
        self._tensors = []  # all tensors of the device, kept so that their addresses stay valid
        self._local = threading.local()
        self._streams = [EmulatedStream(seed + i) for i in range(4)]
        self._caller, self._down, self._up, self._side = self._streams
        self.to_host = self.to_device = 0
        self.pinned_bytes = 0

    @property
    def current(self):
        return getattr(self._local, "stream", self._caller)

    def tensor(self, numel, dtype=torch.float32):
        """Return a new tensor in memory of the device."""
        tensor = torch.zeros(numel, dtype=dtype)
        self._tensors.append(tensor)
        return tensor

    def run(self, work):
        """Give the current stream a function to call."""
        self.current.add(work)

    def synchronize(self):
        end = StreamEvent(self.current)
        while not end.query():
            time.sleep(1e-4)

    def close(self):
        for stream in self._streams:
            stream.close()

    def owns(self, tensor):
        address = tensor.data_ptr()
        return any(
            own.data_ptr() <= address < own.data_ptr() + max(1, own.nbytes) for own in self._tensors
        )

    def record_event(self):
        return StreamEvent(self.current)

    def record_time(self):
        return TimedStreamEvent(self.current)

    def wait_on_stream(self, event):
        self.current.add(event.wait)

    def record_stream(self, tensor):
        pass

    @contextmanager
    def side_stream(self):
        before, self._local.stream = self.current, self._side
        try:
            yield
        finally:
            self._local.stream = before

    def pin(self, memory):
        nbytes = memory.nbytes
        self.pinned_bytes += nbytes

        def unpin():
            self.pinned_bytes -= nbytes

        return unpin

    def copy_to_host(self, copies, *after):
        self.to_host += sum(len(target) for target, _ in copies)
        return self._copy(self._down, copies, after)

    def copy_to_device(self, copies):
        self.to_device += sum(len(target) for target, _ in copies)
        return self._copy(self._up, copies, ())

    def _copy(self, stream, copies, after):
        for event in after:
            stream.add(event.wait)
        for target, source in copies:
            stream.add(lambda target=target, source=source: target.copy_(source))
        return StreamEvent(stream)


class PromptDevice(LateDevice):
    """A device that does its work at once: for collectives that compute on the device."""

    def run(self, work):
        work()

    def _copy(self, stream, copies, after):
        for target, source in copies:
            target.copy_(source)
        return StreamEvent(stream)


class GlooGroup:
    """A process group over torch's Gloo, in place of NCCL.

    Gloo lacks `alltoall` of lists of tensors, which is emulated by messages.
    """

    def __init__(self, node, device):
        timeout = timedelta(seconds=60)
        store, file = shared_store(node)
        self._group = ProcessGroupGloo(store, node.rank, node.size, timeout)
        weakref.finalize(self._group, os.close, file)
        self.rank, self.size = self._group.rank, self._group.size
        self.closed = False

    def alltoall(self, outputs, inputs):
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        assert not len(outputs[self.rank()])
        assert not len(inputs[self.rank()])
        works = [self._group.send([inputs[rank]], rank, 0) for rank in others if len(inputs[rank])]
        works += [
            self._group.recv([outputs[rank]], rank, 0) for rank in others if len(outputs[rank])
        ]
        return Works(works)

    def shutdown(self):
        self.closed = True
        self._group = None


class LateGlooGroup(GlooGroup):
    """Exchanges tensors on a stream of its own, in the order of events, as NCCL does."""

    def __init__(self, node, device):
        super().__init__(node, None)
        self._device, self._stream = device, EmulatedStream(7)

    def alltoall(self, outputs, inputs):
        ready = StreamEvent(self._device.current)
        exchange = super().alltoall

        def run():
            ready.wait()
            exchange(outputs, inputs).wait()

        self._stream.add(run)
        end = StreamEvent(self._stream)
        return StreamOrderedWork(self._device, nullcontext, lambda: [end])

    def shutdown(self):
        self._stream.close()
        super().shutdown()


def late_add(device):
    """Return sums on the current stream of an emulated device."""
    return lambda addends, total: device.run(lambda: add(addends, total))


class Works:
    """Several works of torch as one."""

    def __init__(self, works):
        self._works = works

    def wait(self):
        for work in self._works:
            work.wait()
