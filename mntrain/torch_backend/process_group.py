"""The process group: torch's verbs, on the collectives of a world or of some of its ranks."""

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import wraps
from inspect import unwrap
from itertools import accumulate, pairwise
from types import CodeType, FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType, Store
from torch.autograd.graph import _engine_run_backward
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel

from mntrain.comm import small_messages
from mntrain.comm.engine import Steps
from mntrain.comm.messages import Messages
from mntrain.comm.mpi import Communicator
from mntrain.comm.ticket import Ticket
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.torch_backend import verbs
from mntrain.torch_backend.other_backends import OtherBackends
from mntrain.torch_backend.work import Call, in_inner_backward, untraced
from zero.collectives import Work
from zero.kernels import sum_dtype

NAME = "mntrain"
# Sums that the hierarchical collectives make; others go in messages between all ranks.
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUMS = (ReduceOp.SUM, ReduceOp.AVG)

_DESTROYED = "this process group was destroyed"

Copies = list[tuple[Tensor, Tensor]]  # to, from

# Functions that wait at once for the message that they start, which torch tells for collectives
# alone: to wake the engine's thread takes a quarter of the time of a short message.
_BLOCKING = {unwrap(function).__code__ for function in (dist.send, dist.recv)}
# It waits at its end for what DDP starts in it, but not in one within another.
_BACKWARD = {_engine_run_backward.__code__}
_FRAMES = 7  # from a verb to the function of torch that calls it, at most: not to outer calls

# In profiles, where they are not as the method's.
_TITLES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
# Its `in_verb` is True while a profiler sees a verb, which calls others.
_thread = threading.local()

Started = tuple[Work, Copies]
VerbSteps = Callable[[Communicator, Sequence[int]], Steps[None]]


def _verb(method: Callable[..., Call]) -> Callable[..., Call]:
    """Let a method work on tensors that are ready, and make normal ones.

    Results of functional collectives may be on their way, and would be waited for in the engine.
    Its thread is outside of the caller's inference mode.
    """
    outside = torch.inference_mode(mode=False)(method)
    title = f"{NAME}:{_TITLES.get(method.__name__, method.__name__)}"

    @wraps(method)
    def verb(self: "MpiProcessGroup", *arguments: Any, **options: Any) -> Call:
        normal = outside if torch.is_inference_mode_enabled() else method
        if not torch._C._autograd._profiler_enabled() or getattr(_thread, "in_verb", False):
            return normal(self, *map(_ready, arguments), **options)
        _thread.in_verb = True
        try:
            with record_function(title) as record:
                call = normal(self, *map(_ready, arguments), **options)
                record._call_end_callbacks_on_future(call.end())
        finally:
            _thread.in_verb = False
        return call

    return verb


def _collective(method: Callable[..., Call]) -> Callable[..., Call]:
    """Make a verb, which passes on calls with tensors that another backend of the group is for.

    It has each name that the class gives it, since its own is the one to pass on.
    """
    return cast("Callable[..., Call]", _Collective(_verb(method)))


class _Collective:
    """A method of a class that is not made yet."""

    def __init__(self, verb: Callable[..., Call]) -> None:
        self._verb = verb

    def __set_name__(self, owner: type, name: str) -> None:
        own = self._verb

        @wraps(own)
        def collective(self: "MpiProcessGroup", *arguments: Any, **options: Any) -> Any:
            other = self.other_backends.of_call(arguments)
            if other is None:
                return own(self, *arguments, **options)
            return getattr(other, name)(*map(_ready, arguments), **options)

        setattr(owner, name, collective)


