"""Integers of 8 bits with a scale for each block of node sums."""

from zero.comm_hooks.between_nodes import BetweenNodesHook
from zero.comm_hooks.codes import BlockCode


class Int8Hook(BetweenNodesHook):
    """Exchanges node sums as integers of 8 bits with a scale for each block: 1.016 bytes each.

    A block with a NaN or an infinity is decoded to NaN. So are fp64 sums beyond the range of fp32.
    """

    code = BlockCode()


make = Int8Hook
