"""Trials on small tensors: whether a torch optimizer takes its arguments, and can be sharded.

    whole          one optimizer updates all tensors
    by element     each of three optimizers updates a third of every tensor, as flat slices
    by parameter   each of two optimizers updates every other tensor

An optimizer can be sharded if its weights and state do not depend on the cut. One that uses a norm
of a tensor fails by element; one that uses a norm of all tensors fails by parameter, too.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.param_groups import hyperparameters
from zero.precision import is_16_bit

STEPS = 6
# Shapes of tensors by their number of dimensions. Matrices have more than the 16 rows and the 4096
# elements from which on some optimizers factor or quantize their state.
SHAPES = ((), (401,), (96, 72), (24, 24, 9), (12, 24, 3, 3))
PARTS = {"element": 3, "parameter": 2}
LEAST_LR = 1e-6  # a smaller learning rate would hide what an optimizer does
TRIAL_LR = 1e-3  # in its place
# Dtypes of the trial, and the relative difference up to which results count as equal.
DTYPES = ((torch.float64, 1e-5), (torch.float32, 1e-3))

WEIGHTS = "weights"

Factory = Callable[..., torch.optim.Optimizer]
Kind = tuple[int, bool, torch.device]  # of a parameter: its dimensions, whether complex, device
SmallGroup = tuple[tuple[tuple[str, Any], ...], tuple[Kind, ...]]  # options, kinds of parameters
Piece = tuple[int, int, int]  # the number of a tensor, and the elements (from, to) of it
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
    are looked at in a step only, as the number of Adam's betas. The error names the arguments
    without which the trial passes.
    """
    for group in groups:
        own = hyperparameters(group)
        kinds = {(p.dim(), p.dtype, p.device): None for p in group["params"]}
        refusal = functools.partial(_refusal, kind, kinds=tuple(kinds), leaves=leaves)
        error = refusal(arguments, own)
        if error is not None:
            given = {**arguments, **own}
            wrong = [n for n in given if refusal(_without(arguments, n), _without(own, n)) is None]
            refused = {name: given[name] for name in wrong or given}
            raise ValueError(_sentence(kind, refused, error)) from error


