"""Sharded optimizer states and gradients for data-parallel training (ZeRO), on PyTorch alone.

`ZeroOptimizer` wraps any torch optimizer. It communicates through any object that satisfies
`zero.collectives.Collectives`: `TorchCollectives` are those of a process group of torch, and
`SingleProcessCollectives` of one rank.
"""

from zero.collectives import Collectives, SingleProcessCollectives, Work
from zero.memory import Memory
from zero.optimizer import StepResult, ZeroOptimizer
from zero.options import Options
from zero.shard import NonFiniteGradientError
from zero.state import StateSlice
from zero.torch_collectives import TorchCollectives

__all__ = [
    "Collectives",
    "Memory",
    "NonFiniteGradientError",
    "Options",
    "SingleProcessCollectives",
    "StateSlice",
    "StepResult",
    "TorchCollectives",
    "Work",
    "ZeroOptimizer",
]
