"""An optimizer that torch lacks: Muon for matrices, with AdamW for all other parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Of the quintic polynomial whose iteration moves singular values to about 1.
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_ADAM_RMS = 0.2  # root mean square of an element of an AdamW update


class Muon(Optimizer):
    """Momentum whose update of a matrix is made orthogonal; AdamW in groups with `muon=False`.

    The update of a matrix is scaled to the size of an AdamW update, so that both kinds of groups
    take the same learning rate and weight decay. It looks at whole matrices, so at ZeRO stages 1
    and 2 ranks own whole parameters. In groups with `muon` (the default), it raises ValueError for
    parameters that are no matrices.

    Sources: K. Jordan, "Muon", 2024 (https://kellerjordan.github.io/posts/muon), and for the scale
    and the weight decay J. Liu et al., "Muon is scalable for LLM training", 2025 (arXiv
    2502.16982). AdamW: I. Loshchilov and F. Hutter, 2019 (arXiv 1711.05101).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        iterations: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "iterations": iterations,
            "betas": betas,
            "eps": eps,
            "muon": True,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["muon"] and parameter.dim() != 2:
                    raise ValueError(
                        f"Muon takes matrices, not a parameter of shape {tuple(parameter.shape)}: "
                        "put it into a group with muon=False"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = self._orthogonal if group["muon"] else self._adam
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction = update(parameter.grad, self.state[parameter], group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(direction, alpha=-group["lr"])
        return loss

    def _orthogonal(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return the direction of a matrix, and update its momentum."""
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(state["momentum"], group["momentum"])  # Nesterov's
        scale = _ADAM_RMS * max(gradient.shape) ** 0.5
        return orthogonalized(ahead, group["iterations"]).mul_(scale)

    def _adam(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return Adam's direction of a parameter, and update its moments."""
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        first, second = group["betas"]
        state["step"] += 1
        steps = state["step"].item()
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (state["exp_avg_sq"] / (1 - second**steps)).sqrt_().add_(group["eps"])
        direction: Tensor = state["exp_avg"] / (1 - first**steps)
        return direction.div_(root)


def orthogonalized(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Return U V^T of the singular value decomposition U S V^T of a matrix, nearly; new, 2-D.

    Singular values become about 1, between 0.7 and 1.2, by a Newton-Schulz iteration. It runs in
    bf16 on GPUs, which is precise enough for it, and in fp32 on CPUs.
    """
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(iterations):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x if wide else x.T
    return result.to(matrix.dtype)


def muon_groups(model: nn.Module, layers: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return parameter groups of a model: the matrices of its layers for Muon, and the others.

    Embeddings and output projections, which are outside of the layers, are left to AdamW. Vectors
    have no weight decay. Only parameters that require a gradient, and no empty group.
    """
    inside = {id(p) for layer in layers for p in layer.parameters() if p.dim() == 2}
    trained = [p for p in model.parameters() if p.requires_grad]
    others = [p for p in trained if id(p) not in inside]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) in inside], "muon": True},
        {"params": [p for p in others if p.dim() >= 2], "muon": False},
        {"params": [p for p in others if p.dim() < 2], "muon": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
