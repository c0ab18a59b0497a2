"""Devices: which one a rank gets, and how a batch gets there."""

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

    index: int | None  # of its GPU, in the rank's own numbering; None: the CPU
    gpu: str  # the GPU's name, the same for every rank that sees it; empty on the CPU

    @property
    def device(self) -> torch.device:
        """The device, as torch calls it."""
        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)


def move(batch: Any, device: torch.device, floats: torch.dtype | None = None) -> Any:
    """A batch with every tensor in it on a device: in tuples, lists and dicts, or by its own `to`.

    Nothing waits for a GPU: tensors reach it through pinned memory. With `floats`, floating-point
    tensors are cast to that dtype.
    """
    if isinstance(batch, Tensor):
        dtype = floats if floats is not None and batch.is_floating_point() else batch.dtype
        if device.type == "cuda" and batch.device.type == "cpu" and not batch.is_pinned():
            batch = batch.pin_memory()  # else the copy would wait for all that is queued before it
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
    """The names of the GPUs that this rank may have, in its own numbering; none for the CPU. Local.

    `auto` is CUDA where there is any. Raises ValueError for an unknown name, or for `cuda` where
    there is none.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {wanted!r} is unknown: choose auto, cpu or cuda")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return []
    if not torch.cuda.is_available():
        raise ValueError(
            "device cuda was asked for, but torch sees no GPU here: choose cpu or auto, or "
            "install a CUDA build of torch and make a GPU visible to the job"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [
        name_of(torch.cuda.get_device_properties(index), index, visible)
        for index in range(torch.cuda.device_count())
    ]


def name_of(properties: Any, index: int, visible: Sequence[str]) -> str:
    """The name of a GPU that all ranks of its host know it by: its UUID, where it can be had. Pure.

    `properties` are torch's, `index` is the rank's own, `visible` what CUDA_VISIBLE_DEVICES lists.
    Parts of one GPU (MIG) may all have its UUID, but are listed by names of their own. Without a
    UUID it is the place on the bus; without that, what is listed, or the index.
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
    """Deal the GPUs of a host to its ranks. Pure: each of them finds the same.

    `visible_gpus` has, for each rank of the host, the GPUs that it sees, in its own numbering; none: it
    stays on the CPU. As many GPUs as can be are used, and by no more ranks than need be: no rank
    could move to a GPU with fewer ranks, not even by way of others. Of equal ones a rank gets that
    of its place among the ranks.

        four ranks see a b      0 a   1 b   2 a   3 b
        ranks see a, b, c       0 a   1 b   2 c
        ranks see a, a b        0 a   1 b

    A matching that grows by augmenting paths; at first a GPU takes one rank, then two, and so on.
    """
    users: dict[str, list[int]] = {name: [] for names in visible_gpus for name in names}
    waiting = [rank for rank, names in enumerate(visible_gpus) if names]
    most = 0
    while waiting:
        most += 1
        waiting = [rank for rank in waiting if not _place(rank, visible_gpus, users, most, set())]
    chosen = {rank: name for name, ranks in users.items() for rank in ranks}
    return [
        DeviceAssignment(names.index(chosen[rank]), chosen[rank])
        if names
        else DeviceAssignment(None, "")
        for rank, names in enumerate(visible_gpus)
    ]


def _place(
    rank: int,
    visible_gpus: Sequence[Sequence[str]],
    users: dict[str, list[int]],
    most: int,
    full: set[str],
) -> bool:
    """Find a rank a GPU with fewer than `most` ranks, if others may be moved. `full` was tried."""
    names = visible_gpus[rank]
    first = rank % len(names)
    names = [*names[first:], *names[:first]]
    for name in names:
        if len(users[name]) < most:
            users[name].append(rank)
            return True
    for name in names:
        if name in full:
            continue
        full.add(name)
        for other in users[name]:
            if _place(other, visible_gpus, users, most, full):
                users[name][users[name].index(other)] = rank
                return True
    return False


def assign_all(
    hosts: Sequence[Hashable], visible_gpus: Sequence[Sequence[str]]
) -> list[DeviceAssignment]:
    """The same for all ranks of a job: `hosts` says by rank where it runs, `visible_gpus` what it sees."""
    found: list[DeviceAssignment] = [DeviceAssignment(None, "")] * len(hosts)
    for host in dict.fromkeys(hosts):
        here = [rank for rank, other in enumerate(hosts) if other == host]
        for rank, given in zip(here, assign([visible_gpus[rank] for rank in here]), strict=True):
            found[rank] = given
    return found


def sharing(
    hosts: Sequence[Hashable], names: Sequence[str], visible_gpus: Sequence[Sequence[str]]
) -> str:
    """On which hosts ranks share GPUs, why, and what to do; empty where none do. Pure.

    All three are by rank; `names` are the hosts' for people.
    """
    reasons: dict[str, list[str]] = {}
    assigned = assign_all(hosts, visible_gpus)
    for host in dict.fromkeys(hosts):
        here = [rank for rank, other in enumerate(hosts) if other == host and visible_gpus[rank]]
        users = Counter(assigned[rank].gpu for rank in here)
        if here and max(users.values()) > 1:
            reasons.setdefault(
                _why_shared([visible_gpus[rank] for rank in here], users), []
            ).append(names[here[0]])
    if not reasons:
        return ""
    told = "; ".join(
        f"on {', '.join(where[:3])}{f' and {len(where) - 3} more' * (len(where) > 3)}: {why}"
        for why, where in reasons.items()
    )
    return (
        f"ranks share GPUs, so each is slower and has less memory ({told}). Run no more ranks than "
        "GPUs, and let them see different ones or all: srun --gpus-per-task=1 or --gpu-bind=none, "
        "mpirun without a CUDA_VISIBLE_DEVICES that is the same for all"
    )


def _why_shared(visible_gpus: Sequence[Sequence[str]], users: Counter[str]) -> str:
    """Why ranks of a host share GPUs: `visible_gpus` is what those with GPUs see."""
    ranks, gpus = len(visible_gpus), len({name for names in visible_gpus for name in names})
    idle = gpus - len(users)
    if not idle and ranks > gpus:
        more = f"{ranks} ranks see {gpus} GPU{'s' * (gpus > 1)}"
        uneven = max(users.values()) - min(users.values()) > 1
        return f"{more}, and are bound so that one has {max(users.values())}" if uneven else more
    bound = max(users.values())
    return (
        f"{bound} ranks are bound to one GPU, while {idle} of {gpus} {'is' if idle == 1 else 'are'}"
        " idle"
    )
