"""Assignment of GPUs to ranks, and movement of batches to a device."""

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceAssignment:
    """The device of one rank."""

    index: int | None  # of the GPU, in the rank's own numbering; None: the CPU
    gpu: str  # identifier of the GPU, the same on all ranks that see it; empty on the CPU

    @property
    def device(self) -> torch.device:
        """The torch device."""
        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)


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

    `wanted` is cpu (none), cuda, or auto (cuda if there is any). Raises ValueError for another
    name, and for cuda if torch sees no GPU.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {wanted!r} is unknown: choose auto, cpu or cuda")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return []
    if not torch.cuda.is_available():
        raise ValueError(
            "device cuda was requested, but torch sees no GPU here: choose cpu or auto, or "
            "install a CUDA build of torch and make a GPU visible to the job"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [
        name_of(torch.cuda.get_device_properties(index), index, visible)
        for index in range(torch.cuda.device_count())
    ]


def name_of(properties: Any, index: int, visible: Sequence[str]) -> str:
    """Return an identifier of a GPU that is the same on all ranks of its host. Pure.

    `properties` are torch's, `index` is the rank's own, and `visible` the entries of
    CUDA_VISIBLE_DEVICES. The identifier is the UUID; for a MIG instance, which may report the UUID
    of the whole GPU, the entry. Without a UUID it is the PCI address, the entry, or the index.
    """
    listed = visible[index].strip() if index < len(visible) else ""
    if listed.startswith("MIG-"):
        return listed
    if uuid := str(getattr(properties, "uuid", "")):
        return uuid
    if hasattr(properties, "pci_bus_id"):
        places = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        return "{:04x}:{:02x}:{:02x}".format(*places)
    return listed or str(index)


def assign(visible_gpus: Sequence[Sequence[str]]) -> list[DeviceAssignment]:
    """Assign the GPUs of one host to its ranks. Pure, so all ranks compute the same result.

    `visible_gpus` holds, for each rank of the host, the GPUs that it sees, by its own index; a rank
    that sees none gets the CPU. As many GPUs as possible are used, and the load is balanced: no
    rank could move to a GPU with fewer ranks, not even if others moved first. Among equal GPUs, a
    rank gets the one at its own position.

        four ranks see a b      0 a   1 b   2 a   3 b
        ranks see a, b, c       0 a   1 b   2 c
        ranks see a, a b        0 a   1 b

    Bipartite matching by augmenting paths, with a capacity per GPU of one rank, then two, and so
    on until every rank is matched.
    """
    users: dict[str, list[int]] = {name: [] for names in visible_gpus for name in names}
    waiting = [rank for rank, names in enumerate(visible_gpus) if names]
    capacity = 0
    while waiting:
        capacity += 1
        waiting = [
            rank for rank in waiting if not _match(rank, visible_gpus, users, capacity, set())
        ]
    chosen = {rank: name for name, ranks in users.items() for rank in ranks}
    return [
        DeviceAssignment(names.index(chosen[rank]), chosen[rank])
        if names
        else DeviceAssignment(None, "")
        for rank, names in enumerate(visible_gpus)
    ]


def _match(
    rank: int,
    visible_gpus: Sequence[Sequence[str]],
    users: dict[str, list[int]],
    capacity: int,
    full: set[str],
) -> bool:
    """Match a rank to a GPU, moving others if necessary. `full`: GPUs visited on this path."""
    names = visible_gpus[rank]
    first = rank % len(names)
    names = [*names[first:], *names[:first]]
    for name in names:
        if len(users[name]) < capacity:
            users[name].append(rank)
            return True
    for name in names:
        if name in full:
            continue
        full.add(name)
        for other in users[name]:
            if _match(other, visible_gpus, users, capacity, full):
                users[name][users[name].index(other)] = rank
                return True
    return False


def assign_all(
    hosts: Sequence[Hashable], visible_gpus: Sequence[Sequence[str]]
) -> list[DeviceAssignment]:
    """Return the assignments of all ranks of a job, host by host. Pure.

    Both arguments are by rank: a key of the host, and the GPUs that the rank sees.
    """
    assignments = [DeviceAssignment(None, "")] * len(hosts)
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, key in enumerate(hosts) if key == host]
        for rank, given in zip(ranks, assign([visible_gpus[r] for r in ranks]), strict=True):
            assignments[rank] = given
    return assignments


def sharing(
    hosts: Sequence[Hashable], names: Sequence[str], visible_gpus: Sequence[Sequence[str]]
) -> str:
    """Return a warning about hosts whose ranks share GPUs, with the reason and the fix. Pure.

    Empty if no GPU is shared. All arguments are by rank; `names` are the names of the hosts.
    """
    hosts_by_reason: dict[str, list[str]] = {}
    assigned = assign_all(hosts, visible_gpus)
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, key in enumerate(hosts) if key == host and visible_gpus[rank]]
        load = Counter(assigned[rank].gpu for rank in ranks)
        if ranks and max(load.values()) > 1:
            reason = _sharing_reason([visible_gpus[rank] for rank in ranks], load)
            hosts_by_reason.setdefault(reason, []).append(names[ranks[0]])
    if not hosts_by_reason:
        return ""
    places = "; ".join(
        f"on {', '.join(where[:3])}{f' and {len(where) - 3} more' * (len(where) > 3)}: {reason}"
        for reason, where in hosts_by_reason.items()
    )
    return (
        f"ranks share GPUs, so each is slower and has less memory ({places}). Run no more ranks "
        "than GPUs, and make different GPUs or all of them visible to the ranks: "
        "srun --gpus-per-task=1 or --gpu-bind=none, or mpirun without a common CUDA_VISIBLE_DEVICES"
    )


def _sharing_reason(visible_gpus: Sequence[Sequence[str]], load: Counter[str]) -> str:
    """Return why ranks of a host share GPUs, given those that each rank with a GPU sees."""
    ranks, gpus = len(visible_gpus), len({name for names in visible_gpus for name in names})
    idle, busiest = gpus - len(load), max(load.values())
    if not idle and ranks > gpus:
        text = f"{ranks} ranks see {gpus} GPU{'s' * (gpus > 1)}"
        uneven = busiest - min(load.values()) > 1
        return f"{text}, and are bound so that one has {busiest}" if uneven else text
    verb = "is" if idle == 1 else "are"
    return f"{busiest} ranks are bound to one GPU, while {idle} of {gpus} {verb} idle"
