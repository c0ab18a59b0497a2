"""Sums in 8 bits between nodes: 1.016 bytes an element instead of 4.

Each block of 256 sums travels as a fp32 scale, the largest magnitude / 127, and integers from -127
to 127, rounded to nearest (`zero.comm_hooks.codes.BlockCode`). What is rounded off is added to the
next step's sums.

Source of blocks with a scale each: Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
ICLR 2022, arXiv 2110.02861; of the residuals: Seide et al., "1-Bit Stochastic Gradient Descent and
its Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
"""

from zero.comm_hooks.between_nodes import BetweenNodesHook
from zero.comm_hooks.codes import BlockCode


class Int8Hook(BetweenNodesHook):
    """Exchanges node sums as 8-bit integers with a scale for each block, with error feedback.

    A block with a NaN or an infinity is decoded to NaN. So are fp64 sums beyond the range of fp32.
    """

    code = BlockCode(8)


HOOKS = {"int8": Int8Hook}
