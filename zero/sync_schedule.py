"""Sync schedules: which ranks a step is averaged over, and what is exchanged after it.

step              0         1         2         3
EveryStep         world     world     world     world
one that averages parameters over nodes every 2 steps:
    group         node      node      node      node
    after_update            average             average
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from zero.collectives import Collectives


class SyncSchedule(Protocol):
    """The groups of ranks that a training step communicates in.

    Gradients, batch weights, the norm and buffers of a step are exchanged over `group(step)` alone.
    All ranks of a group give the same answers, and at least one of them has a sample in each step.

    Decisions about the job are agreed over all ranks in every step, since one group must not end or
    save while another continues. So a step that is not finite in one group is skipped, or raises,
    on all ranks; and a trainer takes means, signals and save requests over the world.

    Between exchanges, parameters, buffers and optimizer state differ between groups. A checkpoint,
    a comparison of replicas or an evaluation of one model belongs after a step that exchanged them.
    """

    sharding: Collectives  # over which state and gradients are sharded; from stage 1 on the group

    def group(self, step: int) -> Collectives:
        """Return the ranks over which step number `step`, counted from 0, is averaged. Local."""

    def after_update(self, step: int, updated: Sequence[Tensor]) -> bool:
        """Exchange updated parameters in place, if this step asks for it; return whether it did.

        Collective, after every step, also after one that was skipped. `updated` are the tensors
        that this rank updates, flat slices or whole parameters, in fp32 or wider: the same ones on
        ranks with the same slot in their sharding groups.
        """


class EveryStep:
    """The schedule of synchronous data parallelism: every step is averaged over all ranks."""

    def __init__(self, collectives: Collectives) -> None:
        self.sharding = collectives

    def group(self, step: int) -> Collectives:
        """Return all ranks."""
        return self.sharding

    def after_update(self, step: int, updated: Sequence[Tensor]) -> bool:
        """Exchange nothing: every rank has the same parameters."""
        return False
