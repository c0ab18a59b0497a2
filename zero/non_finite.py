"""Where a gradient that is not finite came from."""

from collections.abc import Iterable

from zero.collectives import Collectives
from zero.gradients import Gradients
from zero.master_weights import OptimizerShard
from zero.objects import gather_objects


def describe_non_finite(
    collectives: Collectives,
    owned: OptimizerShard,
    gradients: Gradients,
    names: Iterable[str],
    *,
    finite: bool,
) -> str:
    """Which parameters, and which ranks' gradients: the same words on every rank. Collective.

    `gradients` has the sums of what this rank owns; `finite` says whether what this rank put into
    them was; `names` are those of all parameters, in order.
    """
    odd = {
        piece.piece.spec.name
        for piece in owned.pieces
        if not bool(gradients.part(piece.index, piece.piece).isfinite().all())
    }
    if collectives.size == 1:
        finite = not odd
    everyone = gather_objects(collectives, (odd, finite))
    found = [name for name in names if any(name in theirs for theirs, _ in everyone)]
    ranks = [str(rank) for rank, (_, fine) in enumerate(everyone) if not fine]
    if not found:
        return "finite everywhere, but its powers overflow"
    shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    if not ranks:
        return f"every rank's own is finite, but their sum overflows in {shown}"
    return f"not finite in {shown}, on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
