"""Bytes that an optimizer holds on a rank, by role.

Bytes for each parameter with Adam on N ranks, without the working tensors of stage 2:

    stage   fp32            16 bits, fp32 master weights
    0       4 + 4 + 8       2 + 6 + 12
    1       4 + 4 + 8/N     2 + 2 + 12/N              (N of 2 and more; 1 as at stage 0)
    2       4 + 12/N        2 + 14/N, in the update and with accumulation 2 + 16/N

One rank holds at every stage what stage 0 holds.

The torch optimizer reads fp32 gradients. At stage 1 they are made in the memory of the 16-bit ones,
where a rank owns no more than half of a bucket. A `gather_dtype` of 16 bits adds 4/N for master
weights of fp32 parameters, and 2 for the copies that travel.
"""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. The roles do not overlap."""

    parameters: int  # those that are trained
    gradients: int  # kept, at the peak
    buckets: int  # tensors through which gradients and parameters travel
    master: int  # master weights
    state: int  # tensors of the torch optimizer
    hook: int = 0  # the communication hook's state
    exchange: int = 0  # the sync schedule's tensors

    @property
    def total(self) -> int:
        """The sum of all roles."""
        return sum(astuple(self))
