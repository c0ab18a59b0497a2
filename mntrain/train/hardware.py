"""Speeds of ranks in multiplying matrices, and of nodes' links, compared before training."""

import math
import time
from collections.abc import Sequence

import torch

from mntrain.checks.finding import naming
from mntrain.data.shares import batch_seconds
from mntrain.rank_info import Place

UNEQUAL = 1.2  # times as fast as another rank, from which ranks count as unequal
_SLOW_LINK = 0.5  # of the fastest node's, below which a link is named
_SIZES = {"cpu": 256, "cuda": 4096}  # of the matrices; a product on a CPU takes below a time slice
_SECONDS = 0.05
_LEAST = 3  # products
_HOSTS = 3  # that the text about slow ranks names


def matrix_flops(device: torch.device, dtype: torch.dtype, cores: int) -> float:
    """Return the FLOP/s of a product of square matrices of random numbers; NaN if there is none.

    Local. It is that of the fastest of many products within a twentieth of a second, on a CPU of
    CPU time, so another process that uses the core now and then does not count. There, it is that
    of one core, times the threads of torch, of which at most `cores` count: if ranks share cores,
    several threads would mostly wait for each other. Random generators, peaks of memory and threads
    stay as they are.
    """
    threads = torch.get_num_threads()
    on_cpu = device.type == "cpu"
    if on_cpu and threads > 1:
        torch.set_num_threads(1)
    try:
        seconds = _fastest_s(device, dtype)
    except RuntimeError:  # too little memory, or no such product
        return math.nan
    finally:
        if on_cpu and threads > 1:
            torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return (min(threads, cores) if on_cpu else 1) * 2 * _SIZES[device.type] ** 3 / seconds


def _fastest_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of the fastest of many products, after a first one. Local."""
    size = _SIZES[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = torch.randn(2, size, size, device=device, generator=generator).to(dtype)
    product = left @ right  # loads libraries
    times: list[float] = []
    # Others may hold the core of this thread; on a GPU, it may sleep while it waits.
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    end = clock() + _SECONDS
    while len(times) < _LEAST or clock() < end:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


class Speeds:
    """The FLOP/s of matrix products by rank, all measured at the same time. Pure.

    If that of any rank is not known (NaN), ranks count as equally fast.
    """

    def __init__(self, flops: Sequence[float]) -> None:
        self.flops = flops
        self._speeds = flops if all(map(math.isfinite, flops)) else [1.0] * len(flops)

    def gain(self, samples: int, most: int | None) -> float:
        """Return the time of a batch with equal shares, over that with shares by speed.

        `most` limits the samples of a rank.
        """
        limits = (most,) * len(self._speeds)
        equal = batch_seconds(samples, self._speeds, None)
        return equal / batch_seconds(samples, self._speeds, self._speeds, limits)

    def relative(self) -> dict[int, float]:
        """Return the speed of each rank in those of the fastest."""
        return {rank: speed / max(self._speeds) for rank, speed in enumerate(self._speeds)}

    def slow_ranks(self, places: Sequence[Place]) -> str:
        """Return which ranks hold the others up, and how fast they are; "" if none does.

        `places` is by rank.
        """
        slow = {rank: s for rank, s in self.relative().items() if s * UNEQUAL < 1}
        if not slow:
            return ""
        ratios = [f"{ratio:.2f}" for ratio in sorted(slow.values())]
        hosts = list(dict.fromkeys(places[rank].host for rank in slow))
        more = f" and {len(hosts) - _HOSTS} more hosts" if len(hosts) > _HOSTS else ""
        many = len(slow) > 1
        return (
            f"{naming('rank', list(slow))} on {', '.join(hosts[:_HOSTS])}{more} "
            f"multipl{'y' if many else 'ies'} matrices at "
            f"{' to '.join(dict.fromkeys((ratios[0], ratios[-1])))} of the speed of the fastest "
            f"rank, and hold{'' if many else 's'} the others up"
        )


def slow_links(links: Sequence[float], places: Sequence[Place]) -> str:
    """Return which nodes have slow links; "" if none does, or all are on one host. Pure.

    `links` has the bytes/s of each node's link, and `places` is by rank.
    """
    if len({place.host for place in places}) == 1:
        return ""
    slow = {node: speed for node, speed in enumerate(links) if speed < _SLOW_LINK * max(links)}
    if not slow:
        return ""
    hosts = list(dict.fromkeys(place.host for place in places if place.node in slow))
    more = f" and {len(hosts) - _HOSTS} more hosts" if len(hosts) > _HOSTS else ""
    many = len(slow) > 1
    of_nodes = f"{naming('node', list(slow))} ({', '.join(hosts[:_HOSTS])}{more})"
    return (
        f"the link{'s' if many else ''} of {of_nodes} carr{'y' if many else 'ies'} "
        f"{min(slow.values()) / 1e6:,.0f} MB/s, where the fastest carries "
        f"{max(links) / 1e6:,.0f}: every exchange between nodes waits for it"
    )
