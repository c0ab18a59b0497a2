"""Trials on small tensors: whether a torch optimizer takes its arguments, and can be sharded.

    whole          one optimizer updates all tensors
    by element     each of three optimizers updates a third of every tensor, as flat slices
    by parameter   each of two optimizers updates every other tensor

An optimizer can be sharded if its weights and state do not depend on the cut. One that uses a norm
of a tensor fails by element; one that uses a norm of all tensors fails by parameter, too.
"""

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.layout import ParameterSpec, plan_buckets
from zero.param_groups import hyperparameters
from zero.precision import is_16_bit
from zero.prediction import OneOfSeveral
from zero.shard import OptimizerShard

STEPS = 6
# Shapes of tensors by their number of dimensions. Matrices have more than the 16 rows and the 4096
# elements from which on some optimizers factor or quantize their state.
SHAPES = ((), (401,), (96, 72), (24, 24, 9), (12, 24, 3, 3))
PARTS = {"whole": 1, "element": 3, "parameter": 2}  # optimizers that update a part each
LEAST_LR = 1e-6  # a smaller learning rate would hide what an optimizer does
TRIAL_LR = 1e-3  # in its place
TOLERANCE = 1e-4  # the relative difference up to which results count as equal

WEIGHTS = "weights"

Factory = Callable[..., torch.optim.Optimizer]
Kind = tuple[int, bool, torch.device]  # of a parameter: its dimensions, whether complex, device
SmallGroup = tuple[tuple[tuple[str, Any], ...], tuple[Kind, ...]]  # options, kinds of parameters
Results = dict[tuple[str, int], Tensor]  # flat, by description and number of the tensor or group


def check_drivable(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that needs a closure or sparse gradients. Local."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{name} needs a closure that it runs several times in a step, and a step here follows "
            "backward passes whose gradients are reduced while they run: choose another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{name} takes sparse gradients only, and gradients that are summed over ranks are "
            "dense: choose Adam"
        )


def check_arguments(
    kind: Factory,
    arguments: Mapping[str, Any],
    groups: Iterable[Mapping[str, Any]],
    *,
    leaves: bool = False,
) -> None:
    """Raise ValueError for what an optimizer refuses when it is made, or in a step. Local.

    `groups` are parameter groups with their own arguments; the parameters stay as they are. With
    `leaves`, the optimizer updates tensors that require a gradient, as at stage 0. Some arguments
    are looked at in a step only, as the number of Adam's betas.
    """
    for group in groups:
        own, tensors = hyperparameters(group), []
        for dims, dtype, device in {(p.dim(), p.dtype, p.device) for p in group["params"]}:
            wide = torch.float32 if is_16_bit(dtype) else dtype
            tensors.append(torch.zeros([2] * dims, dtype=wide, device=device, requires_grad=leaves))
            tensors[-1].grad = torch.zeros_like(tensors[-1])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer = kind([{"params": tensors, **own}], **arguments)
                if not isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
                    optimizer.step()
        except Exception as error:  # torch raises whatever its code meets
            given = ", ".join(f"{key}={value!r}" for key, value in {**arguments, **own}.items())
            reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            known = list(inspect.signature(kind).parameters.values())[1:]
            taken = ", ".join(
                p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in known
            )
            name = getattr(kind, "__name__", "the optimizer")
            raise ValueError(
                f"{name} refuses {given or 'its arguments'} ({reason}); it takes {taken}"
            ) from error


def check_partition(make: Factory, groups: Iterable[dict[str, Any]], partition: str) -> None:
    """Raise ValueError for an optimizer that would give other results if it was sharded. Local.

    `make` makes the optimizer of parameter groups; `groups` are those of the user, with pairs
    (name, parameter). The trial uses their options and the kinds of their parameters. Its result is
    kept for the next optimizer of this class, arguments and groups. Errors of the optimizer's
    constructor are raised as they are.
    """
    small, known = _small_groups(groups), make if isinstance(make, partial) else partial(make)
    key = known.func, known.args, tuple(sorted(known.keywords.items())), small, partition
    try:
        kept = isinstance(known.func, type)  # what a function does may depend on more
        problem = _outcomes().get(key) if kept else None
    except TypeError:  # of an option without a hash
        kept, problem = False, None
    if problem is None:
        problem = _problem(make, small, partition)
        if kept:
            _outcomes()[key] = problem
    if problem:
        raise ValueError(problem)


