"""Assignment of GPUs to ranks, and movement of batches to a device."""

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device, floats: torch.dtype | None = None) -> Any:
    """Return a batch with every tensor on `device`. Local; does not synchronize with the GPU.

    Tensors may be nested in tuples, lists and dicts; other objects are moved by their own method
    `to`, and kept if they have none. Tensors are copied through pinned memory. With `floats`,
    floating-point tensors are cast to that dtype.
    """
    if isinstance(batch, Tensor):
        dtype = floats if floats is not None and batch.is_floating_point() else batch.dtype
        if device.type == "cuda" and batch.device.type == "cpu" and not batch.is_pinned():
            batch = batch.pin_memory()  # a copy from pageable memory would wait for the stream
        return batch.to(device, dtype, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(value, device, floats) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device, floats) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device, floats) for value in batch)
    return batch


def visible_gpus(wanted: str) -> list[str]:
    """Return identifiers of the GPUs visible to this rank, by its own index. Local.

    `wanted` is cpu (none), cuda, or auto (cuda if there is any). Raises ValueError for cuda if
    torch sees no GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return []
    if not torch.cuda.is_available():
        raise ValueError(
            "device cuda was requested, but torch sees no GPU here: choose cpu or auto, or "
            "install a CUDA build of torch and make a GPU visible to the job"
        )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [
        name_of(torch.cuda.get_device_properties(index), index, listed)
        for index in range(torch.cuda.device_count())
    ]


def name_of(properties: Any, index: int, listed: Sequence[str]) -> str:
    """Return an identifier of a GPU that is the same on all ranks of its host. Pure.

    `properties` are torch's, `index` is the rank's own, `listed` are the entries of
    CUDA_VISIBLE_DEVICES. The identifier is the UUID; for a MIG instance, which may report the UUID
    of the whole GPU, and where torch gives no UUID, it is the entry or the index.
    """
    entry = listed[index].strip() if index < len(listed) else ""
    uuid = "" if entry.startswith("MIG-") else str(getattr(properties, "uuid", ""))
    return uuid or entry or str(index)


def assign(hosts: Sequence[Hashable], visible_gpus: Sequence[Sequence[str]]) -> list[int | None]:
    """Assign a GPU to each rank of a job, by its own index; None for the CPU. Pure.

    Both arguments are by rank: a key of the host, and the GPUs that the rank sees, by its own
    index. A rank gets the GPU of its host that has the fewest ranks so far; among equal ones, the
    one at its position on the host. Ranks that see fewer GPUs are served first.

        four ranks see a b      0 a   1 b   2 a   3 b
        ranks see a, b, c       0 a   1 b   2 c
        ranks see a, a b        0 a   1 b

    Raises ValueError if some ranks see a GPU and others do not.
    """
    if not any(visible_gpus):
        return [None] * len(hosts)
    if not all(visible_gpus):
        without = [rank for rank, gpus in enumerate(visible_gpus) if not gpus]
        raise ValueError(
            f"rank {without[0]} sees no GPU, but others do: make a GPU visible to every rank, or "
            "choose device cpu"
        )
    load: Counter[tuple[Hashable, str]] = Counter()
    assigned: list[int | None] = [None] * len(hosts)
    for rank in sorted(range(len(hosts)), key=lambda rank: len(visible_gpus[rank])):
        host, gpus = hosts[rank], visible_gpus[rank]
        position = hosts[:rank].count(host)
        order = [(position + step) % len(gpus) for step in range(len(gpus))]
        best = min(order, key=lambda index: load[host, gpus[index]])
        assigned[rank] = best
        load[host, gpus[best]] += 1
    return assigned
