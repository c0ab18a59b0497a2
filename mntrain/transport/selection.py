"""Which transport, of those that work here. Pure."""

from collections.abc import Mapping, Sequence

from mntrain.comm.collectives import Transport
from mntrain.comm.topology import Topology

TRANSPORTS: tuple[Transport, ...] = ("host", "cuda-aware", "nccl")
NOISE = 0.95  # another transport than host is at most so much of its time


class UnusableError(ValueError):
    """What was asked for does not work here, as all ranks have found."""


def expect_usable(wanted: str, why_not: str) -> None:
    """Raise UnusableError if what was asked for does not work here."""
    if why_not:
        raise UnusableError(
            f"transport {wanted}: {why_not}; choose host, which works with every MPI, or auto"
        )


def known(wanted: str) -> None:
    """Raise ValueError unless there is such a transport."""
    if wanted not in ("auto", *TRANSPORTS):
        raise ValueError(f"transport {wanted!r} is unknown: choose auto, {', '.join(TRANSPORTS)}")


def all_or_none(said: Sequence[str]) -> str:
    """Why not all ranks can use a transport: what the first that cannot says, and who else."""
    refusing = [rank for rank, why in enumerate(said) if why]
    if not refusing:
        return ""
    others = f" (and {len(refusing) - 1} more)" if len(refusing) > 1 else ""
    return f"rank {refusing[0]}{others}: {said[refusing[0]]}"


def why_no_nccl(topology: Topology, gpus: Sequence[str]) -> str:
    """Why the GPUs of the nodes, named by rank ('' where there is none), cannot use NCCL."""
    if not all(gpus):
        return f"rank {list(gpus).index('')} has no GPU"
    sizes = {len(node) for node in topology.nodes}
    if sizes == {1}:
        return "there is one rank a node, and nothing to do within it"
    if len(sizes) > 1:
        return "nodes have different numbers of ranks"
    for node in topology.nodes:
        for rank in node:
            others = [other for other in node if other < rank and gpus[other] == gpus[rank]]
            if others:
                return f"rank {others[0]} and rank {rank} share a GPU, which NCCL does not allow"
    return ""


def fastest(seconds: Mapping[Transport, float]) -> Transport:
    """The transport of the shortest time; host, unless another is shorter by more than noise."""
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] <= NOISE * seconds["host"] else "host"


def line(
    chosen: Transport, seconds: Mapping[Transport, float], why_not: Mapping[Transport, str]
) -> str:
    """What was chosen and why, in a line."""
    times = ", ".join(f"{name} {1e3 * took:.1f} ms" for name, took in seconds.items())
    parts = [f"{chosen} ({times} a bucket)" if len(seconds) > 1 else chosen]
    parts += [f"not {name}: {why}" for name, why in why_not.items()]
    return "; ".join(parts)
