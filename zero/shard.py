"""The slices of parameters that this rank updates at a ZeRO stage, and their fp32 master weights.

    stage   gradients             optimizer state   parameters   traffic of a step
    0       all, summed           all               all          all-reduce
    1       all; shard summed     shard             all          reduce-scatter + all-gather
    2       shard                 shard             all          reduce-scatter a micro-batch
                                                                 + all-gather

An all-reduce is a reduce-scatter and an all-gather, so stage 1 moves the bytes of stage 0.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020 (arXiv 1910.02054).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zero.collectives import AllRanksError, Collectives, gather_objects
from zero.gradients.buckets import BucketGradients, BucketsInTurns
from zero.gradients.single_rank import LocalGradients
from zero.kernels import power_sum, rescale, view
from zero.layout import Bucket, ParameterSlice
from zero.memory import Memory
from zero.nested import tensors_in
from zero.parameter_watch import ParameterWatch
from zero.parameters import FlatParameters
from zero.precision import is_16_bit, master_dtype, narrower

ParamGroup = dict[str, Any]
NEAR_UNITS = 8  # in the last place, by which a script may change a parameter without replacing it


class NonFiniteGradientError(AllRanksError, ArithmeticError):
    """The gradient holds an infinity or a NaN. Raised by every rank alike; nothing was updated."""


@dataclass(frozen=True)
class OwnedSlice:
    """A slice of a parameter that this rank updates, as the torch optimizer sees it."""

    piece: ParameterSlice
    index: int  # of its bucket
    offset: int  # of its first element in the owned part of the bucket
    parameter: Parameter
    home: Tensor  # the slice in the parameter's memory
    tensor: Tensor  # what the torch optimizer updates: `home`, or its master weights
    published: torch.dtype  # to which master weights are rounded in `home`

    @property
    def has_master(self) -> bool:
        """True if there are master weights."""
        return self.tensor is not self.home

    def rounded(self) -> Tensor:
        """Return the values that master weights have in the parameter."""
        return self.tensor.to(self.published).to(self.home.dtype)

    def in_shape(self, flat: Tensor) -> Tensor:
        """Return a view of a flat tensor of the slice's elements, in the slice's shape."""
        return view(flat, 0, self.parameter) if self.piece.whole else flat

    def flattened(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the slice's shape as a flat one: a view, or a copy if needed."""
        if not self.piece.whole or (tensor.is_contiguous() and self.parameter.is_contiguous()):
            return tensor.reshape(-1)
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        view(flat, 0, self.parameter).copy_(tensor)
        return flat