@cache
def _outcomes() -> dict[Hashable, str]:
    return {}


def _small_groups(groups: Iterable[dict[str, Any]]) -> tuple[SmallGroup, ...]:
    """Return a group for all groups whose options differ in the size of numbers only."""
    options: dict[str, dict[str, Any]] = {}
    kinds: dict[str, set[Kind]] = {}
    for group in groups:
        given = {key: value for key, value in group.items() if key not in ("params", "name")}
        rough = repr({k: bool(v) if isinstance(v, Real) else v for k, v in given.items()})
        options.setdefault(rough, given)
        found = {(p.dim(), p.is_complex(), p.device) for _, p in group["params"]}
        kinds.setdefault(rough, set()).update(found)
    return tuple(
        (tuple(given.items()), tuple(sorted(kinds[rough], key=str)))
        for rough, given in options.items()
    )


def _problem(make: Factory, groups: Sequence[SmallGroup], partition: str) -> str:
    devices = {device for _, kinds in groups for *_, device in kinds if device.type == "cuda"}
    with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the optimizer itself warns again
        optimizer, _ = SmallProblem(make, groups).part("whole", 0)
        check_drivable(optimizer)
        difference = _difference(make, groups, partition)
        if not difference:
            return ""
        by_parameter = partition == "element" and not _difference(make, groups, "parameter")
    fix = 'partition="parameter"' if by_parameter else "stage=0"
    name = type(optimizer).__name__
    return f'{name} cannot be sharded with partition "{partition}": {difference}; give {fix}'


def _difference(make: Factory, groups: Sequence[SmallGroup], partition: str) -> str:
    problem = SmallProblem(make, groups)
    try:
        whole, again = problem.run("whole"), problem.run("whole")
        if reason := _useless(whole, again):
            return reason
        found = _differing(whole, problem.run(partition))
    except Exception as error:  # an optimizer may raise anything
        return f"a trial on small tensors fails ({type(error).__name__}: {error})"
    return f"in a trial, parts get other {', '.join(found)} than the whole" if found else ""


