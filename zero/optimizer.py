"""The optimizer step of data-parallel training: wait, mean, clip, update, publish."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.buckets import GradientBuckets
from zero.collectives import Collectives
from zero.layout import Spec, plan_buckets
from zero.replicas import take_from_rank_0
from zero.share import Share
from zero.stages import make_stage

Named: TypeAlias = tuple[str, Parameter]
MIB = 2**20


class StepResult(NamedTuple):
    """What one step did; the same numbers on every rank."""

    grad_norm: float  # L2 norm of the mean gradient, before clipping
    clip_coef: float  # by which clipping multiplied the gradient: 1.0 when it did not
    clipped_norm: float  # the norm after it
    weight: float  # samples (or tokens, or ranks) that the mean is over


class NonFiniteGradientError(ArithmeticError):
    """The gradient holds an infinity or a NaN. Raised by every rank alike; nothing was updated."""


class ZeroOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, over gradients that are reduced across ranks.

    `parameters` are pairs (name, parameter), or parameter groups whose "params" are such pairs:
    `model.named_parameters()` will do. `optimizer_class(groups, **kwargs)` makes the update.
    `buffers` (BatchNorm's statistics, say) are kept equal to rank 0's after every step.

    Construction is local: it makes every `parameter.grad` a view into a bucket of at most
    `bucket_bytes` bytes. Then call `start` on all ranks, once, and `step` once a step: both are
    collective. Hooks launch a bucket as soon as backward has filled it. `order` names the
    parameters in the order of the model, which backward reverses; by default that of `parameters`.

    The gradient is the mean over the whole step's samples, whatever each rank's share of them.
    What a rank's gradient stands for is stated in one of three ways: call `loss.backward()` alone,
    and every rank counts the same; call `share(n)` before it, where the gradient that accumulates
    is a mean over n samples; or call `backward(loss, weight=n)`, once a micro-batch, where each
    loss is a mean over n samples. Collectives sum; the one division into a mean is in `step`.

    Raises ValueError for a stage that does not exist, for parameters on different devices or
    without names of their own, and when there is nothing to train.
    """

    def __init__(
        self,
        parameters: Iterable[Named] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        collectives: Collectives,
        *,
        stage: int = 0,
        max_grad_norm: float | None = None,
        bucket_bytes: int = 25 * MIB,
        buffers: Iterable[Tensor] = (),
        order: Iterable[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._collectives = collectives
        self._stage = make_stage(stage, collectives)
        self._max_grad_norm = max_grad_norm
        self._buffers = tuple(buffers)
        self._share = Share()
        self._sums: list[Tensor] | None = None  # what `synchronize` waited for, and `step` uses
        self._total = 0.0  # the weight of all ranks, likewise
        groups = [_trainable(group) for group in _as_groups(parameters)]
        self._named = _by_name(pair for group in groups for pair in group["params"])
        if order is not None:
            self._named = {name: self._named[name] for name in order if name in self._named}
        self._device = _one_device(self._named)
        unnamed = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
        self._inner = optimizer_class(self._stage.groups(unnamed), **kwargs)
        super().__init__(unnamed, self._inner.defaults)
        self.state = self._inner.state

        specs = [Spec(name, tuple(p.shape), p.dtype) for name, p in self._named.items()]
        plan = plan_buckets(specs, bucket_bytes)
        flats = [collectives.allocate(b.numel, b.dtype, self._device) for b in plan]
        self._buckets = GradientBuckets(self._named, plan, flats, self._stage.reduce, self._share)

    def start(self) -> None:
        """Overwrite parameters and buffers with rank 0's. Collective, unlike construction."""
        take_from_rank_0(self._collectives, [*self._named.values(), *self._buffers])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse, once constructed: RuntimeError. The buckets are laid for the groups given."""
        if "_buckets" in vars(self):
            raise RuntimeError(
                "parameters cannot be added to the buckets of an optimizer: close() it and make "
                "a new optimizer of all of them"
            )
        super().add_param_group(param_group)

    def share(self, count: float | None) -> None:
        """State that the gradient of the coming backward is a mean over `count` samples. Local.

        A count of 0 makes this rank's gradient zero, whatever it is. None takes back a statement
        that no backward has followed. Of accumulated micro-batches the shares add up: exact where
        they are equal and the gradient is their mean; `backward` is exact for any.
        """
        self._share.state(count)

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run backward of a loss that is a mean over `weight` samples or tokens.

        Local, but for the buckets that it launches. Call it once a micro-batch, all but the last
        under `no_sync`; a rank that has no samples in a step calls `share(0)` instead.
        """
        self._share.add(weight)
        if weight:  # a mean over nothing is NaN, and so would be 0 times it
            (loss * weight).backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Only accumulate the gradients made inside: for all but a step's last micro-batch."""
        return self._buckets.no_sync()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Launch what backward left, and wait until every bucket is reduced. Collective.

        `step` does so by itself. Call it first when other collectives are to run between backward
        and `step`: ranks differ in how much backward has launched, and order matters.
        """
        if self._sums is not None:
            return
        self._buckets.launch_rest()
        weight = torch.tensor([self._share.weight], dtype=torch.float64)
        work = self._collectives.all_reduce(weight)
        self._sums = [self._stage.kept(flat) for flat in self._buckets.reduced()]
        work.wait()
        self._total = weight.item()
        self._share.reset()

    @torch.no_grad()
    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Wait for the sums, divide, clip, update. Collective.

        Raises NonFiniteGradientError (all ranks alike, before anything is updated), and ValueError
        for a closure, or when the weights of all ranks sum to nothing.
        """
        if closure is not None:
            raise ValueError(
                "step() takes no closure: one would run backward, and so communicate, a number of "
                "times that each rank decides for itself"
            )
        self.synchronize()
        sums, total = self._sums or [], self._total
        self._sums = None
        if not total > 0:
            raise ValueError(f"the ranks' weights sum to {total}: at least one needs a sample")
        norm = _norm(sums) / total
        if not math.isfinite(norm):
            self._refuse(norm)
        coef = 1.0
        if self._max_grad_norm is not None:
            coef = min(1.0, self._max_grad_norm / (norm + 1e-6))
        for flat in sums:
            flat.mul_(coef / total)  # the sum becomes the clipped mean: the one division
        self._hand_down_hyperparameters()
        self._inner.step()
        self._stage.publish()
        take_from_rank_0(self._collectives, self._buffers)
        return StepResult(norm, coef, norm * coef, total)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero. They stay views into their buckets, whatever the argument."""
        self._buckets.zero()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with this one's hyperparameters."""
        self._hand_down_hyperparameters()
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._inner.load_state_dict(state_dict)
        self.state = self._inner.state
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({key: value for key, value in inner.items() if key != "params"})

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._buckets.close()

    def _hand_down_hyperparameters(self) -> None:
        """Schedulers and users change this optimizer's groups; the update reads the inner ones."""
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key != "params"})

    def _refuse(self, norm: float) -> NoReturn:
        names = [
            name
            for name, parameter in self._named.items()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        where = f"not finite in {shown}" if names else "finite everywhere, but its squares overflow"
        raise NonFiniteGradientError(f"the gradient's norm is {norm}: {where}")


def _as_groups(parameters: Iterable[Named] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    given = list(parameters)
    groups = [{**g, "params": list(g["params"])} for g in given if isinstance(g, dict)]
    if groups and len(groups) == len(given):
        pairs = [pair for group in groups for pair in group["params"]]
    else:
        pairs = given
        groups = [{"params": given}]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "parameters are needed with their names: give model.named_parameters(), "
            'or groups whose "params" are such pairs'
        )
    return groups


def _trainable(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": [(n, p) for n, p in group["params"] if p.requires_grad]}


def _by_name(pairs: Iterable[Named]) -> dict[str, Parameter]:
    named: dict[str, Parameter] = {}
    for name, parameter in pairs:
        if name in named:
            raise ValueError(f"two parameters are named {name}: give each a name of its own")
        named[name] = parameter
    return named


def _one_device(named: dict[str, Parameter]) -> torch.device:
    devices = {p.device: name for name, p in named.items()}
    if not devices:
        raise ValueError("no parameter requires a gradient: there is nothing to train")
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters lie on different devices ({where}): move the model to one")
    return next(iter(devices))


def _norm(flats: list[Tensor]) -> float:
    """L2 norm of all elements; of each tensor in fp32 or wider, over tensors in fp64."""
    norms = [
        torch.linalg.vector_norm(f, dtype=torch.promote_types(f.dtype, torch.float32))
        for f in flats
    ]
    return float(torch.stack([n.double() for n in norms]).norm())
