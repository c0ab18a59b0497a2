"""The handle of one call of a process group, as torch waits for it."""

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from inspect import isfunction, unwrap
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._distributed_c10d import Reducer
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.distributed import Work as TorchWork
from torch.futures import Future as TorchFuture

from mntrain.comm import clock
from mntrain.comm.mpi import FoundMessage
from mntrain.comm.world_collectives import expect, when_done
from zero.collectives import Work
from zero.kernels import without_repeats

Copies = Sequence[tuple[Tensor, Tensor]]
_backward = threading.local()  # its `last` is the call that this thread's backward will end last
T = TypeVar("T")


@cache
def _followers() -> ThreadPoolExecutor:
    """Return the threads of what follows futures.

    It may wait for another future, as torch's PowerSGD hook does: so it does not run in the
    engine's thread, and up to so many may wait.
    """
    return ThreadPoolExecutor(256, thread_name_prefix="mntrain torch future")


def untraced(cls: type[T]) -> type[T]:
    """Let Dynamo run the methods of a class, and what they call, as they are. Does not import it.

    Compiled code calls a group through C++, as DDP does within forward to agree on its buckets.
    Dynamo would trace the frames of Python that are called there, and refuses a process group's
    attributes. Does nothing in a torch that cannot be told so.
    """
    with suppress(ImportError):
        from torch._C._dynamo.eval_frame import (  # noqa: PLC0415 - not in every torch
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for method in filter(isfunction, vars(cls).values()):
            for function in (method, unwrap(method)):
                set_code_exec_strategy(function.__code__, skip)
    return cls


@untraced
class Call(TorchWork):
    """One call: collectives or messages of the engine, and the copies that follow them.

    `outputs` are the caller's tensors, and `copies` pairs of a tensor and what is copied to it,
    once, by the thread that finds the collective done, also if nobody waits. A pair of the same
    memory is no copy. On a GPU, other threads than the caller's copy in a stream of their own, and
    `wait` lets the current stream wait for them; the host waits for the collective alone. `message`
    is the one that is received, if it is one, and `to_one` tells that the call is for one rank.
    """

    def __init__(
        self,
        works: Sequence[Work],
        outputs: list[Tensor],
        copies: Copies = (),
        message: FoundMessage | None = None,
        *,
        to_one: bool = False,
    ) -> None:
        super().__init__()
        self._message, self._to_one = message, to_one
        self._works, self._outputs = works, outputs
        self._copies = [
            (to, it) for to, it in copies if to.is_sparse or to.data_ptr() != it.data_ptr()
        ]
        self._lock = threading.Lock()
        self._completed = False
        self._error: Exception | None = None
        self._ended: TorchFuture[None] | None = None  # completed after the call, also if it failed
        self._future: TorchFuture[Any] | None = None
        self._ends_future = False  # whether a thread has taken to complete it
        self._ends_backward = False  # whether the end of backward waits here, and will complete it
        device = next((tensor.device for tensor in outputs if tensor.is_cuda), None)
        self._stream = self._end = None
        if device is not None:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        if self._copies:
            when_done(works, self._complete_aside)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result; raise the error of the call. `timeout`: none if it is 0."""
        if timeout:
            expect(self._works)
            backoff, deadline = clock.Backoff(), clock.now() + timeout.total_seconds()
            while not self.is_completed():
                if clock.now() > deadline:
                    raise RuntimeError(f"the call has not ended within {timeout}")
                clock.pause(backoff.delay())
        self._complete()
        if self._error is not None:
            raise self._error
        if self._end is not None:
            torch.cuda.current_stream(self._end.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would not wait."""
        if not (self._completed or self._error):
            with suppress(Exception):  # that has ended all communication: `wait` raises it
                return all(work.done() for work in self._works)
        return True

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a call that has ended."""
        if self.is_completed():
            self._complete()
        return self._error

    def result(self) -> list[Tensor]:
        """Wait, and return the caller's tensors."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Wait, and return the rank of the group that has sent the message."""
        self.wait()
        assert self._message is not None
        return self._message.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait, as `wait`."""
        self.wait()

    def get_future(self) -> TorchFuture[Any]:
        """Return a future of the caller's tensors, which raises the error of the call.

        It counts as waited for from now on, since C++ waits for it without a word to Python. In a
        backward pass, the thread that ends it first waits for its collectives as `wait` does: then
        DDP's reducer, which waits there, has nothing to wait for. What follows the future runs in
        that thread or in one for it alone, since it may wait for other calls; only C++ in a
        backward pass lets nothing follow that does.
        """
        if self._future is None:
            stream = self._stream
            self._ended = TorchFuture(devices=None if stream is None else [stream.device])
            # An error that Python sets in a future is a value in C++; that of a callback is not.
            self._future = self._ended.then(lambda _: self.result())
            when_done(self._works, self.complete_future if _called_in_backward() else self._follow)
            expect(self._works)
            if not (self._to_one or in_inner_backward()):
                with suppress(RuntimeError):  # not in a backward pass
                    Variable._execution_engine.queue_callback(self._end_with_backward)
                    _backward.last = self
        return self._future

    def _follow(self) -> None:
        if self._ends_backward:
            return
        with suppress(RuntimeError):  # the interpreter ends
            _followers().submit(self.complete_future)

    def _end_with_backward(self) -> None:
        self._ends_backward = True
        try:
            if (last := getattr(_backward, "last", None)) is not None:
                _backward.last = None
                last._complete()  # one wait for all: the others have ended then, or nearly
            self.complete_future()
        finally:
            self._ends_backward = False
        if self._error is not None:
            raise self._error

    def _complete_aside(self) -> None:
        with _on(self._stream):
            self._complete()

    def _complete(self) -> None:
        """Wait for the collective, and do once what follows it."""
        error: Exception | None = None
        try:
            for work in self._works:
                work.wait()  # it may call this method
        except Exception as raised:
            error = raised
        with self._lock:
            if self._completed or self._error is not None:
                return
            try:
                if self._copies and error is None:
                    with torch.inference_mode():  # tensors of the caller's inference mode, too
                        self._copy()
                if self._stream is not None:
                    self._end = torch.cuda.current_stream(self._stream.device).record_event()
            except Exception as raised:
                error = raised
            self._completed, self._error, self._copies = error is None, error, []

    def _copy(self) -> None:
        for target, source in self._copies:
            if source.is_sparse:
                target.copy_(source)
            else:
                _fill(target, source.view(target.shape))
            for tensor in (target, source):
                if tensor.is_cuda and not tensor.is_sparse:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def end(self) -> TorchFuture[None]:
        """Return a future that is completed with the call, for a profiler."""
        end: TorchFuture[None] = TorchFuture()
        when_done(self._works, lambda: end.set_result(None))
        return end

    def complete_future(self) -> None:
        """Wait for the call, and complete its future, unless another thread does so."""
        assert self._ended is not None
        with _on(self._stream):  # what follows the future comes after it
            self._complete()
            with self._lock:
                taken, self._ends_future = self._ends_future, True
            if not taken:
                self._ended.set_result(None)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Return a context in which a stream is the current one; with None, it does nothing.

    torch's own looks for devices each time, which takes a tenth of a small call.
    """
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _called_in_backward() -> bool:
    """Return whether C++ calls the caller in a backward pass, as DDP's reducer does."""
    frame = sys._getframe(1).f_back
    return frame is None or frame.f_code is _engine_run_backward.__code__


def in_inner_backward() -> bool:
    """Return whether this thread runs a backward pass within one, as of a checkpointed segment.

    Its end is not that of the pass that a reducer waits for, and communication goes on meanwhile.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    return frame is not None


def _fill(target: Tensor, source: Tensor) -> None:
    """Copy to a tensor whose elements may share memory, such as an expanded one.

    Raises ValueError if they would have to differ.
    """
    own = without_repeats(target)
    own.copy_(source[tuple(map(slice, own.shape))])
    if own is not target and not ((target == source) | source.isnan()).all():
        raise ValueError(
            "elements of an expanded tensor share memory, and the result has different values for "
            "them: give a contiguous tensor"
        )


def keep_works_of_join() -> None:
    """Let DDP's reducers keep a work of this module that they get from `join`.

    They wait for it in C++ without a reference to Python's object, and without that forever. They
    read its future's value at once then, so it is here before.
    """
    kept: WeakKeyDictionary[Reducer, Call] = WeakKeyDictionary()
    take = Reducer._set_forward_pass_work_handle

    def keep(reducer: Reducer, work: TorchWork, use_static_world_size: bool) -> None:
        if isinstance(work, Call):
            if not use_static_world_size:
                work.get_future()
                work.complete_future()
            kept[reducer] = work
        take(reducer, work, use_static_world_size)

    Reducer._set_forward_pass_work_handle = keep  # type: ignore[method-assign, assignment]
