"""Optimizers as users write them: by element, by parameter, over all, and with states of all kinds.

They are what a wrapper of any torch optimizer meets beside those of torch.
"""

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """The sign of a momentum (Chen et al., arXiv 2302.06675). By element."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            slow, fast = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(momentum.lerp(p.grad, 1 - slow).sign(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - fast)


class Decaying(Optimizer):
    """Descent by lr / k in step k, which is counted in the group, not in the parameters' state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Lamb(Optimizer):
    """Adam, scaled by the norm of every parameter (You et al., arXiv 1904.00962)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p, group):
        state = self.state[p]
        if not state:
            state.update(step=0, first=torch.zeros_like(p), second=torch.zeros_like(p))
        state["step"] += 1
        first, second = group["betas"]
        state["first"].lerp_(p.grad, 1 - first)
        state["second"].lerp_(p.grad.square(), 1 - second)
        mean = state["first"] / (1 - first ** state["step"])
        spread = (state["second"] / (1 - second ** state["step"])).sqrt() + group["eps"]
        update = mean / spread + group["weight_decay"] * p
        length, change = p.norm(), update.norm()
        trust = length / change if length > 0 and change > 0 else 1.0
        p.sub_(group["lr"] * trust * update)


class Row(list):
    """A list of a class of its own."""


class Listed(Optimizer):
    """Several momenta in one container (AggMo; Lucas et al., arXiv 1804.00325). By element."""

    def __init__(self, params, lr=0.02, kind=list, stacked=False):
        super().__init__(params, {"lr": lr})
        self.kind, self.stacked = kind, stacked

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    made = [torch.zeros_like(p) for _ in range(2)]
                    state["momenta"] = torch.stack(made) if self.stacked else self.kind(made)
                for factor, momentum in zip((0.0, 0.9), state["momenta"], strict=True):
                    momentum.mul_(factor).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"] / 2)


class Keeping(Optimizer):
    """Descent along a momentum, with state of every kind that torch's state_dict keeps."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        common = self.state["common"]
        common["steps"] = common.get("steps", 0) + 1
        common.setdefault("table", torch.arange(3.0))
        self.state.setdefault("rates", []).append(self.param_groups[0]["lr"])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state[0] = torch.zeros_like(p)
                    state["master"] = torch.ones_like(p)
                    state["deep"] = {"a": (torch.zeros_like(p), "text", None), "n": [1, 2.5]}
                    state["words"] = "plain"
                    state["sync.x"] = 1.5
                momentum, (squares, *_) = state[0], state["deep"]["a"]
                momentum.mul_(0.9).add_(p.grad)
                squares.add_(p.grad.abs())
                state["master"].add_(1)
                state["deep"]["n"][0] += 1
                scale = state["deep"]["n"][0] * common["steps"] * state["sync.x"]
                p.sub_(momentum * state["master"] / (1 + squares) / scale, alpha=group["lr"])


class Normalized(Optimizer):
    """Descent along the gradient of all parameters together, of length lr in every step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        used = [(p, g["lr"]) for g in self.param_groups for p in g["params"] if p.grad is not None]
        length = sum(float(p.grad.norm()) ** 2 for p, _ in used) ** 0.5
        for p, lr in used:
            p.sub_(p.grad, alpha=lr / length)


class DAdapting(Optimizer):
    """Adapts its step size to the distance from the start, as D-Adaptation and Prodigy do.

    The estimate is one number, kept in the groups, of inner products over all parameters.
    """

    def __init__(self, params, lr=1.0, d0=1e-6):
        super().__init__(params, {"lr": lr, "d": d0, "top": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        used = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        d, top, bottom = self.param_groups[0]["d"], self.param_groups[0]["top"], 0.0
        for p, group in used:
            state = self.state[p]
            if not state:
                state.update(start=p.clone(), sum=torch.zeros_like(p))
            inner = (p.grad.conj() * (state["start"] - p)).sum()
            top += d * group["lr"] * float(inner.real)
            state["sum"].add_(p.grad, alpha=d * group["lr"])
            bottom += float(state["sum"].abs().sum())
        for group in self.param_groups:
            group.update(d=max(d, top / bottom if bottom else d), top=top)
        for p, group in used:
            p.sub_(p.grad.sgn(), alpha=group["lr"] * group["d"])


class Multiplied(torch.optim.SGD):
    """Multiplies the gradient of a parameter by a number that the parameter may have."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * getattr(p, "lr_mult", 1.0))
