"""Sizes of ZeRO shards in proportion to the memory that the ranks have free."""

from collections import Counter
from collections.abc import Sequence

from mntrain.rank_info import Place, free_memory
from mntrain.ranks import Ranks
from zero.collectives import Collectives

WAYS = ("equal", "memory")
STEPS = 100  # weights are in such parts of the largest, so that small differences make none
_SHOWN = 16  # ranks whose shares are listed


def check_shard_by(ranks: Ranks, shard_by: str, stage: int) -> None:
    """Raise ValueError for an unknown way to divide shards, or one that is impossible. Local."""
    if shard_by not in WAYS:
        raise ValueError(f"shard_by {shard_by!r} is unknown: choose {' or '.join(WAYS)}")
    if shard_by == "memory" and stage == 0:
        raise ValueError('shard_by "memory" has no effect at stage 0: give stage=1 or 2')
    if shard_by == "memory" and free_memory(ranks.device) is None:
        raise ValueError('shard_by "memory": the free memory is unknown here; give "equal"')


def measure_weights(ranks: Ranks, sharding: Collectives) -> tuple[list[int], str]:
    """Return the weights of shards by slot of a sharding group, and a line about them. Collective.

    They are the same on all ranks, also if they are in several sharding groups: in each of these, a
    slot has the same elements.
    """
    own = free_memory(ranks.device) or 0, sharding.slot(sharding.rank)
    free, slots = zip(*ranks.gather(own), strict=True)
    weights = weigh(free_by_rank(free, ranks.places), slots)
    return weights, describe(weights, slots)


def free_by_rank(free: Sequence[int], places: Sequence[Place]) -> list[int]:
    """Return each rank's part of the free bytes of its GPU, or else of its host. Pure.

    `free` are the bytes that each rank has found there, by rank; the least of them count.
    """
    devices = [(place.host, place.gpu) for place in places]
    ranks = Counter(devices)
    least: dict[tuple[str, str], int] = {}
    for device, nbytes in zip(devices, free, strict=True):
        least[device] = max(0, min(nbytes, least.get(device, nbytes)))
    return [least[device] // ranks[device] for device in devices]


def weigh(free: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Return the weight of each slot, at most `STEPS`, from the free bytes and slots by rank. Pure.

    Of ranks in several sharding groups that have one slot, the least free memory counts. Weights
    are equal if nobody has free memory.
    """
    by_slot: dict[int, int] = {}
    for nbytes, slot in zip(free, slots, strict=True):
        by_slot[slot] = min(nbytes, by_slot.get(slot, nbytes))
    most = max(by_slot.values())
    return [round(STEPS * by_slot[slot] / most) if most else 1 for slot in range(len(by_slot))]


def describe(weights: Sequence[int], slots: Sequence[int]) -> str:
    """Return a line with the part of the state that each rank has. Pure."""
    parts = [f"{100 * weights[slot] / sum(weights):.3g}" for slot in slots]
    if len(parts) > _SHOWN:
        parts = [f"{min(parts, key=float)} to {max(parts, key=float)}"]
    return f"zero: shards by memory: ranks have {', '.join(parts)} %"
