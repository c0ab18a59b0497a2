"""A trial that shows whether a torch optimizer can be sharded: a small problem, whole and cut.

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
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

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


def check_partition(make: Factory, groups: Iterable[dict[str, Any]], partition: str) -> None:
    """Raise ValueError for an optimizer that would give other results if it was sharded. Local.

    `make` makes the optimizer of parameter groups; `groups` are those of the user, with pairs
    (name, parameter). The trial uses their options and the kinds of their parameters. Its result is
    kept for the next optimizer of this class, arguments and groups. Errors of the optimizer's
    constructor are raised as they are.
    """
    called, arguments = _unwrapped(make)
    trial = Trial(make, (called, arguments), _small_groups(groups))
    try:
        hash(trial)
        known = isinstance(called, type)  # what a function does may depend on more
    except TypeError:  # of an option
        known = False
    problem = _problem(trial, partition) if known else _problem.__wrapped__(trial, partition)
    if problem:
        raise ValueError(problem)


def _unwrapped(make: Factory) -> tuple[Hashable, Hashable]:
    """Return what a factory calls, and with which arguments."""
    arguments: list[Hashable] = []
    while isinstance(make, functools.partial):
        arguments.append((make.args, tuple(sorted(make.keywords.items()))))
        make = make.func
    return make, tuple(arguments)


def _small_groups(groups: Iterable[dict[str, Any]]) -> tuple["SmallGroup", ...]:
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
        SmallGroup(tuple(given.items()), tuple(sorted(kinds[rough], key=str)))
        for rough, given in options.items()
    )


@dataclass(frozen=True)
class SmallGroup:
    """The options of a parameter group, and the kinds of its parameters."""

    options: tuple[tuple[str, Any], ...]
    kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class Trial:
    """An optimizer and its groups; equal to any of the same class, arguments and groups."""

    make: Factory = field(compare=False)
    call: Hashable  # what is called, and with which arguments
    groups: tuple[SmallGroup, ...]

    def difference(self, partition: str) -> str:
        """Return what is different where the optimizer is sharded; empty if nothing is."""
        try:
            problem, whole, again, tolerance = self._run_whole()
        except Exception as error:  # an optimizer may raise anything
            return f"a trial on small tensors fails ({type(error).__name__}: {error})"
        if reason := _useless(whole, again, tolerance):
            return reason
        try:
            cut = problem.run(problem.shards(partition))
        except Exception as error:
            return f"a trial on parts of tensors fails ({type(error).__name__}: {error})"
        found = _differences(whole, cut, tolerance)
        return f"in a trial, parts get other {', '.join(found)} than the whole" if found else ""

    def _run_whole(self) -> tuple["SmallProblem", Results, Results, float]:
        """Return the problem, the results of two runs, and their relative tolerance."""
        for dtype, tolerance in DTYPES:
            problem = SmallProblem(self, dtype)
            whole = [problem.whole()]
            try:
                return problem, problem.run(whole), problem.run(whole), tolerance
            except Exception:
                if dtype == DTYPES[-1][0]:
                    raise
        raise AssertionError("there is a last dtype")


@functools.lru_cache(maxsize=256)
def _problem(trial: Trial, partition: str) -> str:
    """Return why an optimizer cannot be sharded, and what to do; empty if it can be."""
    devices = {device for g in trial.groups for *_, device in g.kinds if device.type == "cuda"}
    with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the optimizer itself warns again
        problem = SmallProblem(trial, torch.float32)
        optimizer = problem.optimizer(problem.whole())[0]
        check_drivable(optimizer)
        difference = trial.difference(partition)
        if not difference:
            return ""
        by_parameter = partition == "element" and not trial.difference("parameter")
    fix = 'partition="parameter"' if by_parameter else "stage=0"
    name = type(optimizer).__name__
    return f'{name} cannot be sharded with partition "{partition}": {difference}; give {fix}'


class SmallProblem:
    """Two tensors of every kind in every group, and gradients of widely different sizes."""

    def __init__(self, trial: Trial, dtype: torch.dtype) -> None:
        self._make, self._groups = trial.make, trial.groups
        self._group_of = [g for g, group in enumerate(trial.groups) for _ in group.kinds * 2]
        kinds = [kind for group in trial.groups for kind in group.kinds for _ in range(2)]
        self._starts: list[Tensor] = []
        self._slopes: list[Tensor] = []
        options: Any = {"dtype": torch.float64, "device": "cpu"}  # whatever the defaults are
        options["generator"] = torch.Generator("cpu").manual_seed(0)
        for number, (dimensions, is_complex, device) in enumerate(kinds):
            shape = SHAPES[dimensions] if dimensions < len(SHAPES) else (2,) * dimensions
            start, spread = torch.randn(2, *shape, **options)
            slope = start.sign() * torch.exp(2 * spread) * (100 if number % 2 else 0.01)
            wide = torch.promote_types(dtype, torch.complex64) if is_complex else dtype
            turn = complex(1, -0.5) if is_complex else 1
            self._starts.append((start * turn).to(device, wide))
            self._slopes.append((slope * turn).to(device, wide))

    def whole(self) -> list[Piece]:
        """Return all tensors."""
        return [(number, 0, start.numel()) for number, start in enumerate(self._starts)]

    def shards(self, partition: str) -> list[list[Piece]]:
        """Return what each of several optimizers updates."""
        parts, whole = PARTS[partition], self.whole()
        if partition == "parameter":
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
        groups = [
            {
                **dict(group.options),
                "params": [t for (number, *_), t in owned if self._group_of[number] == place],
            }
            for place, group in enumerate(self._groups)
        ]
        optimizer = self._make(groups)
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor) and float(rate) < LEAST_LR:
                group["lr"] = torch.full_like(rate, TRIAL_LR)
            elif isinstance(rate, Real) and float(rate) < LEAST_LR:
                group["lr"] = TRIAL_LR
        return optimizer, owned

    def run(self, shards: Sequence[Sequence[Piece]]) -> Results:
        """Return the results of a few steps in which every shard has an optimizer of its own."""
        found: dict[tuple[str, int], list[Tensor]] = {}
        for pieces in shards:
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
                options = {key: value for key, value in group.items() if key != "params"}
                for key, value in _numbers(options, 1):
                    found.setdefault((f"option {key}", place), []).append(value)
        return {what: torch.cat(values) for what, values in found.items()}


def _useless(whole: Results, again: Results, tolerance: float) -> str:
    """Return why two equal runs do not tell what an optimizer does; empty if they do."""
    weights = [value for (what, _), value in whole.items() if what == WEIGHTS]
    if not all(bool(value.isfinite().all()) for value in weights):
        return "it gets infinite or NaN values in a trial on small tensors"
    if _differences(whole, again, tolerance):
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


def _differences(whole: Results, cut: Results, tolerance: float) -> list[str]:
    """Return what differs by more than a tolerance, relative to the largest number."""
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
