"""SparseLoCo: nodes exchange the largest of what they have changed, and keep the rest.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv
2508.15706).
"""

from typing import Any

from torch import Tensor

from zero.collectives import Collectives
from zero.comm_hooks.codes import ChunkCode
from zero.exchange.local_sgd import EXCHANGED, OuterSchedule
from zero.state import UNSENT

DECAY = 0.95  # of what was not sent, in each exchange


class SparseLoCoSchedule(OuterSchedule):
    """Every `every` steps, add the mean of the largest outer gradients to the last exchange's.

    A node adds its outer gradient to 0.95 times what it has not sent yet, and sends the part
    `density` of each 4,096 elements of a parameter that is largest, in 2 bits
    (`zero.comm_hooks.codes`). The mean over nodes, times `outer_lr`, is subtracted from the
    parameters after the last exchange.
    Complex parameters travel as they are. The other arguments are those of `LocalSGDSchedule`.
    """

    _beside = (UNSENT,)

    def __init__(
        self, *groups: Collectives, outer_lr: float, density: float, **options: Any
    ) -> None:
        super().__init__(*groups, **options)
        self._lr, self._code = outer_lr, ChunkCode(density)

    def _value(self, tensor: Tensor, drift: Tensor) -> Tensor:
        """Return the outer gradient and what was not sent before: a new tensor."""
        return drift.add(self._outer[tensor][UNSENT], alpha=DECAY)

    def _keep(self, tensor: Tensor, left: Tensor) -> None:
        """Keep what was not among the largest."""
        self._outer[tensor][UNSENT].copy_(left)

    def _outer_step(self, tensor: Tensor, mean: Tensor) -> None:
        """Subtract the mean of what was sent from the copy of a tensor."""
        self._outer[tensor][EXCHANGED].sub_(mean, alpha=self._lr)
