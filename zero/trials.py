"""The cut of a model between ranks: by element for optimizers known to work so, or by parameter.

    partition="auto"   by element for the classes in BY_ELEMENT, by parameter for all others

What another optimizer does with a slice cannot be known: it may use the norm or the rows of a
tensor only from some step on, or where a gradient has some direction. Whole parameters give it what
it has in one process. What is left to find are statistics over all parameters, by a trial on small
tensors:

    whole          one optimizer updates all tensors
    by parameter   each of two optimizers updates every other tensor

An optimizer whose weights and state depend on the cut is refused. A trial has a few steps, so it
finds no statistic that begins later, or that its gradients do not show. Where the user says that an
optimizer works by element, it cuts every tensor into three flat slices instead.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.layout import ParameterSpec, lay_out
from zero.nested import leaves
from zero.param_groups import hyperparameters
from zero.precision import is_16_bit
from zero.prediction import OneOfSeveral
from zero.shard import OptimizerShard, update_alone
from zero.state import UnsliceableStateError, beyond_state, check_state, unnamed_state

# The classes of torch.optim that update an element by its own gradients and state alone, with all
# of their options. A class derived from one may do anything.
BY_ELEMENT = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
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
    """Raise ValueError for an optimizer that cannot be driven here, or not saved. Local.

    Such as one that needs a closure, sparse gradients, or gradients of its updates.
    """
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
    if odd := optimizer.state_dict().keys() ^ {"state", "param_groups"}:
        raise ValueError(
            f"{name}.state_dict() differs from that of torch's optimizers in {', '.join(odd)}, "
            "which checkpoints would lose: give the optimizer that it wraps, or another one"
        )
    if lost := beyond_state(optimizer):
        raise ValueError(lost)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"{name} is given differentiable=True, and a step here updates parameters in place, "
            "which autograd cannot follow: leave it out"
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
                    update_alone(optimizer)
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


def works_by_element(make: Factory) -> bool:
    """Return whether a class, or a partial of one, is known to work element by element.

    Nothing is known of other functions that make an optimizer.
    """
    while isinstance(make, partial):
        make = make.func
    return isinstance(make, type) and make in BY_ELEMENT


def choose_partition(make: Factory, partition: str) -> Literal["element", "parameter"]:
    """Return what "auto" stands for with an optimizer, or the partition that was given."""
    if partition == "element" or (partition == "auto" and works_by_element(make)):
        return "element"
    return "parameter"


def check_partition(make: Factory, groups: Iterable[dict[str, Any]], partition: str) -> None:
    """Raise ValueError for an optimizer that would give other results if it was sharded. Local.

    `make` makes the optimizer of parameter groups; `groups` are those of the user, with pairs
    (name, parameter). The trial uses their options and the kinds of their parameters. Optimizers
    that are known to work by element need none. Errors of the optimizer's constructor are raised
    as they are.
    """
    if works_by_element(make):
        return
    small, cut = _small_groups(groups), choose_partition(make, partition)
    devices = {device for _, kinds in small for *_, device in kinds if device.type == "cuda"}
    with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the optimizer itself warns again
        problem = SmallProblem(make, small)
        optimizer, _ = problem.part("whole", 0)
        check_drivable(optimizer)
        difference = _difference(problem, cut)
    if difference:
        fix = "leave out partition=, or give stage=0" if cut == "element" else "give stage=0"
        name = type(optimizer).__name__
        raise ValueError(f"{name} cannot be sharded by {cut}: {difference}; {fix}")


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


def _difference(problem: "SmallProblem", partition: str) -> str:
    try:
        whole, again = problem.run("whole"), problem.run("whole")
        if reason := _useless(whole, again):
            return reason
        found = _differing(whole, problem.run(partition))
    except UnsliceableStateError as error:
        if partition == "parameter":  # so it is at stage 0
            raise ValueError(str(error)) from error
        return str(error)
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
        buckets = lay_out(specs, bucket_bytes=1, shards=size, loads=loads)  # one of each tensor
        ranks, alone = OneOfSeveral(size, slot), size == 1
        shard = OptimizerShard(1, ranks, None, None, overlap_forward=False, alone=alone)
        shard.add(buckets, named)
        shard.gradients.add(buckets, named)
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
                    update_alone(optimizer)
            check_state(shard, optimizer)
            for number, own in owned:
                start = self._tensors[number][1].flatten()[own.piece.low : own.piece.high]
                change = (own.tensor.detach().flatten() - start).cpu()
                found.setdefault((WEIGHTS, number), []).append(change)
                for key, value in _numbers(optimizer.state[own.tensor]):
                    found.setdefault((f"state {key}", number), []).append(value)
            for place, group in enumerate(optimizer.param_groups):
                for key, value in _numbers(hyperparameters(group)):
                    found.setdefault((f"option {key}", place), []).append(value)
            for key, value in _numbers(unnamed_state(optimizer.state)):
                found.setdefault((f"state {key}", 0), []).append(value)
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


def _numbers(values: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, flat, and numbers, with their keys."""
    for path, value in leaves(values):
        key = "/".join(map(str, path))
        if isinstance(value, Tensor) and value.numel():
            yield key, value.detach().flatten().cpu()
        elif isinstance(value, Real):
            yield key, torch.tensor([float(value)], dtype=torch.float64, device="cpu")


def _differing(whole: Results, cut: Results) -> list[str]:
    found = dict.fromkeys(what for what, _ in whole.keys() ^ cut.keys())
    for key in whole.keys() & cut.keys():
        expected, other = whole[key], cut[key]
        if other.numel() % expected.numel() == 0:  # all parts have what is not by tensor
            wide = torch.promote_types(expected.dtype, torch.float64)
            pair = other.to(wide), expected.to(wide).repeat(other.numel() // expected.numel())
            limit = TOLERANCE * float(pair[1].abs().nan_to_num(posinf=0).max())
            if bool(torch.isclose(*pair, rtol=0, atol=limit, equal_nan=True).all()):
                continue
        found[key[0]] = None
    return sorted(found)
