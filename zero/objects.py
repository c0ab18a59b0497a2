"""Small Python objects from every rank to every rank."""

import pickle
from typing import TypeVar

import torch

from zero.collectives import Collectives

T = TypeVar("T")


def gather_objects(collectives: Collectives, mine: T) -> list[T]:
    """Everyone's object, by rank, on every rank. Collective; for small picklable things."""
    packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    slots = [collectives.slot(rank) for rank in range(collectives.size)]
    lengths = torch.zeros(collectives.size, dtype=torch.int64)
    lengths[slots[collectives.rank]] = len(packed)
    collectives.all_reduce(lengths).wait()
    bounds = [0, *torch.cumsum(lengths, 0).tolist()]
    parts = [slice(bounds[slot], bounds[slot + 1]) for slot in slots]
    everyone = torch.empty(bounds[-1], dtype=torch.uint8)
    everyone[parts[collectives.rank]] = packed
    collectives.all_gather(everyone, bounds).wait()
    return [pickle.loads(everyone[part].numpy().tobytes()) for part in parts]