def _refusal(
    kind: Factory,
    arguments: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    kinds: Iterable[tuple[int, torch.dtype, torch.device]],
    leaves: bool,
) -> Exception | None:
    tensors = []
    for dims, dtype, device in kinds:
        wide = torch.float32 if is_16_bit(dtype) else dtype
        tensors.append(torch.zeros([2] * dims, dtype=wide, device=device, requires_grad=leaves))
        tensors[-1].grad = torch.zeros_like(tensors[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizer = kind([{"params": tensors, **own}], **arguments)
            if not isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
                optimizer.step()
        except Exception as error:  # torch raises whatever its code meets
            return error
    return None


def _without(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != name}


def _sentence(kind: Factory, refused: Mapping[str, Any], error: Exception) -> str:
    name = getattr(kind, "__name__", "the optimizer")
    given = ", ".join(f"{key}={value!r}" for key, value in refused.items()) or "its arguments"
    known = list(inspect.signature(kind).parameters.values())[1:]
    defaults = {p.name: p.default for p in known if p.default is not p.empty}
    usual = ", ".join(f"{key}={defaults[key]!r}" for key in refused if key in defaults)
    taken = f"its default is {usual}" if usual else f"it takes {', '.join(p.name for p in known)}"
    reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
    return f"{name} refuses {given} ({reason}); {taken}"


def check_partition(make: Factory, groups: Iterable[dict[str, Any]], partition: str) -> None:
    """Raise ValueError for an optimizer that would give other results if it was sharded. Local.

    `make` makes the optimizer of parameter groups; `groups` are those of the user, with pairs
    (name, parameter). The trial uses their options and the kinds of their parameters. Its result is
    kept for the next optimizer of this class, arguments and groups. Errors of the optimizer's
    constructor are raised as they are.
    """
    called, arguments = _unwrapped(make)
    small = _small_groups(groups)
    key = called, arguments, small, partition
    try:
        kept = isinstance(called, type)  # what a function does may depend on more
        problem = _outcomes().get(key) if kept else None
    except TypeError:  # of an option without a hash
        kept, problem = False, None
    if problem is None:
        problem = _problem(make, small, partition)
        if kept:
            _outcomes()[key] = problem
    if problem:
        raise ValueError(problem)


@functools.cache
def _outcomes() -> dict[Hashable, str]:
    return {}


def _unwrapped(make: Factory) -> tuple[Hashable, Hashable]:
    arguments: list[Hashable] = []
    while isinstance(make, functools.partial):
        arguments.append((make.args, tuple(sorted(make.keywords.items()))))
        make = make.func
    return make, tuple(arguments)


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
        problem = SmallProblem(make, groups, torch.float32)
        optimizer = problem.optimizer(problem.shards("whole")[0])[0]
        check_drivable(optimizer)
        difference = _difference(make, groups, partition)
        if not difference:
            return ""
        by_parameter = partition == "element" and not _difference(make, groups, "parameter")
    fix = 'partition="parameter"' if by_parameter else "stage=0"
    name = type(optimizer).__name__
    return f'{name} cannot be sharded with partition "{partition}": {difference}; give {fix}'


def _difference(make: Factory, groups: Sequence[SmallGroup], partition: str) -> str:
    failure = ""
    for dtype, tolerance in DTYPES:
        problem = SmallProblem(make, groups, dtype)
        try:
            whole, again = (problem.run("whole") for _ in range(2))
        except Exception as error:  # an optimizer may raise anything
            failure = f"a trial on small tensors fails ({type(error).__name__}: {error})"
            continue
        if reason := _useless(whole, again, tolerance):
            return reason
        try:
            cut = problem.run(partition)
        except Exception as error:
            return f"a trial on parts of tensors fails ({type(error).__name__}: {error})"
        found = _differing(whole, cut, tolerance)
        return f"in a trial, parts get other {', '.join(found)} than the whole" if found else ""
    return failure


class SmallProblem:
    """Two tensors of every kind in every group, and gradients of widely different sizes."""

    def __init__(self, make: Factory, groups: Sequence[SmallGroup], dtype: torch.dtype) -> None:
        self._make, self._groups = make, groups
        self._group_of: list[int] = []  # of each tensor
        self._starts: list[Tensor] = []
        self._slopes: list[Tensor] = []
        options: Any = {"dtype": torch.float64, "device": "cpu"}  # whatever the defaults are
        options["generator"] = torch.Generator("cpu").manual_seed(0)
        pairs = [(g, kind) for g, (_, kinds) in enumerate(groups) for kind in kinds for _ in "ab"]
        for number, (group, (dimensions, is_complex, device)) in enumerate(pairs):
            shape = SHAPES[dimensions] if dimensions < len(SHAPES) else (2,) * dimensions
            start, spread = torch.randn(2, *shape, **options)
            slope = start.sign() * torch.exp(2 * spread) * (100 if number % 2 else 0.01)
            wide = torch.promote_types(dtype, torch.complex64) if is_complex else dtype
            turn = complex(1, -0.5) if is_complex else 1
            self._group_of.append(group)
            self._starts.append((start * turn).to(device, wide))
            self._slopes.append((slope * turn).to(device, wide))

    def shards(self, partition: str) -> list[list[Piece]]:
        """Return what each of several optimizers updates; one of them if "whole"."""
        whole = [(number, 0, start.numel()) for number, start in enumerate(self._starts)]
        parts = PARTS.get(partition, 1)
        if partition != "element":
            return [whole[part::parts] for part in range(parts)]
        shards = []
        for part in range(parts):
            cut = [(n, part * stop // parts, (part + 1) * stop // parts) for n, _, stop in whole]
            shards.append([(n, low, high) for n, low, high in cut if low < high])
        return shards

    def optimizer(
        self, pieces: Sequence[Piece]
    ) -> tuple[torch.optim.Optimizer, list[tuple[Piece, Tensor]]]:
        """Make an optimizer of pieces; return it, and the pieces with their tensors."""
        owned: list[tuple[Piece, Tensor]] = []
        for piece in pieces:
            number, low, high = piece
            start = self._starts[number]
            cut = high - low < start.numel()
            tensor = start.flatten()[low:high].clone() if cut else Parameter(start.clone())
            owned.append((piece, tensor))
        of_group: list[list[Tensor]] = [[] for _ in self._groups]
        for (number, *_), tensor in owned:
            of_group[self._group_of[number]].append(tensor)
        optimizer = self._make(
            [
                {**dict(options), "params": tensors}
                for (options, _), tensors in zip(self._groups, of_group, strict=True)
            ]
        )
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor) and float(rate) < LEAST_LR:
                group["lr"] = torch.full_like(rate, TRIAL_LR)
            elif isinstance(rate, Real) and float(rate) < LEAST_LR:
                group["lr"] = TRIAL_LR
        return optimizer, owned

    def run(self, partition: str) -> Results:
        """Return the results of a few steps in which every shard has an optimizer of its own."""
        found: dict[tuple[str, int], list[Tensor]] = {}
        for pieces in self.shards(partition):
            optimizer, owned = self.optimizer(pieces)
            for step in range(STEPS):
                for (number, low, high), tensor in owned:
                    gradient = self._slopes[number].flatten().roll(step)[low:high]
                    tensor.grad = gradient.reshape(tensor.shape)
                optimizer.step()
            for (number, low, high), tensor in owned:
                start = self._starts[number].flatten()[low:high]
                change = (tensor.detach().flatten() - start).cpu()
                found.setdefault((WEIGHTS, number), []).append(change)
                for key, value in _numbers(optimizer.state[tensor], high - low):
                    found.setdefault((f"state {key}", number), []).append(value)
            for place, group in enumerate(optimizer.param_groups):
                for key, value in _numbers(hyperparameters(group), 1):
                    found.setdefault((f"option {key}", place), []).append(value)
        return {what: torch.cat(values) for what, values in found.items()}


def _useless(whole: Results, again: Results, tolerance: float) -> str:
    weights = [value for (what, _), value in whole.items() if what == WEIGHTS]
    if not all(bool(value.isfinite().all()) for value in weights):
        return "it gets infinite or NaN values in a trial on small tensors"
    if _differing(whole, again, tolerance):
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


def _differing(whole: Results, cut: Results, tolerance: float) -> list[str]:
    found = dict.fromkeys(what for what, _ in whole.keys() ^ cut.keys())
    for (what, number), expected in whole.items():
        if (other := cut.get((what, number))) is None:
            continue
        if expected.numel() not in (1, other.numel()):
            found[what] = None
            continue
        wide = torch.promote_types(expected.dtype, torch.float64)
        pair = other.to(wide), expected.to(wide)
        limit = tolerance * float(pair[1].abs().nan_to_num(posinf=0).max())
        if not bool(torch.isclose(*pair, rtol=0, atol=limit, equal_nan=True).all()):
            found[what] = None
    return list(found)
