"""What each ZeRO stage keeps of a bucket: small policies behind one step.

Source of the stages: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020 (arXiv 1910.02054).
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from zero.collectives import Collectives, Work

ParamGroup = dict[str, Any]


class Stage(Protocol):
    """How gradients are reduced, and what this rank's optimizer steps on."""

    def reduce(self, flat: Tensor) -> Work:
        """Start the reduction of a full bucket. Collective, asynchronous, in place."""

    def kept(self, flat: Tensor) -> Tensor:
        """The part of a reduced bucket that this rank is to update with: a view."""

    def groups(self, groups: list[ParamGroup]) -> list[ParamGroup]:
        """The parameter groups for this rank's torch optimizer, from those of the model."""

    def publish(self) -> None:
        """Hand updated parameters to the ranks that lack them. Collective."""


class Replicated:
    """Stage 0: nothing sharded. Every rank keeps the whole sum and updates every parameter.

    Bytes a rank and step: one all-reduce of the gradients.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def reduce(self, flat: Tensor) -> Work:
        """See `Stage.reduce`."""
        return self._collectives.all_reduce(flat)

    def kept(self, flat: Tensor) -> Tensor:
        """See `Stage.kept`: the whole bucket."""
        return flat

    def groups(self, groups: list[ParamGroup]) -> list[ParamGroup]:
        """See `Stage.groups`: the model's own parameters."""
        return [dict(group) for group in groups]

    def publish(self) -> None:
        """See `Stage.publish`: every rank has made the same update."""


STAGES: dict[int, Callable[[Collectives], Stage]] = {0: Replicated}


def make_stage(stage: int, collectives: Collectives) -> Stage:
    """The policy of a stage. ValueError for one that does not exist."""
    if stage not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise ValueError(
            f"ZeRO stage {stage!r} does not exist in this version: choose one of {known}"
        )
    return STAGES[stage](collectives)
