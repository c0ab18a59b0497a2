"""What is reduced, and who owns which shard: buckets, stages and the optimizer step.

Torch only. How bytes move is the caller's: anything that satisfies `zero.collectives.Collectives`
will do, and `zero.collectives.SingleProcessCollectives` is a world of one.
"""

from zero.collectives import Collectives, SingleProcessCollectives, Work
from zero.memory import Memory
from zero.optimizer import NonFiniteGradientError, StepResult, ZeroOptimizer
from zero.state import StateSlice

__all__ = [
    "Collectives",
    "Memory",
    "NonFiniteGradientError",
    "SingleProcessCollectives",
    "StateSlice",
    "StepResult",
    "Work",
    "ZeroOptimizer",
]