def _called_from(functions: Collection[CodeType]) -> bool:
    """Return whether one of torch's functions has called the verb that calls this, or nearly so."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code in functions:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code in functions


def _ready(value: Any) -> Any:
    """Return an argument with tensors that have arrived."""
    if isinstance(value, AsyncCollectiveTensor):
        return value.wait()
    return [*map(_ready, value)] if isinstance(value, list | tuple) else value


# torch's methods have several signatures, of which the functions of torch.distributed use one.
@untraced
class MpiProcessGroup(cast("Any", ProcessGroup)):  # type: ignore[misc]
    """A process group of torch over MPI. Construction is local.

    `store` is of this group alone, and `timeout` that of other backends beside this one.

    Calls of one group must come in one order on all of its ranks, messages between two ranks aside;
    ranks that disagree about a call raise one error, which names both calls. Results are in the
    caller's tensors when the returned work has been waited for. Tensors that are not contiguous are
    copied, and so are those of a GPU for verbs that `zero.Collectives` lacks. Each group takes
    tensors of the CPU and of this rank's GPU. Collectives of a device for which torch was given
    another backend are that backend's; messages between two ranks are all of this one.

    The methods have the names and arguments of torch's own, whose lists hold one tensor but for
    `allreduce` and `broadcast`. They raise ValueError for tensors whose sizes or dtypes do not fit.
    torch's profiler sees each call from its start to its end.
    """

    supports_coalescing = supports_splitting = False  # as torch asks the backend of a device

    def __init__(
        self,
        collectives: WorldCollectives,
        messages: Messages,
        store: Store,
        timeout: timedelta,
    ) -> None:
        super().__init__(collectives.rank, collectives.size)
        self.other_backends = OtherBackends(self, store, timeout)
        self._store = store
        self._rank, self._size = collectives.rank, collectives.size
        # For those who wait at once, and do the work themselves; for those who go on; and for a
        # backward pass, which waits at its end.
        self._collectives, self._messages = collectives.replace(wakes=False), messages
        self._going_on = collectives.replace(wakes=True)
        self._in_backward = self._going_on.replace(gathers=True)
        self._starts: dict[tuple[str, bool, bool], WorldCollectives] = {}  # by label, and who waits
        self._shut = False
        self._name = self._description = ""

    # What torch asks of a group.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return NAME

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self._size

    def _get_backend_name(self) -> str:
        """Return gloo's name without a GPU: by it torch's sharded tensors stay on the CPU."""
        return NAME if torch.cuda.is_available() else dist.Backend.GLOO

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch has given the group."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the description that torch has given the group."""
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Keep the name that torch gives the group."""
        self._name = name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802 - torch's name
        """Keep the description that torch gives the group."""
        self._description = text

    def get_group_store(self) -> Store:
        """Return the group's store."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has started in the group."""
        return self._collectives.started

    getRank, getSize = rank, size  # noqa: N815 - torch's names
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> Any:
        other = self.other_backends.of(device.type)
        return self if other is None else other._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes, which FSDP and checkpoints ask for.

        None before torch knows the group: to one that names any, torch 2.15 adds what needs C++.
        """
        if self not in _world.pg_map:
            return []
        gpu = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *gpu]

    def shutdown(self) -> None:
        """Refuse later calls, and end receives that no message has come for. Local.

        The communicators are freed with the world, which waits for all that was called.
        """
        self._shut = True
        self._messages.end(_DESTROYED)
        self.other_backends.shutdown()

    abort = shutdown

    # Collectives.

    @_collective
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Call:
        """Combine tensors over all ranks, in place; a sparse one by SUM, which coalesces it."""
        if tensors[0].is_sparse:
            return self._sparse_sum(tensors, opts)
        flat, copies = _joined(tensors)
        work, before = self._combine(flat, opts)
        return Call([work], list(tensors), [*before, *copies])

    allreduce_coalesced = allreduce

    @_collective
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Call:
        """Combine tensors over all ranks, in place on the root; others keep theirs."""
        (tensor,) = tensors
        result = tensor.detach().reshape(-1).clone()
        root = self._root(opts)
        work, copies = self._combine(result, opts, f"reduce to rank {root}")
        if self._rank == root:
            copies.append((tensor, result))
        return Call([work], [tensor], copies)

    @_collective
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Call:
        """Copy the root's tensors to all ranks, in place."""
        flat, copies = _joined(tensors)
        root = self._root(opts)
        return Call([self._start(opts).broadcast(flat, root)], list(tensors), copies)

    @_collective
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Call:
        """Copy every rank's tensor to the output of its number; sizes of ranks may differ."""
        calls = [self._gather(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return _call_of(calls, [row for rows in outputs for row in rows])

    @_collective
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Call:
        """Copy every rank's tensors to the list of outputs of its number."""
        self._expect_number(outputs, "lists of outputs")
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    @_collective
    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Call:
        """Copy every rank's tensor to its part of the output, in the order of ranks."""
        return self.all_gather_single_coalesced([output], [own], opts)

    @_collective
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Call:
        """Gather several tensors, each as `all_gather_single` does."""
        pairs = zip(outputs, inputs, strict=True)
        return _call_of([self._gather_whole(*pair, opts) for pair in pairs], list(outputs))

    def _gather_whole(self, output: Tensor, own: Tensor, opts: Any) -> Started:
        _expect_one_dtype([output, own])
        if output.numel() != own.numel() * self._size:
            raise ValueError(
                f"an output of {output.numel()} elements for {self._size} ranks with {own.numel()} "
                "each: give one of their product"
            )
        if self._in_order and _in_place(output):
            flat = output.detach().view(-1)
            flat.view(self._size, -1)[self._rank].copy_(own.detach().reshape(-1))
            return self._start(opts).all_gather(flat), []
        whole = output if _in_place(output) else output.new_empty(output.shape)
        rows = whole.detach().view(self._size, -1).unbind()
        work, copies = self._gather(rows, own, opts)
        return work, [*copies, (output, whole)]

    def _gather(self, rows: Sequence[Tensor], own: Tensor, opts: Any) -> Started:
        self._expect_number(rows, "outputs")
        _expect_one_dtype([*rows, own])
        _expect_fit(own, rows[self._rank], "this rank's output")
        bounds = [0, *accumulate(rows[rank].numel() for rank in self._owners)]
        flat = own.new_empty(bounds[-1])
        parts = [flat[low:high] for low, high in pairwise(bounds)]
        parts[self._slot].copy_(own.detach().reshape(-1))
        copies = [(rows[rank], part) for rank, part in zip(self._owners, parts, strict=True)]
        return self._start(opts).all_gather(flat, bounds), copies

    @_collective
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Call:
        """Combine every rank's inputs; each rank gets those of its number. Sizes may differ."""
        calls = [self._scatter_sum(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return _call_of(calls, list(outputs))

    @_collective
    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Call:
        """Combine every rank's input; each rank gets its part of it, in the order of ranks."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    @_collective
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Call:
        """Combine several tensors, each as `reduce_scatter_single` does."""
        for output, whole in zip(outputs, inputs, strict=True):
            if whole.numel() != output.numel() * self._size:
                raise ValueError(
                    f"an input of {whole.numel()} elements for {self._size} ranks that get "
                    f"{output.numel()} each: give one of their product"
                )
        parts = [whole.detach().reshape(self._size, -1).unbind() for whole in inputs]
        return self.reduce_scatter(outputs, parts, opts)

    def _scatter_sum(self, output: Tensor, parts: Sequence[Tensor], opts: Any) -> Started:
        self._expect_number(parts, "inputs")
        _expect_one_dtype([output, *parts])
        _expect_fit(output, parts[self._rank], "this rank's input")
        operation = _operation(opts)
        flats = [part.detach().reshape(-1) for part in parts]
        if operation in SUMS and output.dtype in SUMMED:
            flat = torch.cat([flats[rank] for rank in self._owners])
            if operation == ReduceOp.AVG:
                flat.div_(self._size)
            bounds = [0, *accumulate(len(flats[rank]) for rank in self._owners)]
            work = self._start(opts, _summed(operation)).reduce_scatter(flat, bounds)
            own = flat[bounds[self._slot] : bounds[self._slot + 1]]
            return work, [(output, own)]
        verbs.check(operation, output.dtype)
        flats = [flat.to("cpu", copy=True) for flat in flats]
        result = torch.empty_like(flats[self._rank])

        def steps(comm: Communicator, tags: Sequence[int]) -> Steps[None]:
            result.copy_((yield from verbs.reduce_parts(comm, flats, operation, tags[0])))

        sizes = [len(flat) for flat in flats]
        work = self._exchange(
            f"reduce_scatter {_name(operation)} of {sizes}", output.dtype, steps, opts
        )
        return work, [(output, result)]

    @_collective
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Call:
        """Send each input to the rank of its number, and receive each output. Sizes may differ."""
        return _call_of([self._swap(outputs, inputs, opts)], list(outputs))

    def _swap(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
        what: str = "all_to_all",
    ) -> Started:
        self._expect_number(outputs, "outputs")
        self._expect_number(inputs, "inputs")
        _expect_one_dtype([*outputs, *inputs])
        sent = [_apart(_on_host(it), outputs) for it in inputs]
        received = [_like_on_host(it) for it in outputs]

        def steps(comm: Communicator, tags: Sequence[int]) -> Steps[None]:
            return verbs.exchange(comm, sent, received, tags[0])

        work = self._exchange(what, inputs[0].dtype, steps, opts)
        return work, list(zip(outputs, received, strict=True))

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_lengths: Sequence[int],
        input_lengths: Sequence[int],
        opts: Any = None,
    ) -> Call:
        """Send parts of the input, cut in its first dimension, and receive those of the output."""
        target = output if _in_place(output) else output.new_empty(output.shape)
        outputs = self._cut(target.detach(), output_lengths, "output")
        work, copies = self._swap(outputs, self._cut(whole, input_lengths, "input"), opts)
        return Call([work], [output], [*copies, (output, target)])

    @_collective
    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Call:
        """Copy every rank's tensor to the output of its number on the root."""
        root, (own,) = self._root(opts), inputs
        nothing = own.new_empty(0)
        rows = [*outputs[0]] if self._rank == root else []
        for row in rows:
            _expect_fit(own, row, "an output")
        received = rows if self._rank == root else [nothing] * self._size
        sent = [own if rank == root else nothing for rank in range(self._size)]
        work, copies = self._swap(received, sent, opts, f"gather of {own.numel()} to rank {root}")
        return Call([work], rows, copies)

    @_collective
    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Call:
        """Copy each input of the root to the output of the rank of its number."""
        root, (own,) = self._root(opts), outputs
        nothing = own.new_empty(0)
        rows = [*inputs[0]] if self._rank == root else []
        for row in rows:
            _expect_fit(own, row, "an input")
        sent = rows if self._rank == root else [nothing] * self._size
        received = [own if rank == root else nothing for rank in range(self._size)]
        work, copies = self._swap(
            received, sent, opts, f"scatter of {own.numel()} from rank {root}"
        )
        return Call([work], [own], copies)

    @_collective
    def barrier(self, opts: Any = None) -> Call:
        """Wait for all ranks of the group."""
        token = torch.zeros(1, dtype=torch.float32, device="cpu")
        return Call([self._start(opts, "barrier").all_reduce(token)], [token])

    # Older torch's names of the same.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Messages between two ranks.

    @_verb
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Call:
        """Send a tensor to a rank of the group."""
        (tensor,) = tensors
        self._check_open()
        self._check_peer(peer)
        work = self._messages.send(_on_host(tensor), peer, tag, wake=not _called_from(_BLOCKING))
        return Call([work], [tensor], to_one=True)

    @_verb
    def recv(self, tensors: Sequence[Tensor], peer: int | None, tag: int = 0) -> Call:
        """Receive a tensor, of the size that is sent, from a rank of the group."""
        (tensor,) = tensors
        self._check_open()
        self._check_peer(peer)
        data = _like_on_host(tensor)
        work, message = self._messages.receive(data, peer, tag, wake=not _called_from(_BLOCKING))
        return Call([work], [tensor], [(tensor, data)], message, to_one=True)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Call:
        """Receive a tensor from any rank of the group, which `source_rank` of the work returns."""
        return self.recv(tensors, None, tag)

    # Within the group.

    @property
    def _owners(self) -> tuple[int, ...]:
        return self._collectives.owners

    @property
    def _slot(self) -> int:
        return self._collectives.slot(self._rank)

    @property
    def _in_order(self) -> bool:
        """Return whether shards lie in the order of ranks."""
        return self._owners == tuple(range(self._size))

    def _check_open(self) -> None:
        if self._shut:
            raise RuntimeError(f"{_DESTROYED}: no communication after that")

    def _check_peer(self, peer: int | None) -> None:
        if peer is not None and not 0 <= peer < self._size:
            raise ValueError(
                f"rank {peer} is not in a group of {self._size}: give 0 to {self._size - 1}"
            )

    def _root(self, opts: Any) -> int:
        """Return the root of a call. Raises ValueError for one that is in no place of the group."""
        root: int = opts.rootRank
        self._check_peer(root)
        return root

    def _start(self, opts: Any, label: str = "") -> WorldCollectives:
        """Return the collectives for one call, whose caller may wait for it at once.

        Ranks compare the `label`, for what the call alone does not tell.
        """
        self._check_open()
        waits = opts is not None and not opts.asyncOp
        in_backward = not waits and _called_from(_BACKWARD) and not in_inner_backward()
        key = label, waits, in_backward
        if key not in self._starts:
            goes_on = self._in_backward if in_backward else self._going_on
            self._starts[key] = (self._collectives if waits else goes_on).named(label)
        return self._starts[key]

    def _combine(self, flat: Tensor, opts: Any, label: str = "") -> Started:
        """Start to combine a flat tensor over all ranks, in place."""
        operation = _operation(opts)
        if operation in SUMS and flat.dtype in SUMMED:
            if operation == ReduceOp.AVG:
                flat.div_(self._size)
            label = ", ".join(filter(None, [label, _summed(operation)]))
            return self._start(opts, label).all_reduce(flat), []
        verbs.check(operation, flat.dtype)
        host = flat.cpu()

        def steps(comm: Communicator, tags: Sequence[int]) -> Steps[None]:
            return verbs.all_reduce(comm, host, operation, tags)

        what = f"{label or 'all_reduce'} {_name(operation)} of {flat.numel()}"
        return self._exchange(what, flat.dtype, steps, opts), [(flat, host)]

    def _sparse_sum(self, tensors: Sequence[Tensor], opts: Any) -> Call:
        """Start to sum a sparse tensor over all ranks, in place: each sends its elements to all."""
        (tensor,) = tensors
        operation = _operation(opts)
        if operation != ReduceOp.SUM:
            raise ValueError(f"{operation} of a sparse tensor: take SUM, or dense tensors")
        own, size = tensor.detach().cpu().coalesce(), self._size
        parts = [own.indices(), own.values()]

        def make(indices: Tensor, values: Tensor) -> Tensor:
            options: Any = {"size": tensor.shape, "check_invariants": False}
            return torch.sparse_coo_tensor(indices, values, **options, device="cpu")

        wide = sum_dtype(tensor.dtype)
        total = make(parts[0][:, :0], parts[1][:0].to(wide))

        def steps(comm: Communicator, tags: Sequence[int]) -> Steps[None]:
            counts = yield from small_messages.gather_objects(comm, own._nnz(), tags[0])
            found = []
            for part in parts:
                axis = part.ndim - 1 if part is parts[0] else 0  # that of the elements
                shapes = [(*part.shape[:axis], count, *part.shape[axis + 1 :]) for count in counts]
                found.append([part.new_empty(shape) for shape in shapes])
                flat = [part.reshape(-1)] * size
                yield from verbs.exchange(comm, flat, [it.view(-1) for it in found[-1]], tags[1])
            for indices, values in zip(*found, strict=True):
                total.add_(make(indices, values.to(wide)))
            total.copy_(total.coalesce())  # in place

        what = f"all_reduce of {list(tensor.shape)}, sparse in {own.sparse_dim()} dimensions,"
        work = self._exchange(what, tensor.dtype, steps, opts)
        return Call([work], list(tensors), [(tensor, total)])

    def _exchange(self, what: str, dtype: torch.dtype, verb: VerbSteps, opts: Any) -> Work:
        """Start a verb of messages, which gets two tags."""

        def steps(comm: Communicator, ticket: Ticket) -> Steps[None]:
            yield from verb(comm, comm.tags(ticket.digest, 2)[1])

        return self._start(opts).exchange(steps, f"{what} {dtype}")

    def _expect_number(self, tensors: Sequence[object], what: str) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{len(tensors)} {what} for {self._size} ranks: give one for each")

    def _cut(self, tensor: Tensor, lengths: Sequence[int], what: str) -> list[Tensor]:
        """Return the parts of a tensor in its first dimension, equal ones by default."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not lengths and rows % self._size:
            raise ValueError(f"the {what} has {rows} rows for {self._size} ranks: give their sizes")
        cut = list(lengths) or [rows // self._size] * self._size
        if len(cut) != self._size or sum(cut) != rows:
            raise ValueError(f"{what} parts of {cut} rows for {rows} rows and {self._size} ranks")
        return list(tensor.split(cut))


def refuse_fp16_hook_in_cpp() -> None:
    """Let DDP raise ValueError for its built-in FP16_COMPRESS on tensors of these groups.

    It takes futures whose value is a list of tensors in C++. Python can only make such ones that
    are completed, and gives all others a Python object, at which the hook ends in an assertion.
    """
    ddp = cast("Any", DistributedDataParallel)
    register = ddp._register_builtin_comm_hook

    def checked(model: Any, hook: BuiltinCommHookType) -> None:
        group = model.process_group
        own = isinstance(group, MpiProcessGroup) and group._get_backend(model.device) is group
        if own and hook == BuiltinCommHookType.FP16_COMPRESS:
            raise ValueError(
                f"FP16_COMPRESS takes futures made in C++, which backend {NAME} has not: give "
                "model.register_comm_hook(group, default_hooks.fp16_compress_hook), with "
                "default_hooks of torch.distributed.algorithms.ddp_comm_hooks"
            )
        register(model, hook)

    ddp._register_builtin_comm_hook = checked


def _call_of(calls: Sequence[Started], outputs: list[Tensor]) -> Call:
    return Call([work for work, _ in calls], outputs, [pair for _, them in calls for pair in them])


def _operation(opts: Any) -> ReduceOp.RedOpType:
    return ReduceOp.SUM if opts is None else opts.reduceOp.op


def _name(operation: ReduceOp.RedOpType) -> str:
    return str(operation).rpartition(".")[2]


def _summed(operation: ReduceOp.RedOpType) -> str:
    """Return the label of a sum that is made in place: ranks divide before it."""
    return "average" if operation == ReduceOp.AVG else ""


def _in_place(tensor: Tensor) -> bool:
    """Return whether the engine can write to a tensor itself."""
    lazy = tensor.is_neg() or tensor.is_conj()
    return tensor.is_contiguous() and not lazy and not tensor.is_inference()


def _joined(tensors: Sequence[Tensor]) -> tuple[Tensor, Copies]:
    """Return one flat tensor, and the copies back, of which there are none if it is in place."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"tensors of {tensors[0].dtype}, and one of {tensor.dtype} and {tensor.layout}: "
                "give dense ones of one dtype"
            )
    if len(tensors) == 1 and _in_place(tensors[0]):
        return tensors[0].detach().view(-1), []
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    return flat, list(zip(tensors, parts, strict=True))


def _on_host(tensor: Tensor) -> Tensor:
    """Return flat contiguous host memory with a tensor's values: its own if that is possible.

    Of a column `reshape` alone makes a view with a stride, of an expanded number one of stride 0.
    """
    if _in_place(tensor) and tensor.is_cpu:
        return tensor.detach().view(-1)
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()


def _apart(sent: Tensor, received: Sequence[Tensor]) -> Tensor:
    """Return a copy of what is sent if it shares memory with what is received, or else itself."""
    start = sent.untyped_storage().data_ptr()
    shared = any(it.untyped_storage().data_ptr() == start for it in received)
    return sent.clone() if shared else sent


def _like_on_host(tensor: Tensor) -> Tensor:
    """Return flat host memory to receive into: the tensor's own if that is possible."""
    if _in_place(tensor) and tensor.is_cpu:
        return tensor.detach().view(-1)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")


def _expect_one_dtype(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError for outputs and inputs that have two dtypes: a copy would cast them."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"tensors of {tensors[0].dtype} and {tensor.dtype}: give outputs and inputs of one "
                "dtype"
            )


def _expect_fit(own: Tensor, other: Tensor, what: str) -> None:
    if own.numel() != other.numel():
        raise ValueError(
            f"{what} has {other.numel()} elements, and the tensor {own.numel()}: give as many"
        )
