"""Where ranks must agree: what all of them gave, compared, and the difference in words.

Pure: everyone's answer, by rank, is gathered by the caller, so all ranks compare the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from mntrain.errors import AgreedError


def expect_same(everyone: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raise AgreedError, as `rank`, unless all ranks gave the same values by name."""
    for name, first in everyone[0].items():
        for other, theirs in enumerate(everyone):
            if theirs[name] != first:
                raise AgreedError(
                    f"{name} differs between ranks: rank 0 has {first}, rank {other} has "
                    f"{theirs[name]}",
                    rank,
                )


def expect_same_model(everyone: Sequence[Sequence[str]], rank: int) -> None:
    """Raise AgreedError, as `rank`, unless all ranks gave what `describe_model` says of one model."""
    for other, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise AgreedError(_difference(everyone[0], theirs, other), rank)


def describe_model(model: nn.Module) -> list[str]:
    """All that ranks must have alike of each parameter and buffer, in words."""
    return [
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + ("" if tensor.requires_grad else " frozen")
        + ("" if tensor.is_contiguous() else f" of strides {tensor.stride()}")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]


def combined_refusals(said: Sequence[str | None]) -> str:
    """Who refused what, in one sentence a refusal; None for ranks that did not."""
    if len(set(said)) == 1:
        return str(said[0])
    ranks: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        if words is not None:
            ranks.setdefault(words, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {words}"
        for words, who in ranks.items()
    )


def _difference(first: Sequence[str], theirs: Sequence[str], rank: int) -> str:
    for mine, other in zip(first, theirs, strict=False):
        if mine != other:
            return f"the model differs between ranks: rank 0 has {mine}, rank {rank} has {other}"
    longer, who = (first, 0) if len(first) > len(theirs) else (theirs, rank)
    extra = longer[min(len(first), len(theirs))]
    return f"the model differs between ranks: only rank {who} has {extra}"
