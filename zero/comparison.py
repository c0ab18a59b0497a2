"""Comparison of what must be the same on all ranks of a step: groups' numbers, and gradients.

Each rank adds digests of them to a message that a step sends anyway. Only if these differ, ranks
gather what is behind them, and all raise one error that names the rank and both values.

After some steps, the digest is also of all bits of the weights: of trained parameters, of
parameters of the model that no optimizer trains, and at stage 0 of master weights. Buffers are not
compared: each step overwrites them with those of the first rank; those that are not in the model's
state dict, which are constants in most models, only if a digest of them differs.
"""

import math
import time
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero.collectives import AllRanksError, Collectives, gather_objects
from zero.gradients.weights import DIGEST_BITS
from zero.kernels import checksum, without_repeats
from zero.layout import Bucket
from zero.param_groups import hyperparameters
from zero.parameter_watch import dense_parts, is_trained
from zero.shard import OptimizerShard, ParamGroup
from zero.step_message import StepMessage

SAMPLED = 16  # elements of a gradient, in each step others
STRIDE = 7919  # a prime, by which the sampled elements move from step to step
PLAIN = str | Real | torch.dtype  # options, and attributes of options, that ranks share
LARGEST = 64  # elements of a tensor in a group that is compared
TOLERANCE = 1e-4  # relative, of gradients: processors of other types round differently

ABSENT = "nothing"
# What to do where ranks differ in the steps, the groups, the parameters or the gradients.
LOAD_ALIKE = "call optimizer.load_state_dict on all ranks"
GROUPS_ALIKE = (
    "change parameter groups alike on all ranks, such as by a scheduler that gets the mean loss "
    "over all of them"
)
PARAMETERS_ALIKE = (
    "change parameters alike on all ranks, such as by load_state_dict or requires_grad"
)
FACTORS_ALIKE = "give all ranks the same number, such as by world.mean"
GRADIENTS_ALIKE = "do the same to p.grad on all ranks"
TRAIN_OR_FREEZE = (
    "no optimizer of all ranks trains it, so its gradient is that of each rank alone: give it to "
    "world.optimizer, or freeze it by requires_grad_(False)"
)


class DifferentWeightsError(AllRanksError, RuntimeError):
    """Error for weights that differ between ranks, and must not. Raised by every rank alike."""


Place = tuple[int, str]  # the number of a group, and a key of it
Samples = tuple[dict[str, int], Tensor]  # how many are of each gradient, by name; one by one


class Fact(NamedTuple):
    """One value of a rank at the beginning of a step."""

    value: Any = ABSENT  # or a list of samples, if they may differ by a tolerance
    fix: str = GROUPS_ALIKE  # what to do where ranks differ
    tolerance: float = 0.0  # of samples, relative to the larger one
    floor: float = 1.0  # a sample counts as no smaller than this part of the largest
    place: Place | None = None  # of a number, which also other replicas have
    own: bool = False  # whether the torch optimizer changes the number by itself


class Report(NamedTuple):
    """Facts of a rank, by the words for each."""

    rank: int
    replica: int
    facts: dict[str, Fact]
    weights: Mapping[str, int]  # checksums by parameter, if the step compares them
    processor: str  # what decides how the rank rounds


def expect_alike(ranks: Collectives, values: Mapping[str, object], fix: str) -> None:
    """Compare small picklable values, by the words for each. Collective.

    Raises ValueError on all ranks for the first that differs, which ends with what to do.
    """
    facts = {what: Fact(value, fix) for what, value in values.items()}
    reports = gather_objects(ranks, Report(ranks.rank, 0, facts, {}, ""))
    if difference := _difference(reports, frozenset()):
        raise ValueError(difference)


