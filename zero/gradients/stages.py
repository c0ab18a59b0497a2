"""Memory in which gradients are summed over ranks, and what `parameter.grad` is meanwhile.

A reduction of gradients is one backward, with those that `no_sync` left to it (stages 0 and 1), or
one micro-batch (stage 2). For each parameter, `take` moves its gradient into its bucket; then
`flat` and `launched` are called for the bucket. `finish` makes means of the sums. From then on the
means are held until `clear`, and further backward passes add to them:

    stage   parameter.grad when backward has returned     in a further backward
    0       the mean over ranks                           accumulates, and is reduced again
    1, 2    an `UnavailableGradient`                      `set_aside` keeps the means meanwhile

A parameter whose `grad` was set to None in between starts anew, as in torch.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork, wait_all
from zero.kernels import copy_scaled, in_memory_order, own_view, pack, rescale, sum_dtype, view
from zero.layout import Bucket, ParameterSlice
from zero.precision import is_16_bit

IN_FLIGHT = 1  # buckets of stage 2 that are reduced while others are filled


class UnavailableGradient(Tensor):
    """Stands for a gradient of which each rank keeps a shard, in `parameter.grad`. Has no values.

    Any operation on it raises RuntimeError with one sentence that names the alternatives, so that
    nothing reads a part of a gradient for the whole. It may be replaced by None, as `zero_grad`
    does, and autograd may accumulate into it, once in a backward: the new gradient is then
    `arrived`.
    """

    arrived: Tensor | None
    task: int  # autograd's number of the latest backward that has made the gradient
    _name: str
    _message: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: Parameter, name: str, stage: int) -> "UnavailableGradient":
        """Return a gradient for a parameter, without memory."""
        self: UnavailableGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self.arrived, self.task, self._name = None, -1, name
        self._message = (
            f"the gradient of {name} is sharded over ranks (stage {stage}): use "
            "optimizer.clip_grad_norm_, optimizer.scale_gradients_, or "
            "optimizer.full_gradient(parameter), loss_scale= for a GradScaler, and "
            "optimizer.zero_grad(); or stage 0"
        )
        return self

    def outlive(self) -> None:
        """Say, from now on, that the optimizer of this gradient is closed."""
        self.arrived = None
        self._message = (
            f"the gradient of {self._name} is of an optimizer that is closed, and was sharded or "
            "not reduced: call model.zero_grad() before the next backward or step"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Keep what autograd adds; raise RuntimeError for anything else."""
        leaves = tree_leaves((args, kwargs))
        own: UnavailableGradient = next(x for x in leaves if isinstance(x, UnavailableGradient))
        accumulates = func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
        # Later in a backward, a hook of the user's adds.
        if (
            accumulates
            and args[0] is own
            and torch._C._current_graph_task_id() not in {-1, own.task}
        ):
            arrived: Tensor = args[1].detach()  # it may have a graph of its own
            own.arrived = arrived if own.arrived is None else own.arrived.add_(arrived)
            return own  # type: ignore[no-any-return]
        raise RuntimeError(own._message)

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(self._message)

    tolist = numpy = item = __float__ = __bool__ = refuse

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Return the sentence that other uses raise."""
        return f"<{self._message}>"


class Gradients:
    """The gradients of this rank's parameters, summed over ranks: stage 0, with flat buckets.

    At the first backward parameters have no gradients, so autograd hands over its own tensor, which
    is copied and scaled into the bucket in one pass; zeroing and accumulating would be three. Later
    micro-batches accumulate in place. `parameter.grad` is a view of the bucket.

    Between `finish` and `clear`, the means of what this rank keeps are `held`. Kept tensors are
    flat, and have the elements of a parameter in the order in which it lies in memory.
    """

    hides = True  # whether `take` hides a gradient from autograd and the user until `finish`

    _owner: int | None = None  # the slot of the shard that this rank keeps; None for all

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._aside: dict[int, Tensor] = {}  # kept means of earlier reductions, by bucket
        self._aside_names: set[str] = set()
        self.held = False
        self.peak_bytes = 0  # the most that gradients occupied outside of working tensors
        self.working_bytes = 0  # of working tensors
        self._memory: list[Tensor] = []  # of each bucket; longer than it by the padding
        self._views: dict[str, Tensor] = {}  # gradients by parameter name
        self._shown: dict[str, ReferenceType[Tensor]] = {}  # aliases of them in `parameter.grad`
        self._wide_bytes: dict[int, int] = {}  # of fp32 gradients that do not fit into `_memory`
        self._wide: dict[int, Tensor] = {}  # those that have replaced the 16-bit ones
        self._works: list[Work] = []

    # The memory of buckets.

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate memory for more buckets, of parameters by name. Collective.

        A gradient that a parameter has counts as assigned.
        """
        self._buckets.extend(buckets)
        self._parameters.update(parameters)
        self._allocate(buckets, parameters)
        self._note_peak()

    def _allocate(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        for bucket in buckets:
            device = parameters[bucket.entries[0].spec.name].device
            # At stage 1, half of a 16-bit bucket fits in fp32.
            padding = 0 if self._owner is None else bucket.numel % 2 * is_16_bit(bucket.dtype)
            memory = self._collectives.allocate(bucket.numel + padding, bucket.dtype, device)
            self._memory.append(memory)
            for entry in bucket.entries:
                name = entry.spec.name
                self._views[name] = own_view(memory, entry.start, parameters[name])

    def begin(self) -> None:
        """Prepare for the first gradient of a reduction."""
        self._wide.clear()

    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Move a parameter's gradient into its bucket, times `scale`; 0 gives zeros for any values.

        Returns the scaled gradient, or None where there was none: that contributes zeros.
        """
        place, gradient = self._place(index, entry), self.pop(entry.spec.name)
        if gradient is not place:
            return copy_scaled(place, gradient, scale)
        rescale([place], scale)  # it has accumulated there
        return place

    def _place(self, index: int, entry: ParameterSlice) -> Tensor:
        return self._views[entry.spec.name]

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Keep a parameter's gradient for the reduction that a later backward finishes. Local."""
        self.take(index, entry, 1.0)
        self._parameters[entry.spec.name].grad = self._published(entry.spec.name)

    def flat(self, index: int) -> Tensor:
        """Return the flat gradients of a bucket, of which every gradient was taken."""
        return self._memory[index][: self._buckets[index].numel]

    def own(self) -> list[Tensor]:
        """Return this rank's gradients of all buckets, taken and not launched. Views."""
        return [self.flat(index) for index in range(len(self._buckets))]

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction of a bucket, to which its flat gradients belong from now on.

        Advance the one before, so that the second collective of a chain overlaps backward, too. The
        first one of a hook between nodes stays in the node, and is over soon.
        """
        before = self._works[-1] if self._works else None
        self._works.append(work)
        if isinstance(before, ChainedWork):
            before.advance()

    def wait(self) -> None:
        """Wait for every reduction."""
        works, self._works = self._works, []
        wait_all(works)

    def kept(self, index: int) -> Tensor:
        """Return the sums or means of a bucket that this rank keeps. A view."""
        if index in self._wide:
            return self._wide[index]
        return self.flat(index)[slice(*self._range(index))]

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return the mean of a slice that this rank keeps. Flat; a view."""
        start = piece.start - self._range(index)[0]
        return self.kept(index)[start : start + piece.numel]

    def widened(self, index: int, factor: float) -> Tensor:
        """Return all that this rank keeps of a 16-bit bucket, in fp32 and times a factor. Flat.

        It overwrites `kept` if it fits into the bucket.
        """
        memory, kept = self._memory[index], self.kept(index)
        size = kept.numel() * torch.float32.itemsize
        if size <= memory.nbytes:
            wide = memory.view(torch.uint8)[:size].view(torch.float32)
            kept = kept.clone()
            self._wide[index] = wide
        else:
            wide = torch.empty_like(kept, dtype=torch.float32)
            self._wide_bytes[index] = size
            self._note_peak(sum(self._wide_bytes.values()))
        pack(kept, factor, wide)
        return wide

    @property
    def _bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def _note_peak(self, beside: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self._bytes + beside)

    def _range(self, index: int) -> tuple[int, int]:
        bucket = self._buckets[index]
        return (0, bucket.numel) if self._owner is None else bucket.shard(self._owner)

    # Means, and the `grad` of parameters.

    def set_aside(self) -> None:
        """Keep held means apart from a coming reduction, to whose result `finish` adds them."""
        if not self.held:
            return
        self.held = False
        for index, bucket in enumerate(self._buckets):
            names = {entry.spec.name for entry in bucket.entries}
            gone = {name for name in names if not self.keeps(name)}
            if gone == names:
                continue
            self._aside[index] = self.kept(index).clone()
            low = self._range(index)[0]
            for piece in bucket.pieces(*self._range(index)):
                if piece.spec.name in gone:
                    self._aside[index][piece.start - low : piece.stop - low].zero_()
            self._aside_names |= names - gone
        self._note_peak(sum(tensor.nbytes for tensor in self._aside.values()))

    @torch.no_grad()
    def finish(self, factor: float, unused: Collection[str], of_held: float = 1.0) -> None:
        """Wait for the sums, multiply them by a factor, and hold them.

        Means that were held before are added, times `of_held`. `parameter.grad` becomes what the
        module's table says; None for names in `unused`.
        """
        self.wait()
        self.scale_(factor)
        for index, mean in self._aside.items():
            self.kept(index).add_(mean, alpha=of_held)
        self._aside.clear()
        for name, parameter in self._parameters.items():
            absent = name in unused and name not in self._aside_names
            parameter.grad = None if absent else self._published(name)
        self._aside_names.clear()
        self.held = True

    @torch.no_grad()
    def collect(self) -> frozenset[str]:
        """Take over what was done to `parameter.grad` since `finish`. Local.

        Returns the names of parameters whose `grad` is None. Raises RuntimeError for a gradient
        that was assigned at stages 1 and 2.
        """
        places = [(i, e) for i, bucket in enumerate(self._buckets) for e in bucket.entries]
        return frozenset(e.spec.name for i, e in places if not self._adopt(i, e))

    def void(self) -> None:
        """Drop what `parameter.grad` holds of an earlier mean at stage 0. Local."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply the held means by a factor, after `collect`."""
        rescale([self.kept(index) for index in range(len(self._buckets))], factor)

    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients: every `p.grad` becomes None, or stands for zeros if wanted."""
        self.wait()
        self.forget()
        for name, parameter in self._parameters.items():
            absent = set_to_none or parameter.grad is None
            parameter.grad = None if absent else self._published(name)
        if not set_to_none:
            self.scale_(0)
            self.held = True

    def forget(self) -> None:
        """Forget what is kept, after every `p.grad` was dropped."""
        self._aside.clear()
        self._aside_names.clear()
        self.held = False
        self.begin()

    def close(self, unfinished: Collection[str]) -> None:
        """Leave `parameter.grad` to others, who are refused what is no gradient of a whole batch.

        `unfinished` are the names of parameters with a gradient that was not reduced.
        """
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and name in unfinished:
                parameter.grad = UnavailableGradient(parameter, name, 0)
            if isinstance(parameter.grad, UnavailableGradient):
                parameter.grad.outlive()

    @property
    def all_dropped(self) -> bool:
        """True if means are held, and every `p.grad` of them was dropped."""
        return self.held and not any(map(self.keeps, self._parameters))

    @property
    def exist(self) -> bool:
        """True if any parameter has a gradient."""
        return not all(map(self.dropped, self._parameters))

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still what this object has made of it."""
        return self._alias(name) is self._parameters[name].grad is not None

    def dropped(self, name: str) -> bool:
        """Return whether a parameter's `grad` is None."""
        return self._parameters[name].grad is None

    def has_gradient(self, entry: ParameterSlice) -> bool:
        """Return whether a parameter has a gradient to take, which the user may have assigned."""
        return not self.dropped(entry.spec.name)

    def pop(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, or its place if it is there; hide it until `finish`."""
        parameter, kept = self._parameters[name], self.keeps(name)
        gradient, parameter.grad = parameter.grad, None
        if kept:
            return self._views[name]
        shown = self._shown.pop(name, None)
        held = shown() if shown is not None else None
        if held is not None:  # by the user, to whom the last gradient is left, as in torch
            held.data = held.clone()
        return gradient

    def put(self, name: str, gradient: Tensor) -> None:
        """Give a parameter a gradient to take, after `set_aside`; adds to one that it has."""
        before = self.pop(name)
        self._parameters[name].grad = gradient if before is None else before + gradient

    def _published(self, name: str) -> Tensor:
        """Return what `parameter.grad` becomes in `finish`."""
        alias = self._alias(name)
        if alias is None:
            alias = self._views[name].detach()
            self._shown[name] = ref(alias)
        return alias

    def _alias(self, name: str) -> Tensor | None:
        """Return the last gradient shown, unless it is gone, or `p.grad.data = t` has moved it."""
        shown = self._shown.get(name)
        alias = shown() if shown is not None else None
        return alias if alias is not None and alias.is_set_to(self._views[name]) else None

    def _adopt(self, index: int, entry: ParameterSlice) -> bool:
        """Take over a parameter's `grad`; return False if it is None."""
        name = entry.spec.name
        if not self.keeps(name) and self.take(index, entry, 1.0) is not None:  # the user's own
            self._parameters[name].grad = self._published(name)
        return not self.dropped(name)


class RefusedGradients(Gradients):
    """The same for stage 1: a rank keeps its shard of a bucket, and `parameter.grad` refuses."""

    def __init__(self, collectives: Collectives, stage: int = 1) -> None:
        super().__init__(collectives)
        self._owner, self._stage = collectives.slot(collectives.rank), stage
        self._unavailable: dict[str, UnavailableGradient] = {}  # by parameter name

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate memory for more buckets, of parameters by name. Collective."""
        super().add(buckets, parameters)
        for name, parameter in parameters.items():
            self._unavailable[name] = UnavailableGradient(parameter, name, self._stage)

    def begin(self) -> None:
        """Set held means aside, and prepare for the first gradient of a reduction."""
        self.set_aside()
        super().begin()

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Keep a parameter's gradient for the reduction that a later backward finishes. Local."""
        self._unavailable[entry.spec.name].arrived = self.take(index, entry, 1.0)

    def forget(self) -> None:
        """Forget what is kept and what has arrived, after every `p.grad` was dropped."""
        super().forget()
        for unavailable in self._unavailable.values():
            unavailable.arrived = None

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still the refusal."""
        return self._parameters[name].grad is self._unavailable[name]

    def has_gradient(self, entry: ParameterSlice) -> bool:
        """Return whether a parameter has a gradient to take: arrived, or assigned by the user."""
        name = entry.spec.name
        arrived = self._unavailable[name].arrived is not None
        return arrived if self.keeps(name) else not self.dropped(name)

    def pop(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, and refuse it to later hooks of this backward."""
        parameter, unavailable = self._parameters[name], self._unavailable[name]
        gradient = unavailable.arrived if self.keeps(name) else parameter.grad
        parameter.grad, unavailable.arrived = unavailable, None
        unavailable.task = torch._C._current_graph_task_id()
        return gradient

    def _published(self, name: str) -> Tensor:
        return self._unavailable[name]

    def _adopt(self, index: int, entry: ParameterSlice) -> bool:
        name = entry.spec.name
        if self.dropped(name):
            for piece in self._buckets[index].pieces(*self._range(index)):
                if piece.spec.name == name:
                    self.reduced(index, piece).zero_()
        elif not self.keeps(name):
            raise RuntimeError(
                f"a gradient of {name} was assigned after backward, but at stage {self._stage} "
                "each rank keeps a shard: assign it before backward, or use stage 0"
            )
        return not self.dropped(name)


class ShardedGradients(RefusedGradients):
    """Gradient shards for stage 2, and a few working tensors in which all buckets take turns.

    A gradient is copied into its bucket's working tensor as it arrives. When the reduction has
    finished, this rank's shard is added to the kept shard, and another bucket takes the working
    tensor. Backward waits while every working tensor is in flight. If all are being filled, because
    a bucket that is next in order lacks a gradient, one more is allocated.

    The sum of one micro-batch keeps its 16-bit dtype; several are summed in fp32.
    """

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives, stage=2)
        self._shards: list[Tensor | None] = []  # kept, by bucket
        # Working tensors, of dtype uint8.
        self._filling: dict[int, Tensor] = {}
        self._in_flight: deque[tuple[int, Tensor, Work]] = deque()
        self._free: list[Tensor] = []
        self._sizes: list[int] = []  # as `working_sizes` returns them
        self._device = torch.device("cpu")  # of all parameters

    def _allocate(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate working tensors anew, for all buckets."""
        self._shards.extend(None for _ in buckets)
        self._free, self.working_bytes = [], 0
        self._sizes = working_sizes(self._buckets)
        self._device = next(iter(parameters.values())).device
        for size in self._sizes:
            self._add_working(self._collectives.allocate(size, torch.uint8, self._device))

    def _place(self, index: int, entry: ParameterSlice) -> Tensor:
        return view(self.flat(index), entry.start, self._parameters[entry.spec.name])

    def flat(self, index: int) -> Tensor:
        """Return the bucket's part of the working tensor that it is filled into."""
        if index not in self._filling:
            self._filling[index] = self._working_tensor(index)
        return self._as_bucket(index, self._filling[index])

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction; wait for older ones if they launch collectives while waited for.

        Those collectives must come at the same place in the order of launches on every rank.
        """
        self._in_flight.append((index, self._filling.pop(index), work))
        while isinstance(work, ChainedWork) and len(self._in_flight) > IN_FLIGHT:
            self._finish_oldest()

    def wait(self) -> None:
        """Wait for every reduction."""
        wait_all([work for _, _, work in self._in_flight])
        while self._in_flight:
            self._finish_oldest()

    def kept(self, index: int) -> Tensor:
        """Return the kept shard of a bucket; zeros if no rank had a micro-batch."""
        shard = self._shards[index]
        if shard is None:
            low, high = self._range(index)
            shard = torch.zeros(high - low, dtype=self._buckets[index].dtype, device=self._device)
            self._shards[index] = shard
        return shard

    def widened(self, index: int, factor: float) -> Tensor:
        """Return the kept shard in fp32, which replaces a 16-bit one."""
        shard = self.kept(index)
        if not is_16_bit(shard.dtype):  # the fp32 sum of several micro-batches
            rescale([shard], factor)
            return shard
        wide = torch.empty_like(shard, dtype=torch.float32)
        pack(shard, factor, wide)
        self._keep(index, wide)
        return wide

    def begin(self) -> None:
        """Begin new shards, after the reductions in flight, and free the working tensors."""
        super().begin()
        self.wait()
        self._shards = [None for _ in self._buckets]
        self._free.extend(self._filling.values())
        self._filling.clear()

    @property
    def _bytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards if shard is not None)

    def _finish_oldest(self) -> None:
        index, working, work = self._in_flight.popleft()
        work.wait()
        shard = self._as_bucket(index, working)[slice(*self._range(index))]
        kept = self._shards[index]
        total = shard.clone() if kept is None else kept.to(sum_dtype(kept.dtype)).add_(shard)
        self._keep(index, total)
        self._free.append(working)

    def _keep(self, index: int, shard: Tensor) -> None:
        self._shards[index] = shard
        self._note_peak()

    def _working_tensor(self, index: int) -> Tensor:
        """Return a free working tensor for a bucket, of undefined content."""
        usual = self._sizes[0]
        oversized = self._buckets[index].nbytes > usual
        while True:
            for place, working in enumerate(self._free):
                if (working.nbytes > usual) == oversized:
                    return self._free.pop(place)
            if self._in_flight and not isinstance(self._in_flight[0][2], ChainedWork):
                self._finish_oldest()
            else:  # not by `allocate`, which is collective: only this rank needs it
                size = self._sizes[-1] if oversized else usual
                self._add_working(torch.empty(size, dtype=torch.uint8, device=self._device))

    def _as_bucket(self, index: int, working: Tensor) -> Tensor:
        bucket = self._buckets[index]
        return working[: bucket.nbytes].view(bucket.dtype)

    def _add_working(self, working: Tensor) -> None:
        self._free.append(working)
        self.working_bytes += working.nbytes


def working_sizes(buckets: Sequence[Bucket]) -> list[int]:
    """Return the bytes of each working tensor of `ShardedGradients`: equal ones, oversized last.

    Buckets of several dtypes may be filled at a time, so there is one working tensor for each
    dtype, and one in flight. Buckets more than twice as large as those would need share one of
    their own.
    """
    sizes = sorted((bucket.nbytes for bucket in buckets), reverse=True)
    count = min(len(sizes), len({bucket.dtype for bucket in buckets}) + IN_FLIGHT)
    usual = next(size for size in sizes if size <= 2 * sizes[count - 1])
    oversized = [size for size in sizes if size > usual]
    return [usual] * min(count, len(sizes) - len(oversized)) + oversized[:1]


class LocalGradients(Gradients):
    """The gradients of one rank: `parameter.grad` is autograd's own tensor, and nothing is copied.

    With one rank the gradient is the mean already, so a scale of this rank's weight is not applied;
    a scale of 0 gives zeros. Shared memory of two gradients is separated, since both are multiplied
    in place.
    """

    hides = False

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives)
        self._addresses: dict[int, str] = {}  # of gradients in this reduction, with their names
        self._seen: dict[str, ReferenceType[Tensor]] = {}  # gradients that have been taken

    def _allocate(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate nothing."""

    def begin(self) -> None:
        """Prepare for the first gradient of a reduction."""
        self._addresses.clear()

    @torch.no_grad()
    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Leave the gradient in `parameter.grad`, dense and in the parameter's memory order."""
        name = entry.spec.name
        parameter = self._parameters[name]
        gradient = parameter.grad
        if gradient is None:
            return None
        own = in_memory_order(gradient, parameter)
        if self._addresses.setdefault(own.data_ptr(), name) != name:
            own = own.clone()
        if own is not gradient:
            parameter.grad = own
        if scale == 0:
            own.zero_()
        self._seen[name] = ref(own)
        return own

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Leave the gradient in `parameter.grad`."""
        self.take(index, entry, 1.0)

    def own(self) -> list[Tensor]:
        """Return the gradients that there are."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return a slice of the gradient; an empty tensor if there is none."""
        parameter = self._parameters[piece.spec.name]
        if parameter.grad is None:
            return parameter.new_empty(0)
        flat = parameter.grad.detach().as_strided((piece.spec.numel,), (1,))
        return flat[piece.low : piece.high]

    def widened(self, index: int, factor: float) -> Tensor:
        """Return the gradients of a bucket in fp32, in a new tensor; zeros where there is none."""
        bucket = self._buckets[index]
        device = self._parameters[bucket.entries[0].spec.name].device
        wide = torch.zeros(bucket.numel, dtype=torch.float32, device=device)
        for entry in bucket.entries:
            if self.has_gradient(entry):
                pack(self.reduced(index, entry), factor, wide[entry.start : entry.stop])
        self._wide_bytes[index] = wide.nbytes
        self._note_peak(sum(self._wide_bytes.values()))
        return wide

    @torch.no_grad()
    def set_aside(self) -> None:
        """Keep held means apart from a coming reduction."""
        if not self.held:
            return
        self.held = False
        for index, parameter in enumerate(self._parameters.values()):
            if parameter.grad is not None:
                self._aside[index], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def finish(self, factor: float, unused: Collection[str], of_held: float = 1.0) -> None:
        """Multiply the gradients by a factor, add those that were held, and hold them."""
        self.scale_(factor)
        for index, (name, parameter) in enumerate(self._parameters.items()):
            mean = self._aside.pop(index, None)
            if mean is not None:
                rescale([mean], of_held)
                parameter.grad = mean if parameter.grad is None else mean.add_(parameter.grad)
                self._seen[name] = ref(mean)
        self.held = True

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply every gradient."""
        rescale(self.own(), factor)

    @torch.no_grad()
    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients, or zero those that there are."""
        self.forget()
        self.held = not set_to_none
        for parameter in self._parameters.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still the tensor that was taken."""
        seen = self._seen.get(name)
        return seen is not None and seen() is self._parameters[name].grad is not None

    @property
    def _bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self._buckets)

    def _adopt(self, index: int, entry: ParameterSlice) -> bool:
        return self.take(index, entry, 1.0) is not None
