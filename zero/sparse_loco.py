"""SparseLoCo: nodes exchange the largest of what they have changed, and keep the rest.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv
2508.15706).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zero.codes import ChunkCode
from zero.collectives import Collectives
from zero.local_sgd import EXCHANGED, FiniteAgreement, OuterSchedule, is_finite
from zero.state import UNSENT

DECAY = 0.95  # of what was not sent, in each exchange


class SparseLoCoSchedule(OuterSchedule):
    """Every `every` steps, add the mean of the largest outer gradients to the last exchange's.

    A node adds its outer gradient to 0.95 times what it has not sent yet, and sends the part
    `density` of each 4,096 elements of a parameter that is largest, in 2 bits (`zero.codes`). The
    mean over nodes, times `outer_lr`, is subtracted from the parameters after the last exchange.
    Complex parameters travel as they are. The other arguments are those of `LocalSGDSchedule`.
    """

    _beside = (UNSENT,)

    def __init__(
        self, *groups: Collectives, outer_lr: float, density: float, **options: Any
    ) -> None:
        super().__init__(*groups, **options)
        self._lr, self._code = outer_lr, ChunkCode(density)

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Take the outer step. Collective.

        Raises NonFiniteGradientError on all ranks, before anything is sent or kept, if what is to
        be sent is not finite on any of them.
        """
        outer = self._outer

        def unsent(tensor: Tensor) -> Tensor:
            return self._drift(tensor).add_(outer[tensor][UNSENT], alpha=DECAY)

        finite = all(is_finite(unsent(tensor)) for tensor in tensors)
        FiniteAgreement(self._world, self.replica, finite=finite).check()

        def keep(tensor: Tensor, left: Tensor) -> None:
            outer[tensor][UNSENT].copy_(left)

        for tensor, mean in self._means.of(tensors, unsent, self._code, keep):
            outer[tensor][EXCHANGED].sub_(mean, alpha=self._lr)
            tensor.copy_(outer[tensor][EXCHANGED])