class OptimizerShard:
    """The parameter slices that this rank owns, in the order of buckets, with master weights.

    At stage 0 a rank owns all parameters, from stage 1 on its shard of every bucket of `sharding`.
    A single rank shards nothing. A parameter that is owned whole keeps its shape, and is updated
    itself unless it has master weights; a slice of one is flat. Parameters of 16 bits have fp32
    master weights, without which updates below half a unit in the last place would be lost. So have
    those that travel in a narrower `gather_dtype` from stage 1 on, since they are rounded after an
    update. Slices and master weights share the `__dict__` of their parameter, since optimizers may
    read attributes that a script sets.
    """

    def __init__(
        self,
        stage: int,
        sharding: Collectives,
        model: nn.Module | None,
        gather_dtype: torch.dtype | None,
        *,
        overlap_forward: bool,
        alone: bool,
    ) -> None:
        self.stage, self.sharding = (stage if sharding.size > 1 else 0), sharding
        self.sharded = self.stage > 0  # a rank owns some elements only
        self.gather_dtype = gather_dtype if stage else None
        self.slot = sharding.slot(sharding.rank)
        self.gradients: BucketGradients | LocalGradients = LocalGradients()
        if not alone:
            buckets = BucketsInTurns if self.stage == 2 else BucketGradients
            self.gradients = buckets(sharding, self.stage)
        waiting = model if overlap_forward else None
        self.parameters = FlatParameters(sharding, waiting, self.gather_dtype)  # empty at stage 0
        self.watch = ParameterWatch(model)
        self.buckets: list[Bucket] = []
        self.pieces: list[OwnedSlice] = []
        self.with_master: list[OwnedSlice] = []  # of them
        # Those of 16 bits, whose gradient is widened; and of the others, those whose gradient is
        # not that of a parameter, as it lies in `p.grad`.
        self._widened: list[OwnedSlice] = []
        self._apart: list[OwnedSlice] = []
        self._exact: list[int] = []  # buckets whose gradients are not widened
        self._rounded = False  # whether parameters were rounded master weights until now
        self._shards: list[tuple[int, ParameterSlice]] = []  # of this rank, with their buckets
        self.named: dict[str, Parameter] = {}  # all trained ones, in the order of forward
        self._names: dict[Parameter, str] = {}
        self.owned_whole: dict[Tensor, Tensor] = {}  # by parameter: what is updated of it
        self.updates_parameters = self.stage == 0  # the torch optimizer does, themselves
        # By the first parameter of a group: an element beside its tensors, and its parameters.
        self._stand_ins: dict[Parameter, tuple[Tensor, list[Parameter]]] = {}

    def updated(self, tensor: Tensor) -> Tensor:
        """Return what is updated of a parameter that is owned whole; any other tensor as it is.

        Raises RuntimeError for a parameter of which this rank updates a part, or nothing.
        """
        if tensor in self.owned_whole:
            return self.owned_whole[tensor]
        if self.sharded and isinstance(tensor, Parameter) and tensor in self._names:
            raise RuntimeError(
                f"the optimizer's state of {self._names[tensor]} is sharded at stage {self.stage}, "
                "and not whole on this rank: on all ranks, change what optimizer.state.values() "
                "has, or load a changed full_state_dict()"
            )
        return tensor

    def forget_rounding(self) -> None:
        """State that parameters were loaded: master weights become their values, if they differ."""
        self._rounded = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the torch optimizer updates on this rank."""
        return [owned.tensor for owned in self.pieces]

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Own this rank's part of more buckets, of parameters by name. Collective.

        From stage 1 on, the parameters become views of flat memory.
        """
        self._rounded = False
        flats: Sequence[Tensor | None] = [None] * len(buckets)
        if self.sharded:
            flats = self.parameters.add(buckets, parameters)
        for bucket, flat in zip(buckets, flats, strict=True):
            self._own(bucket, parameters, flat)
        self.parameters.count_uses()
        self.watch.add(parameters, flat=self.sharded)
        self.named |= parameters
        self._names |= {parameter: name for name, parameter in parameters.items()}

    def groups(self, groups: Iterable[ParamGroup]) -> list[ParamGroup]:
        """Return groups of parameters as groups of the tensors that this rank updates.

        From stage 1 on, each has one element more, with a gradient of 0 if any of its parameters
        has one: some optimizers count their steps by group, and pass over a group without tensors.
        """
        by_parameter: dict[Parameter, list[Tensor]] = {}
        for owned in self.pieces:
            by_parameter.setdefault(owned.parameter, []).append(owned.tensor)
        made = []
        for group in groups:
            tensors = [t for p in group["params"] for t in by_parameter.get(p, [])]
            if self.sharded and group["params"]:
                tensors.append(self._stand_in(group["params"]))
            made.append({**group, "params": tensors})
        return made

    def _stand_in(self, parameters: list[Parameter]) -> Tensor:
        first = parameters[0]
        if first not in self._stand_ins:
            dtype = master_dtype(first.dtype, self.gather_dtype) or first.dtype
            tensor = torch.ones([1] * first.dim(), dtype=dtype, device=first.device)
            self._stand_ins[first] = tensor, list(parameters)
        return self._stand_ins[first][0]

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the means of this rank's shards, slice by slice, with parameter names.

        The same slices at every stage, so that the norm has the same bits.
        """
        for index, piece in self._shards:
            yield piece.spec.name, self.gradients.reduced(index, piece)

    def powers(self, p: float) -> Tensor:
        """Return the sum of p-th powers of the mean in this rank's shards, or the maximum. Local.

        In fp64, so a norm depends on the number of ranks by rounding only. Does not wait for the
        device.
        """
        return power_sum((part for _, part in self.shards()), p)

    def find_non_finite(self, group: Collectives, rank: int, flag: float | Tensor) -> str:
        """Describe which parameters are not finite, and on which ranks, alike on all. Collective.

        `flag` is the sum of `nan_unless_finite` of this rank's own gradients, and `rank` the number
        by which the text calls this rank.
        """
        local_names = {name for name, part in self.shards() if not bool(part.isfinite().all())}
        local_finite = bool(flag == 0) if group.size > 1 else not local_names
        reports = gather_objects(group, (rank, local_names, local_finite))
        found = set().union(*(of_rank for _, of_rank, _ in reports))
        ranks = ", ".join(str(other) for other, _, finite in reports if not finite)
        if not found:
            return "finite everywhere, but its powers overflow"
        shown = [name for name in self.named if name in found]
        shown[5:] = [f"and {len(shown) - 5} more"] if len(shown) > 5 else []
        where = f"on rank {ranks}" if ranks else "where the sum over ranks overflows"
        return f"not finite in {', '.join(shown)}, {where}"

    def full_gradient(self, name: str, parameter: Parameter) -> Tensor:
        """Return a new tensor with the mean gradient of a parameter. Collective if sharded."""
        places = (
            (i, e) for i, b in enumerate(self.buckets) for e in b.entries if e.spec.name == name
        )
        index, entry = next(places)
        if self.sharded:
            bucket, (kept,) = self.buckets[index], self.gradients.kept(index)
            start, stop = bucket.shard(self.slot)
            dtype = torch.promote_types(bucket.dtype, torch.float32)
            flat = torch.empty(bucket.numel, dtype=dtype, device=kept.device)
            flat[start:stop] = kept
            self.sharding.all_gather(flat, bucket.bounds).wait()
            flat = flat[entry.start : entry.stop].clone()
        else:
            mean = self.gradients.reduced(index, entry)
            flat = mean.to(torch.promote_types(mean.dtype, torch.float32), copy=True)
        return view(flat, 0, parameter)

    def wait(self) -> None:
        """Wait for parameters in flight. Raises RuntimeError if any was changed or replaced."""
        if self.sharded:
            self.parameters.wait()
        self.watch.check()

    @torch.no_grad()
    def take_changes(self) -> None:
        """Let master weights follow parameters that were changed since `publish`. Local.

        A value that differs by a few units in its last place, as after a decay or noise of the
        script's own, changes the master weight by as much: replaced, it would lose what is less
        than the parameter's dtype tells, and many small updates would never add up. Any other, as
        of a load, replaces it. Waits for parameters in flight, and if there are master weights, for
        the device.
        """
        if self.sharded:
            self.parameters.wait()
        changed = [owned.home != owned.rounded() for owned in self.with_master]
        if changed and bool(torch.stack([mask.any() for mask in changed]).any()):
            for owned, mask in zip(self.with_master, changed, strict=True):
                master, wide = owned.tensor, owned.home.to(owned.tensor.dtype)
                if self._rounded:
                    rounded = owned.rounded().to(master.dtype)
                    change, unit = wide - rounded, torch.finfo(owned.published).eps
                    near = change.abs() <= NEAR_UNITS * unit * rounded.abs()
                    wide = torch.where(near, master + change, wide)
                master.copy_(torch.where(mask, wide, master))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the master weights into the parameters, and send shards to other ranks. Collective.

        The all-gathers are in flight on return.
        """
        for owned in self.with_master:
            exact = owned.published == owned.home.dtype
            owned.home.copy_(owned.tensor if exact else owned.rounded())
        self._rounded = True
        if self.sharded:
            self.parameters.launch()

    @contextmanager
    def gradients_set(self, unused: Collection[str]) -> Iterator[None]:
        """Return a context in which the `grad` of every tensor is its mean, if of fp32 or wider.

        Slices of parameters in `unused` have None, so that the torch optimizer skips them. Nothing
        is set where `p.grad` is the mean already. Does not wait for a device, which may still
        compute them.
        """
        changed = self._apart + self._widened
        before = [owned.tensor.grad for owned in changed]
        for owned in self._apart:
            self._set(owned, self.gradients.reduced(owned.index, owned.piece), unused)
        for tensor, parameters in self._stand_ins.values():
            used = any(self._names[parameter] not in unused for parameter in parameters)
            tensor.grad = torch.zeros_like(tensor) if used else None
        try:
            yield
        finally:
            for owned, gradient in zip(changed, before, strict=True):
                owned.tensor.grad = gradient

    @torch.no_grad()
    def scale_gradients(self, factor: float, unused: Collection[str]) -> None:
        """Multiply the means of `gradients_set` by a factor; widen 16-bit ones, and set these."""
        if factor != 1:
            rescale([t for index in self._exact for t in self.gradients.kept(index)], factor)
        wide: dict[int, Tensor] = {}
        for owned in self._widened:
            if owned.index not in wide:
                wide[owned.index] = self.gradients.widened(owned.index, factor)
            part = wide[owned.index][owned.offset : owned.offset + owned.piece.numel]
            self._set(owned, part, unused)

    def memory(self, state: Mapping[Tensor, Mapping[str, Any]]) -> Memory:
        """Return the bytes held on this rank, at the peak, with the torch optimizer's `state`."""
        kept = [tensor for own in self.tensors for tensor in tensors_in(state.get(own))]
        kept += tensors_in([each for key, each in state.items() if not isinstance(key, Tensor)])
        return Memory(
            parameters=sum(parameter.nbytes for parameter in self._names),
            gradients=self.gradients.peak_bytes,
            buckets=self.gradients.working_bytes + self.parameters.gather_bytes,
            master=sum(owned.tensor.nbytes for owned in self.with_master),
            state=sum(tensor.nbytes for tensor in kept),
        )

    @torch.no_grad()
    def _own(
        self, bucket: Bucket, parameters: Mapping[str, Parameter], flat: Tensor | None
    ) -> None:
        """Own a part of the next bucket, whose parameters lie in `flat` unless owned whole."""
        start, stop = bucket.shard(self.slot) if self.sharded else (0, bucket.numel)
        master = None
        if dtype := master_dtype(bucket.dtype, self.gather_dtype):
            device = parameters[bucket.entries[0].spec.name].device
            master = torch.empty(stop - start, dtype=dtype, device=device)
            self.updates_parameters = False
        published = narrower(self.gather_dtype, bucket.dtype) or bucket.dtype
        index = len(self.buckets)
        for piece in bucket.pieces(start, stop):
            parameter = parameters[piece.spec.name]
            home: Tensor = parameter
            if not piece.whole:
                assert flat is not None, "parameters that are not flat are owned whole"
                home = flat[piece.start : piece.stop]
            tensor, offset = home, piece.start - start
            if master is not None:
                tensor = master[offset : offset + piece.numel]
                tensor = view(tensor, 0, parameter) if piece.whole else tensor
                tensor.copy_(home)
            if tensor is not parameter:  # so a later `p.lr_mult = 0.1` counts, too
                tensor.__dict__ = parameter.__dict__
            owned = OwnedSlice(piece, index, offset, parameter, home, tensor, published)
            self.pieces.append(owned)
            if master is not None:
                self.with_master.append(owned)
            if is_16_bit(bucket.dtype):
                self._widened.append(owned)
            elif self.sharded or master is not None:
                self._apart.append(owned)
            if piece.whole:
                self.owned_whole[parameter] = tensor
        self._shards += [(index, piece) for piece in bucket.pieces(*bucket.shard(self.slot))]
        if not is_16_bit(bucket.dtype):
            self._exact.append(index)
        self.buckets.append(bucket)

    def _set(self, owned: OwnedSlice, part: Tensor, unused: Collection[str]) -> None:
        owned.tensor.grad = None if owned.piece.spec.name in unused else owned.in_shape(part)


def update_alone(optimizer: torch.optim.Optimizer) -> None:
    """Let a torch optimizer step, without the hooks for the steps of all optimizers. Local."""
    hooks: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [[*each.items()] for each in hooks]
    for each in hooks:
        each.clear()
    try:
        optimizer.step()
    finally:
        for each, items in zip(hooks, kept, strict=True):
            each.update(items)
