"""Results that ranks establish together: exact means, and whether their replicas are equal."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from mntrain.errors import TrainingStoppedError
from mntrain.metrics.registry import METRICS
from zero.collectives import Collectives, gather_objects


@dataclass(frozen=True)
class GlobalMeans:
    """Means over the items of all ranks, and other reduced values: the same on every rank."""

    loss: float
    metrics: dict[str, float]  # the task's further means
    count: int  # items that the means are over; 0 if a rank failed
    values: dict[str, float]  # the other values, reduced
    nonfinite: str  # "nan on rank 1" if the loss is not finite, else ""


class MeanAccumulator:
    """Sums means weighted by their counts, and reduces them to exact means over a group of ranks.

    The first reduction also gathers the names of the task's metrics, so that a rank without a
    sample of its own knows them too. `rank` is this rank in the world, for errors.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._names: list[str] = []
        self._count = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, count: int, means: Mapping[str, Tensor]) -> None:
        """Add 0-dim means over the same `count` items. Local; does not wait for a device."""
        if not count:
            return
        self._count += count
        for name, mean in means.items():
            term = mean.detach().to(torch.float64) * count
            self._sums[name] = self._sums[name] + term if name in self._sums else term

    def reduce(
        self, group: Collectives, where: str, local_values: Mapping[str, float] | None = None
    ) -> GlobalMeans:
        """Return the means over all ranks of the group, and start anew. Collective in the group.

        `local_values`, under the same names on every rank, travel in the same message. Each is
        reduced as its metric declares; those that are no metrics are summed. If the sum of "failed"
        is above 0, there are no means, only values. Raises TrainingStoppedError, which names
        `where`, if no rank has counted any item.
        """
        if not self._names:
            by_rank = gather_objects(group, list(self._sums))
            self._names = sorted({name for names in by_rank for name in names})
        local_sums, local_count = self._local_sums(), self._count
        self._count, self._sums = 0, {}
        encoded = [x for pair in (local_values or {}).items() for x in _encode(*pair, group)]
        summed = torch.tensor([*local_sums, local_count, *encoded], dtype=torch.float64)
        group.all_reduce(summed).wait()
        totals = iter(summed.tolist())
        global_sums = list(islice(totals, len(self._names)))
        count = next(totals)
        values = {
            name: max(islice(totals, group.size)) if _is_maximum(name) else next(totals)
            for name in local_values or {}
        }
        if values.get("failed"):
            return GlobalMeans(math.nan, {}, 0, values, "")
        if not count:
            raise TrainingStoppedError(
                f"{where}, no rank has anything to take a mean over", self._rank
            )
        means = {name: total / count for name, total in zip(self._names, global_sums, strict=True)}
        loss, nonfinite = means.pop("loss"), ""
        if not math.isfinite(loss):
            losses = gather_objects(group, local_sums[self._names.index("loss")])
            culprits = [f"{x} on rank {r}" for r, x in enumerate(losses) if not math.isfinite(x)]
            nonfinite = ", ".join(culprits) or f"{loss} over all ranks"
        return GlobalMeans(loss, means, int(count), values, nonfinite)

    def _local_sums(self) -> list[float]:
        """Return this rank's sums by name, 0 for a missing one. Waits for the device, once."""
        if not self._sums:
            return [0.0] * len(self._names)
        device = next(iter(self._sums.values())).device
        values = torch.stack([total.to(device) for total in self._sums.values()]).tolist()
        by_name = dict(zip(self._sums, values, strict=True))
        return [by_name.get(name, 0.0) for name in self._names]


def _encode(name: str, value: float, group: Collectives) -> list[float]:
    """Return what to sum for a value: a maximum needs a place for each rank."""
    if not _is_maximum(name):
        return [value]
    return [value if rank == group.rank else 0.0 for rank in range(group.size)]


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

    If two are equally common, rank 0's counts as right.
    """
    counts = Counter(digests)
    expected = max(counts, key=lambda digest: (counts[digest], digest == digests[0]))
    return [rank for rank, digest in enumerate(digests) if digest != expected]
