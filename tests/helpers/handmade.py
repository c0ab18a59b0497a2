"""Optimizers as users write them: one by element, one that counts in its groups, one by parameter.

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
