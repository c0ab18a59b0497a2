"""Exact means over all ranks, of what each of them tallied."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mntrain.errors import TrainingStoppedError
from mntrain.metrics.step import WeightedSums
from mntrain.world import World


@dataclass(frozen=True)
class GlobalMeans:
    """Means over the items of all ranks: the same on every rank."""

    loss: float
    metrics: dict[str, float]  # the task's further means
    count: int  # items that the means are over, at least 1
    said: tuple[float, ...]  # sums of what ranks had to say besides
    odd: str  # where the loss is not finite: "nan on rank 1"; nothing where it is


class MeanReducer:
    """Makes means of tallies; all ranks make one, and call it alike.

    Ranks agree on the names of a task's metrics in the first call, so that a rank without a sample
    of its own knows them too.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: list[str] | None = None

    def __call__(self, tally: WeightedSums, where: str, says: Sequence[float] = ()) -> GlobalMeans:
        """Means of everyone's tally. Collective.

        What a rank `says` travels along and is summed, so that asking takes no message more.
        Raises TrainingStoppedError, which says `where`, when no rank has tallied anything.
        """
        if self._names is None:
            everyone = self._world.gather(tally.names())
            self._names = sorted({name for names in everyone for name in names})
        mine = tally.sums(self._names)
        total = self._world.sum([*mine, tally.count, *says])
        sums, count, said = total[: len(mine)], total[len(mine)], total[len(mine) + 1 :]
        if not count:
            raise TrainingStoppedError(
                f"{where}, no rank has anything to take a mean over", self._world.rank
            )
        means = {name: total / count for name, total in zip(self._names, sums, strict=True)}
        loss, odd = means.pop("loss"), ""
        if not math.isfinite(loss):
            losses = self._world.gather(mine[self._names.index("loss")])
            found = [f"{one} on rank {r}" for r, one in enumerate(losses) if not math.isfinite(one)]
            odd = ", ".join(found) or f"{loss} over all ranks"
        return GlobalMeans(loss, means, int(count), tuple(said), odd)
