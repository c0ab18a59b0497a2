"""The asynchronous collectives of a world: validate, choose, access the tensor, submit."""

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import index
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from mntrain.comm import algorithms, small_messages
from mntrain.comm.engine import Future, ProgressEngine, Steps, Stream
from mntrain.comm.hierarchical import run_hierarchical
from mntrain.comm.mpi import Communicator
from mntrain.comm.nccl import NodeFirstCollectives
from mntrain.comm.resources import Algorithm, BufferPool, CommContext, TensorAccess
from mntrain.comm.shared_memory import NodeSharedMemory, SharedFlags
from mntrain.comm.staging import (
    DeviceAccess,
    DeviceCopy,
    StagedAccess,
    Staging,
    StreamOrderedWork,
    chunks,
)
from mntrain.comm.ticket import AlgorithmChoice, Signature, Ticket, Verb
from mntrain.comm.topology import Topology
from mntrain.recorder.events import call_site
from zero.collectives import Bounds, CompletedWork, Work
from zero.kernels import add, expect_flat
from zero.layout import shard_bounds

T = TypeVar("T")

# The largest total of all ranks' tensors that every rank gathers whole. Above it, bandwidth matters
# more than latency.
SMALL_MESSAGE_BYTES = 128 << 10
# Up to this size the engine's thread is not woken: waking it takes longer than the collective.
NO_WAKE_BYTES = 128 << 10

Transport = Literal["host", "cuda-aware", "nccl"]
Part = tuple[Ticket, TensorAccess, CommContext]


def futures_of(works: Iterable[Work]) -> list[Future[Any]]:
    """Return the futures among works, and those that works of a device wait for."""
    found: list[Work] = []
    for work in works:
        found += work.before if isinstance(work, StreamOrderedWork) else [work]
    return [work for work in found if isinstance(work, Future)]


def when_done(works: Sequence[Work], function: Callable[[], object]) -> None:
    """Call a function once, when all collectives of these works have finished, in any order.

    See `Future.call_when_done`. For a work that is complete already, at once.
    """
    futures = futures_of(works)
    left, lock = len(futures), threading.Lock()

    def ended() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            function()

    for future in futures:
        future.call_when_done(ended)
    if not futures:
        function()


def expect(works: Iterable[Work]) -> None:
    """Let works count as waited for from now on, and progress; see `ProgressEngine.expect`."""
    for future in futures_of(works):
        future.engine.expect([future])


class CollectiveOptions(TypedDict, total=False):
    """The options of `WorldCollectives.replace`."""

    choice: AlgorithmChoice
    transport: Transport
    node_first: NodeFirstCollectives | None
    label: str
    ratio: float
    small_message_bytes: int
    wakes: bool | None
    gathers: bool