def describe_model(
    model: nn.Module, options: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Return what ranks must share: of each option, and of each tensor of a model."""
    tensors = [
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + ("" if tensor.requires_grad else " frozen")
        + ("" if tensor.is_contiguous() else f" of strides {tensor.stride()}")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    return {name: _describe_option(option) for name, option in options.items()}, tensors


def _describe_option(option: object) -> object:
    """Return plain options and None as they are, and others by class and what all ranks share."""
    if option is None or isinstance(option, PLAIN):
        return option
    attributes = getattr(option, "__dict__", {}).items()
    plain = [(n, v) for n, v in attributes if isinstance(v, PLAIN) and n[0] != "_"]
    return f"{type(option).__qualname__}({', '.join(f'{n}={v!r}' for n, v in plain)})"


def describe_optimizer(
    make: "partial[torch.optim.Optimizer]", groups: Iterable[dict[str, Any]]
) -> list[str]:
    """Return what ranks must have in common, one a line: what is called, options and names.

    `groups` are named groups, whose options take the place of those of `make`. Options other than
    numbers, strings, None and lists of them are left out.
    """
    named = list(groups)
    numbers = numbers_in([{**make.keywords, **hyperparameters(group)} for group in named])
    return [
        getattr(make.func, "__qualname__", type(make.func).__qualname__),
        *(f"{key}={value!r} in group {place}" for (place, key), value in numbers),
        *(f"{name} in group {place}" for place, g in enumerate(named) for name, _ in g["params"]),
    ]


def numbers_in(groups: Iterable[dict[str, Any]]) -> Iterator[tuple[Place, Any]]:
    """Yield the numbers, strings, None and lists of them in groups, with their places.

    Tensors of a few elements count as the numbers in them.
    """
    for place, group in enumerate(groups):
        for key, value in group.items():
            if key == "params":
                continue
            if value is None or isinstance(value, str | Real):
                yield (place, key), value
                continue
            found = value
            if isinstance(value, Tensor):
                found = value.tolist() if value.numel() <= LARGEST else []
            parts = found if isinstance(found, list | tuple) else [found]
            if all(part is None or isinstance(part, str | Real) for part in parts):
                yield (place, key), found


def _digest_of_samples(samples: Iterable[Samples]) -> int:
    """Return a digest of the leading bits of all samples. Waits for the device."""
    rounded = [_real(found).bfloat16() for _, found in samples]
    if not rounded:
        return 0
    rounded = [part.to(rounded[0].device) for part in rounded]
    return zlib.crc32(torch.cat(rounded).view(torch.int16).cpu().numpy().tobytes())


def _by_name(samples: Iterable[Samples]) -> dict[str, list[float]]:
    return {
        name: _real(part).tolist()
        for counts, found in samples
        for name, part in zip(counts, found.split([*counts.values()]), strict=True)
    }


def _real(found: Tensor) -> Tensor:
    return torch.view_as_real(found).flatten() if found.is_complex() else found


class StepComparison:
    """Comparison of the ranks that share the optimizer's state when a step begins."""

    def __init__(self, owned: OptimizerShard, rank: int, replica: int, every: int) -> None:
        self._owned, self._rank, self._replica = owned, rank, replica
        self._every = every  # steps between comparisons of all bits of the weights: see `_due`
        self._summed: tuple[int, int] | None = None  # the latest step of one, and its digest
        self._over_replicas: int | None = None  # the latest step of one over all replicas
        self._unlike = False  # whether ranks round differently, so that bits say nothing
        self.checks, self.checks_s = 0, 0.0  # such comparisons, and the seconds that they took
        self._places: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by bucket
        self._begun_anew = 0
        self.gradient_factor = 1.0  # by which the gradient of the step was multiplied
        self.own_limit: float | None = None  # of the norm of each rank's own gradient
        self._numbers: dict[Place, Any] = {}  # of the groups, when the step began
        self._own: set[Place] = set()  # numbers that the torch optimizer has changed by itself
        # Untrained parameters with a gradient, and counts of their changes before the last step.
        self._left: dict[str, Parameter] = {}
        self._versions: dict[str, int] = {}
        self._changed = False  # whether one of them was since
        self._warned = False  # of such
        self.constant = False  # whether ranks had equal buffers beside those of the state dict

    def put(self, message: StepMessage, without: frozenset[str], step: int) -> None:
        """Put digests of all numbers, and of what is updated, for `alike`. Local."""
        frozen = [name for name, p in self._owned.named.items() if not p.requires_grad]
        words = [str(self._begun_anew), *sorted(without), "", *sorted(frozen)]
        words += repr(self.gradient_factor), repr(self.own_limit)
        if self._changed and not self._unlike:
            words += map(str, self._bits_of_left().values())
        updated = zlib.crc32(",".join(words).encode())
        if self._due(step):
            updated += self._digest_of_weights(step)
        if not self._owned.sharded:
            updated += _digest_of_samples(self._gradients(step))
        _, buffers = self._owned.watch.buffers()
        constants = int(checksum([*map(without_repeats, buffers)])) if buffers else 0
        digests = {
            "numbers": _digest(self._numbers),
            "updated": updated,
            "constants, low": constants & 0xFFFFFFFF,
            "constants, high": constants >> 32 & 0xFFFFFFFF,
        }
        for name, digest in digests.items():
            message.put_same(name, partial(_bits, digest, step))

    def _due(self, step: int) -> bool:
        """Return whether ranks compare all bits of the weights after so many steps.

        After none, 1, 2, 4, 8, and so on, and from `every` on after each multiple of it.
        """
        first = step < self._every and step & (step - 1) == 0
        return bool(self._every) and (first or step % self._every == 0)

    def alike(self, message: StepMessage) -> bool:
        """Return whether ranks had equal digests in a message that was read; note `constant`."""
        self.constant = message.same("constants, low") and message.same("constants, high")
        return message.same("numbers") and message.same("updated")

    def begin_step(self, groups: Iterable[ParamGroup]) -> None:
        """Note the numbers of groups, and which parameters ranks may train each for itself. Local.

        Such a parameter has a gradient, and no optimizer of all ranks trains it. If it was changed
        since the step before, ranks compare it in this step. Warns once, on rank 0, of such a
        gradient, unless an optimizer of all ranks had trained the parameter until this one was
        made.
        """
        self._numbers = dict(numbers_in(groups))
        watch = self._owned.watch
        found = {n: p for n, p in watch.others.items() if p.requires_grad and p.grad is not None}
        found = {name: p for name, p in found.items() if not is_trained(p)}
        before, self._versions = self._versions, {n: p._version for n, p in found.items()}
        self._changed = any(before.get(n, now) != now for n, now in self._versions.items())
        self._left = found
        new = [name for name in found if name not in watch.left]
        if new and not self._warned and self._rank == 0:
            self._warned = True
            warnings.warn(
                f"{_first(new)} of the model has a gradient, and {TRAIN_OR_FREEZE}", stacklevel=9
            )

    def _bits_of_left(self) -> dict[str, int]:
        """Return digests of all bits of untrained parameters with a gradient, by name."""
        return {
            name: int(checksum([part for _, part in dense_parts(name, parameter)]))
            for name, parameter in self._left.items()
        }

    def put_of_replica(
        self, message: StepMessage, groups: Iterable[ParamGroup], step: int, *, in_sync: bool
    ) -> None:
        """Put a digest for other replicas, "replica". Local; gradients and states differ.

        Their weights are alike where they are `in_sync`, which may be in few steps.
        """
        digest, last = _digest(dict(numbers_in(groups)), self._own), self._over_replicas
        if self._every and in_sync and (last is None or step - last >= self._every):
            self._over_replicas = step
            digest += self._digest_of_weights(step)
        message.put_same("replica", partial(_bits, digest, step))

    def compare(
        self,
        ranks: Collectives,
        groups: Sequence[ParamGroup],
        without: frozenset[str],
        step: int,
        *,
        in_sync: bool,
        all_ranks: bool = True,
    ) -> None:
        """Gather what ranks have, after digests have differed. Collective over `ranks`.

        Raises DifferentWeightsError on all of them for weights if they are `all_ranks`, and
        RuntimeError for what else must not differ.
        """
        facts = self._facts(groups, without, step)
        weights = self._bits_of_left()
        if self._summed is not None and self._summed[0] == step:
            compared = *self._owned.named.items(), *self._untrained(), *self._masters()
            weights |= {name: int(checksum([tensor])) for name, tensor in compared}
        devices = {parameter.device for parameter in self._owned.named.values()}
        rounds = " ".join(processor(device) for device in devices)
        own = Report(self._rank, self._replica, facts, weights, rounds)
        reports = gather_objects(ranks, own)
        self._own |= {f.place for r in reports for f in r.facts.values() if f.own and f.place}
        exact = [
            report._replace(facts={n: f for n, f in report.facts.items() if not f.tolerance})
            for report in reports
        ]
        if difference := _difference(exact, self._own):
            raise RuntimeError(difference)
        found = _differing_weights(reports, in_sync=in_sync)
        if found:
            difference = _tell_weights(found)
            if found.keys() & self._left.keys():
                difference = f"{difference}; {TRAIN_OR_FREEZE}"
            kinds = {report.processor for report in reports}
            # Shards are those of their owners, whatever processors the ranks have.
            if len(kinds) == 1 or (self._owned.sharded and found.keys() & self._owned.named.keys()):
                error = DifferentWeightsError if all_ranks else RuntimeError
                raise error(f"after step {step}, {difference}")
            self._unlike = True
            if self._rank == reports[0].rank:
                warnings.warn(
                    f"after step {step}, {difference}. Their processors or threads are not alike "
                    f"({', '.join(sorted(kinds))}), which may round differently: from here on, "
                    "weights are not compared",
                    stacklevel=2,
                )
        if difference := _difference(reports, self._own):
            raise RuntimeError(difference)

    def _digest_of_weights(self, step: int) -> int:
        """Return a digest of all bits of the weights. Waits for the device."""
        if self._unlike:
            return 0
        if self._summed is None or self._summed[0] != step:
            start, owned = time.perf_counter(), self._owned
            trained: Iterable[Tensor] = owned.named.values()
            if owned.sharded:
                trained = map(owned.parameters.flat, range(len(owned.buckets)))
            others = [part for _, part in [*self._untrained(), *self._masters()]]
            total = int(checksum([*trained, *others]))
            self._summed = step, zlib.crc32(total.to_bytes(8, "little", signed=True))
            self.checks += 1
            self.checks_s += time.perf_counter() - start
        return self._summed[1]

    def _untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the memory of parameters that no optimizer trains, by name."""
        for name, parameter in self._owned.watch.untrained().items():
            yield from dense_parts(name, parameter)

    def _masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the master weights that all ranks hold."""
        for owned in () if self._owned.sharded else self._owned.with_master:
            yield f"the master weights of {owned.piece.spec.name}", owned.tensor

    def _facts(
        self, groups: Iterable[ParamGroup], without: frozenset[str], step: int
    ) -> dict[str, Fact]:
        """Return what this rank has, in the order in which differences are told."""
        facts = {
            "the optimizer's number of steps": Fact(step, LOAD_ALIKE),
            "the number of loaded states": Fact(self._begun_anew, LOAD_ALIKE),
            "the factor of clip_grad_norm_ and scale_gradients_": Fact(
                self.gradient_factor, FACTORS_ALIKE
            ),
            "the max_norm of clip_each_rank": Fact(self.own_limit, FACTORS_ALIKE),
        }
        for place, value in numbers_in(groups):
            key = f"{place[1]} in group {place[0]}"
            facts[key] = Fact(value, place=place, own=place in self._own)
        sharded, names = self._owned.sharded, self._owned.named
        for name, parameter in names.items():
            facts[f"requires_grad of {name}"] = Fact(parameter.requires_grad, PARAMETERS_ALIKE)
        for name in names:
            facts[f"p.grad of {name}"] = Fact("none" if name in without else "one", GRADIENTS_ALIKE)
        if not sharded:
            eps = {
                e.spec.name: torch.finfo(b.dtype).eps
                for b in self._owned.buckets
                for e in b.entries
            }
            for name, found in _by_name(self._gradients(step)).items():
                limit = max(TOLERANCE, 1.5 * eps[name])
                facts[f"the gradient of {name}"] = Fact(found, GRADIENTS_ALIKE, limit, 1e-3)
        return facts

    def after_update(self, groups: Iterable[ParamGroup]) -> None:
        """Note which numbers the torch optimizer has changed since the step began. Local."""
        before = self._numbers
        for place, value in numbers_in(groups):
            known = before.get(place, ABSENT)
            if value is not known and not _same(value, known):
                self._own.add(place)

    def _gradients(self, step: int) -> Iterator[Samples]:
        """Yield a few elements of every gradient at stage 0; a step takes others than the last."""
        owned = self._owned
        for index, bucket in enumerate(owned.buckets):
            (flat,) = owned.gradients.kept(index)
            if index not in self._places:
                self._places[index] = _places(bucket, flat.device)
            start, offset, size = self._places[index]
            counts = {e.spec.name: min(e.numel, SAMPLED) for e in bucket.entries}
            yield counts, flat.index_select(0, start + (offset + step * STRIDE) % size)

    def begin_anew(self) -> None:
        """Note that a state was loaded, or parameters were added, which all ranks do. Local."""
        self._versions = {}
        self._begun_anew += 1


def _digest(given: Mapping[Place, Any], without: Set[Place] = frozenset()) -> int:
    numbers, texts = array("d"), []
    for place, value in given.items():
        if place in without:
            continue
        for part in value if isinstance(value, list | tuple) else (value,):
            if part is None or isinstance(part, str):
                texts.append(str(part))
            elif isinstance(part, Real):
                numbers.append(float(part))
    return zlib.crc32(",".join(texts).encode(), zlib.crc32(numbers.tobytes()))


def _bits(digest: int, step: int) -> float:
    """Return 16 bits of a digest, in each step others."""
    return float((digest * (2 * step + 1) & 0xFFFFFFFF) >> (32 - DIGEST_BITS))


def _places(bucket: Bucket, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the start, first offset and size of the parameter of each sample."""
    rows = [
        (entry.start, sample * entry.numel // min(entry.numel, SAMPLED), entry.numel)
        for entry in bucket.entries
        for sample in range(min(entry.numel, SAMPLED))
    ]
    start, offset, size = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3).unbind(1)
    return start.to(device), offset.to(device), size.to(device)


def _difference(reports: Sequence[Report], own: Set[Place]) -> str:
    """Return a sentence about the first difference between ranks; an empty one if there is none.

    Replicas have the numbers of groups in common, but for those that the torch optimizer changes
    by itself, in which ranks may round differently.
    """
    firsts = {report.replica: report for report in reversed(reports)}
    for what in dict.fromkeys(what for report in reports for what in report.facts):
        place = next(r.facts[what].place for r in reports if what in r.facts)
        for report in reports:
            common = place is not None and place not in own
            first = reports[0] if common else firsts[report.replica]
            fact, other = (each.facts.get(what) or Fact() for each in (report, first))
            here, there = other.value, fact.value
            if place in own and isinstance(here, Real) and isinstance(there, Real):
                fact, here, there = fact._replace(tolerance=TOLERANCE), [here], [there]
            if found := _differing_values(here, there, fact):
                here, there = found
                return (
                    f"{what} differs between ranks: rank {first.rank} has {here}, "
                    f"rank {report.rank} has {there}: {fact.fix}"
                )
    return ""


Sides = list[list[int]]  # ranks with equal weights, by the first rank of each side


def _differing_weights(reports: Sequence[Report], *, in_sync: bool) -> dict[str, list[Sides]]:
    """Return which ranks have which weights, by parameter, and if these differ.

    Those of a replica are compared, or if replicas are `in_sync`, all.
    """
    found: dict[str, list[Sides]] = {}
    if not all(report.weights for report in reports):
        return found
    for replica in {0} if in_sync else {report.replica for report in reports}:
        alike = [report for report in reports if in_sync or report.replica == replica]
        common = set.intersection(*(set(report.weights) for report in alike))
        for name in filter(common.__contains__, alike[0].weights):
            sides: dict[int, list[int]] = {}
            for report in alike:
                sides.setdefault(report.weights[name], []).append(report.rank)
            if len(sides) > 1:
                found.setdefault(name, []).append([*sides.values()])
    return found


def _tell_weights(found: Mapping[str, Sequence[Sides]]) -> str:
    """Return a sentence that names the odd ranks, or all where no side is the largest."""
    odd = set[int]()
    between = ""
    for sides in (each for of_name in found.values() for each in of_name):
        most = max(map(len, sides))
        largest = [side for side in sides if len(side) == most]
        if most > 1 and len(largest) == 1:
            odd.update(rank for side in sides if side is not largest[0] for rank in side)
        else:
            between = between or " against ".join(map(_ranks, sides))
    return (
        f"the weights differ between ranks: {between or f'{_ranks(odd)} against the others'}, "
        f"first in {_first([*found])}: {PARAMETERS_ALIKE}"
    )


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _ranks(ranks: Iterable[int]) -> str:
    shown = sorted(ranks)
    return f"{'ranks' if len(shown) > 1 else 'rank'} {', '.join(map(str, shown))}"


def processor(device: torch.device) -> str:
    """Return what decides how a device rounds: its kind, and the threads of a CPU."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    kind = known.get("cpu_name", ""), torch.backends.cpu.get_cpu_capability()
    return f"{' '.join(kind)} with {torch.get_num_threads()} threads".strip()


def _differing_values(here: Any, there: Any, fact: Fact) -> tuple[Any, Any] | None:
    """Return two values that differ, or of samples the first that do by more than the tolerance."""
    if not fact.tolerance:
        return None if _same(here, there) else (here, there)
    largest = max((abs(v) for v in [*here, *there] if math.isfinite(v)), default=0.0)
    for one, other in zip(here, there, strict=True):
        limit = fact.tolerance * max(abs(one), abs(other), fact.floor * largest)
        finite = math.isfinite(one) and math.isfinite(other)
        if not (_same(one, other) or (finite and abs(one - other) <= limit)):
            return f"{one:g}", f"{other:g}"
    return None


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, list | tuple) and isinstance(there, list | tuple):
        return len(here) == len(there) and all(map(_same, here, there))
    both_nan = all(isinstance(value, float) and math.isnan(value) for value in (here, there))
    return bool(here == there) or both_nan