class SmallProblem:
    """Two tensors of every kind in every group, and gradients of widely different sizes."""

    def __init__(self, make: Factory, groups: Sequence[SmallGroup]) -> None:
        self._make, self._groups = make, groups
        self._tensors: list[tuple[int, Tensor, Tensor]] = []  # group, first value, first gradient
        options: Any = {"dtype": torch.float64, "device": "cpu"}  # whatever the defaults are
        options["generator"] = torch.Generator("cpu").manual_seed(0)
        pairs = [(g, kind) for g, (_, kinds) in enumerate(groups) for kind in kinds for _ in "ab"]
        for number, (group, (dimensions, is_complex, device)) in enumerate(pairs):
            shape = SHAPES[dimensions] if dimensions < len(SHAPES) else (2,) * dimensions
            start, spread = torch.randn(2, *shape, **options)
            slope = start.sign() * torch.exp(2 * spread) * (100 if number % 2 else 0.01)
            dtype = torch.complex64 if is_complex else torch.float32
            turn = complex(1, -0.5) if is_complex else 1
            values = [(each * turn).to(device, dtype) for each in (start, slope)]
            self._tensors.append((group, values[0], values[1]))

    def part(self, partition: str, slot: int) -> tuple[torch.optim.Optimizer, OptimizerShard]:
        """Make the optimizer of a part, and what it updates, which is cut as in training."""
        size, named = PARTS[partition], dict[str, Parameter]()
        groups: list[dict[str, Any]] = [{**dict(given), "params": []} for given, _ in self._groups]
        for number, (group, start, _) in enumerate(self._tensors):
            parameter = named[str(number)] = Parameter(start.clone())
            parameter.grad = torch.zeros_like(parameter)
            groups[group]["params"].append(parameter)
        specs = [ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in named.items()]
        loads = [0] * size if partition == "parameter" else None
        plan = plan_buckets(specs, bucket_bytes=1, shards=size, loads=loads)  # one of each tensor
        ranks, alone = OneOfSeveral(size, slot), size == 1
        shard = OptimizerShard(1, ranks, None, None, overlap_forward=False, alone=alone)
        shard.add(plan, named)
        shard.gradients.add(plan, named)
        optimizer = self._make(shard.groups(groups))
        for made in optimizer.param_groups:
            rate = made.get("lr")
            if isinstance(rate, Tensor) and float(rate) < LEAST_LR:
                made["lr"] = torch.full_like(rate, TRIAL_LR)
            elif isinstance(rate, Real) and float(rate) < LEAST_LR:
                made["lr"] = TRIAL_LR
        return optimizer, shard

    def run(self, partition: str) -> Results:
        """Return the results of a few steps in which every part has an optimizer of its own."""
        found: dict[tuple[str, int], list[Tensor]] = {}
        for slot in range(PARTS[partition]):
            optimizer, shard = self.part(partition, slot)
            owned = [(int(own.piece.spec.name), own) for own in shard.pieces]
            for step in range(STEPS):
                for number, own in owned:
                    gradient = self._tensors[number][2].flatten().roll(step)
                    part = gradient[own.piece.low : own.piece.high]
                    shard.gradients.reduced(own.index, own.piece).copy_(part)
                with shard.gradients_set(frozenset()):
                    optimizer.step()
            for number, own in owned:
                start = self._tensors[number][1].flatten()[own.piece.low : own.piece.high]
                change = (own.tensor.detach().flatten() - start).cpu()
                found.setdefault((WEIGHTS, number), []).append(change)
                for key, value in _numbers(optimizer.state[own.tensor], len(start)):
                    found.setdefault((f"state {key}", number), []).append(value)
            for place, group in enumerate(optimizer.param_groups):
                for key, value in _numbers(hyperparameters(group), 1):
                    found.setdefault((f"option {key}", place), []).append(value)
        return {what: torch.cat(values) for what, values in found.items()}


def _useless(whole: Results, again: Results) -> str:
    weights = [value for (what, _), value in whole.items() if what == WEIGHTS]
    if not all(bool(value.isfinite().all()) for value in weights):
        return "it gets infinite or NaN values in a trial on small tensors"
    if _differing(whole, again):
        return "it draws random numbers, which depend on the part that a rank updates"
    if not any(bool(value.any()) for value in weights):
        return f"it updates nothing in the {STEPS} steps of a trial, so what it does is unknown"
    return ""


def _numbers(values: Mapping[str, Any], numel: int) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, flat, and numbers, repeated for every one of `numel` elements."""
    for key, value in values.items():
        if isinstance(value, Tensor) and value.numel() == numel:
            yield key, value.detach().flatten().cpu()
        elif isinstance(value, Tensor) and value.numel() > 1:
            yield f"{key} (not by element)", value.detach().flatten().cpu()
        elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel()):
            yield key, torch.full((numel,), float(value), dtype=torch.float64, device="cpu")


def _differing(whole: Results, cut: Results) -> list[str]:
    found = dict.fromkeys(what for what, _ in whole.keys() ^ cut.keys())
    for key in whole.keys() & cut.keys():
        expected, other = whole[key], cut[key]
        if expected.numel() in (1, other.numel()):
            wide = torch.promote_types(expected.dtype, torch.float64)
            pair = other.to(wide), expected.to(wide)
            limit = TOLERANCE * float(pair[1].abs().nan_to_num(posinf=0).max())
            if bool(torch.isclose(*pair, rtol=0, atol=limit, equal_nan=True).all()):
                continue
        found[key[0]] = None
    return sorted(found)
