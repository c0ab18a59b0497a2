"""Results that ranks establish together: exact means, and whether their replicas are equal."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from mntrain.errors import TrainingStoppedError
from mntrain.metrics.registry import METRICS
from mntrain.metrics.step import WeightedSums
from mntrain.world import World


@dataclass(frozen=True)
class GlobalMeans:
    """Means over the items of all ranks, and other reduced values: the same on every rank."""

    loss: float
    metrics: dict[str, float]  # the task's further means
    count: int  # items that the means are over, at least 1
    values: dict[str, float]  # the other values, reduced
    nonfinite: str  # "nan on rank 1" if the loss is not finite, else ""


class MeanReducer:
    """Turns the weighted sums of every rank into means over the world.

    Over the world under any sync schedule: flags that end or save a job travel with the means. The
    first call also gathers the names of the task's metrics, so that a rank without a sample of its
    own knows them too.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: list[str] | None = None

    def __call__(
        self,
        sums: WeightedSums,
        where: str,
        local_values: Mapping[str, float] | None = None,
    ) -> GlobalMeans:
        """Return the means over all ranks. Collective.

        `local_values`, under the same names on every rank, travel in the same message. Each is
        reduced as its metric declares; those that are no metrics are summed. Raises
        TrainingStoppedError, which names `where`, if no rank has counted any item.
        """
        world = self._world
        if self._names is None:
            by_rank = world.gather(sums.names())
            self._names = sorted({name for names in by_rank for name in names})
        local_sums = sums.sums(self._names)
        encoded = [x for pair in (local_values or {}).items() for x in self._encode(*pair)]
        summed = torch.tensor([*local_sums, sums.count, *encoded], dtype=torch.float64)
        world.collectives.all_reduce(summed).wait()
        totals = iter(summed.tolist())
        global_sums = list(islice(totals, len(self._names)))
        count = next(totals)
        values = {
            name: max(islice(totals, world.size)) if _is_maximum(name) else next(totals)
            for name in local_values or {}
        }
        if not count:
            raise TrainingStoppedError(
                f"{where}, no rank has anything to take a mean over", world.rank
            )
        means = {name: total / count for name, total in zip(self._names, global_sums, strict=True)}
        loss, nonfinite = means.pop("loss"), ""
        if not math.isfinite(loss):
            losses = world.gather(local_sums[self._names.index("loss")])
            culprits = [f"{x} on rank {r}" for r, x in enumerate(losses) if not math.isfinite(x)]
            nonfinite = ", ".join(culprits) or f"{loss} over all ranks"
        return GlobalMeans(loss, means, int(count), values, nonfinite)

    def _encode(self, name: str, value: float) -> list[float]:
        """Return what to sum for a value: a maximum needs a place for each rank."""
        if not _is_maximum(name):
            return [value]
        return [value if rank == self._world.rank else 0.0 for rank in range(self._world.size)]


def _is_maximum(name: str) -> bool:
    return name in METRICS and METRICS[name].reduction == "max"


@torch.no_grad()
def model_digest(model: nn.Module) -> str:
    """Return a hash of the bits of all parameters and buffers. Local; copies a tensor at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in [*model.parameters(), *model.buffers()]:
        flat = tensor.detach().contiguous().view(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def differing_ranks(digests: Sequence[str]) -> list[int]:
    """Return the ranks whose digest is not the most common one. Pure; `digests` is by rank.

    Of two that are equally common, rank 0's is taken to be right.
    """
    counts = Counter(digests)
    expected = max(counts, key=lambda digest: (counts[digest], digest == digests[0]))
    return [rank for rank, digest in enumerate(digests) if digest != expected]