class WorldCollectives:
    """`zero.collectives.Collectives` over MPI, for flat tensors in host or CUDA memory.

    Immutable: `replace` returns collectives with other options, over the same communicator and
    shared memory; `add_stream` collectives of the same ranks with an order of their own.
    Construction is collective over the ranks, which are those of `comm`, on the engine's thread.
    `node` has the ranks of this rank's node, and `topology` the node of each. `copier` is given by
    all ranks or by none. `stream` is by default the engine's main one, and `memory` that of the
    node's ranks, made here by default. All ranks give the same options, all but the first to
    `replace` only:

        choice                 the algorithm, and its chunks
        transport              how device tensors travel: staged in host memory, directly by MPI, or
                               by `node_first`, the collectives of transport nccl
        label                  what the calls are for, in messages about ranks that disagree
        ratio                  bytes of a call without compression, for each that it sends
        small_message_bytes    up to this total of all ranks' tensors, every rank gathers them all
        wakes                  whether the engine's thread begins a call before its caller waits for
                               it, as it does where there is a GPU; None: a long one
        gathers                whether it leaves short calls to that caller for a while
    """

    def __init__(
        self,
        comm: Communicator,
        node: Communicator,
        topology: Topology,
        engine: ProgressEngine,
        copier: DeviceCopy | None = None,
        *,
        choice: AlgorithmChoice,
        stream: Stream | None = None,
        memory: NodeSharedMemory | None = None,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.choice, self.label, self.ratio = choice, "", 1.0
        self.transport: Transport = "host"
        self.node_first: NodeFirstCollectives | None = None
        self.small_message_bytes = SMALL_MESSAGE_BYTES
        self.wakes: bool | None = None
        self.gathers = False
        self._node = node
        self.memory = NodeSharedMemory(node) if memory is None else memory
        self._algorithms: dict[str, tuple[Algorithm, bool]] = {}  # those in use so far
        self._engine, self._copier, self._stream = engine, copier, stream or engine.main
        flags = SharedFlags(self.memory, node.rank, node.size)
        self._host = CommContext(comm, topology, flags, BufferPool(comm.traffic), add)
        if copier is not None:
            self._staging = Staging(self.memory, copier)
            self._device = dataclasses.replace(
                self._host,
                buffers=BufferPool(comm.traffic, copier.device),
                add=copier.add,
                fence=copier.fence,
                run=copier.run_on_side_stream,
            )

    def replace(self, **options: Unpack[CollectiveOptions]) -> "WorldCollectives":
        """Return the same world's collectives with some of the options replaced. Local."""
        other = copy.copy(self)
        assert options.keys() <= CollectiveOptions.__annotations__.keys()
        vars(other).update(options)
        return other

    def named(self, label: str, ratio: float = 1) -> "WorldCollectives":
        """Return collectives whose calls are for what `label` says; see `Collectives.named`."""
        return self.replace(label=label, ratio=ratio)

    def add_stream(self, name: str) -> "WorldCollectives":
        """Return collectives over the same ranks in a stream of its own. Collective.

        Ranks need not agree about the order between calls of different streams, only within each.
        The name, the same on all ranks and new to the world, appears in errors. The communicator is
        freed with that of these collectives.
        """

        def make() -> WorldCollectives:
            other, copier = copy.copy(self), self._copier
            flags = SharedFlags(self.memory, self._node.rank, self._node.size)
            own: dict[str, Any] = {"comm": self._host.comm.duplicate(name), "flags": flags}
            other._stream = self._engine.add_stream(name)
            other._host = dataclasses.replace(self._host, **own)
            if copier is not None:
                other._device = dataclasses.replace(self._device, **own)
                other._staging = Staging(self.memory, copier)
            return other

        return self.call_together(make, f"a new stream, {name}").wait()

    def call_together(self, function: Callable[[], T], what: str) -> Future[T]:
        """Queue a function, which may block in MPI, for when all ranks have come to it. Collective.

        `what` names the call, the same on all ranks.
        """

        def steps(ticket: Ticket) -> Steps[T]:
            comm = self._host.comm
            yield from small_messages.barrier(comm, comm.tag(ticket.digest))
            return function()

        return self._submit(steps, what)

    def gather_objects(self, value: T, what: str) -> Future[list[T]]:
        """Start to gather every rank's small picklable object, by rank, on every rank. Collective.

        As it is now: it may change before the work has ended. `what` names the call, the same on
        all ranks.
        """
        packed = small_messages.pack(value)

        def steps(ticket: Ticket) -> Steps[list[T]]:
            tag = self._host.comm.tag(ticket.digest)
            return (yield from small_messages.gather_packed(self._host.comm, packed, tag))

        future = self._submit(steps, what)
        future.of_objects = True
        return future

    @property
    def no_shared_memory_reason(self) -> str:
        """The reason if this node's ranks share no memory and send messages; else empty."""
        return self.memory.why_not

    @property
    def started(self) -> int:
        """The number of collectives that this rank has started in the stream."""
        return self._stream.submitted

    @property
    def busy_s(self) -> float:
        """Seconds so far in which a collective was active."""
        return self._engine.busy_s

    @property
    def waited_s(self) -> float:
        """Seconds so far in which callers waited for collectives."""
        return self._engine.waited_s

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank of every slot."""
        return self._host.topology.owners

    def slot(self, rank: int) -> int:
        """Return the slot of a rank's shard; see `Topology.slots`."""
        return self._host.topology.slots[rank]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor of zeros, on the CPU in memory shared with the node. Collective."""
        if device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        what = f"allocate of {nbytes} bytes"
        return self.call_together(lambda: self.memory.allocate(nbytes), what).wait().view(dtype)

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None = None) -> Work:
        """Start to sum a tensor over all ranks, in place. Collective."""
        return self._start("all_reduce", tensor, (0, tensor.numel()), wire=wire)

    def reduce_scatter(
        self, tensor: Tensor, bounds: Bounds = None, wire: torch.dtype | None = None
    ) -> Work:
        """Start to sum over all ranks, in place; valid in this rank's shard alone. Collective."""
        return self._start(
            "reduce_scatter", tensor, shard_bounds(bounds, tensor.numel(), self.size), wire=wire
        )

    def all_gather(self, tensor: Tensor, bounds: Bounds = None) -> Work:
        """Start to copy this rank's shard to all ranks, in place. Collective."""
        return self._start("all_gather", tensor, shard_bounds(bounds, tensor.numel(), self.size))

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """Start to copy the root's tensor to all ranks, in place. Collective."""
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of this world: 0 to {self.size - 1}")
        return self._start("broadcast", tensor, (0, tensor.numel()), root=index(root))

    def _start(
        self,
        verb: Verb,
        tensor: Tensor,
        bounds: tuple[int, ...],
        *,
        root: int = 0,
        wire: torch.dtype | None = None,
    ) -> Work:
        expect_flat(tensor, wire)
        engine = self._engine
        engine.check_open()
        if self.size == 1:
            return CompletedWork()
        tensor = tensor.detach() if tensor.requires_grad else tensor
        tensor = _without_mode(tensor) if tensor.is_inference() else tensor
        nbytes = tensor.nbytes
        small = 0 < nbytes * self.size <= self.small_message_bytes
        long = not small and (self._copier is not None or nbytes > NO_WAKE_BYTES)
        wake = long if self.wakes is None else self.wakes or self._copier is not None
        gather = self.gathers and small and self._copier is None
        call = Signature(verb, self.label, tensor.dtype, bounds, root, wire, self.choice, small)
        ticket, (algorithm, host_only) = Ticket(call, call_site(), self.ratio), self._algorithm()
        parts: Iterable[Part] = [(ticket, TensorAccess(tensor, bounds), self._host)]
        copier = self._copier if self._copier is not None and self._copier.owns(tensor) else None
        if copier is not None:
            if self.transport == "nccl" and self.node_first is not None and not host_only:
                work = self.node_first.start(verb, tensor, bounds, wire)
                if work is not None:
                    return work
            parts = self._device_parts(ticket, tensor, copier, host_only=host_only)
        elif not tensor.is_cpu:
            own = self._copier.device if self._copier is not None else "cpu"
            raise ValueError(
                f"a tensor on {tensor.device}, and this rank communicates on {own}: move it there"
            )
        futures = [
            engine.submit(
                algorithm(*part), wake=wake, gather=gather, stream=self._stream, ticket=part[0]
            )
            for part in parts
        ]
        if copier is None:
            return futures[0]
        return StreamOrderedWork(copier, engine.waiting, lambda: _results(futures), futures)

    def exchange(
        self, steps: Callable[[Communicator, Ticket], Steps[None]], what: str
    ) -> Future[None]:
        """Start steps that exchange messages on the communicator. Collective.

        `what` names the call, the same on all ranks.
        """
        comm = self._host.comm
        return self._submit(lambda ticket: steps(comm, ticket), what)

    def _submit(self, steps: Callable[[Ticket], Steps[T]], what: str) -> Future[T]:
        ticket = Ticket(Signature(what), call_site())
        return self._engine.submit(steps(ticket), stream=self._stream, ticket=ticket)

    def _algorithm(self) -> tuple[Algorithm, bool]:
        """Return the chosen algorithm, and whether it needs host memory."""
        name = self.choice.algorithm
        if name not in self._algorithms:
            module = algorithms.load(name)
            if hasattr(module, "plan"):
                plan = module.plan(self._host.topology, self.rank)
                self._algorithms[name] = partial(run_hierarchical, plan), False
            else:
                self._algorithms[name] = module.run, True
        return self._algorithms[name]

    def _device_parts(
        self, ticket: Ticket, tensor: Tensor, copier: DeviceCopy, *, host_only: bool
    ) -> Iterator[Part]:
        """Yield the collectives that a call on a device tensor is made of, the same on all ranks.

        MPI takes it where it lies, or it is staged in host memory, in several chunks if it is long.
        """
        call, ready = ticket.signature, copier.record_event()
        if self.transport == "cuda-aware" and not host_only:
            access = DeviceAccess(tensor, call.bounds, copier, ready)
            ticket.signature = call._replace(small=False)
            yield ticket, access, self._device
            return
        goes: Sequence[int] | None = None  # the slots to copy to host memory; None: all
        comes: Sequence[int] | None = None  # those to copy back
        own, whole = self.slot(self.rank), call.verb in ("all_reduce", "broadcast")
        if call.verb == "reduce_scatter":
            comes = [own]
        elif call.verb == "all_gather":
            goes, comes = [own], [slot for slot in range(self.size) if slot != own]
        elif call.verb == "broadcast":
            goes, comes = (None, []) if call.root == self.rank else ([], None)
        several = chunks(call.bounds, tensor.element_size(), copier.buffer_bytes, whole=whole)
        ticket.signature = call._replace(parts=len(several))
        for spans in several:
            staged = StagedAccess(self._staging, tensor, spans, ready=ready, goes=goes, comes=comes)
            yield dataclasses.replace(ticket), staged, self._host


def _results(futures: Iterable[Future[torch.cuda.Event | None]]) -> list[torch.cuda.Event]:
    """Wait for the parts of a call on a device tensor; return the events of their ends."""
    return [end for future in futures if (end := future.wait()) is not None]


def _without_mode(tensor: Tensor) -> Tensor:
    """Return a tensor in the memory of one of `torch.inference_mode()`, for any thread to write to.

    A tensor of that mode refuses writes outside of it, and so do its views.
    """
    with torch.inference_mode(mode=False):
        other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return other.set_(tensor.untyped_storage(), *place)
