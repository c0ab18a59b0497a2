"""The measurements of `bench --json`, as the seconds of a step's communication."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mntrain.comm.topology import Topology
from mntrain.train.plan.traffic import Travel
from zero.layout import Bucket


class BenchFile:
    """The times of collectives on a cluster, by size. Raises ValueError for another file."""

    def __init__(self, path: Path) -> None:
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            self._nodes = [len(node) for node in content["nodes"]]
            times = [
                (case["verb"], case["algorithm"], case["size_bytes"], case["median_s"])
                for case in content["results"]
            ]
        except OSError as error:
            raise ValueError(f"--bench {path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--bench {path}: is not what `python -m mntrain bench --json FILE` writes "
                f"({type(error).__name__}: {error})"
            ) from error
        self._times: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for verb, algorithm, size, seconds in sorted(times):
            self._times.setdefault((verb, algorithm), []).append((size, seconds))

    @property
    def ranks_per_node(self) -> int:
        """The ranks of its largest node."""
        return max(self._nodes)

    def step_s(
        self, plan: Sequence[Bucket], stage: int, topology: Topology, travel: Travel
    ) -> float | None:
        """Return the seconds of a step's collectives, one after another.

        By the measured times of sizes around a bucket's; on another number of nodes times the
        ratio of the bytes that a node sends. None where the algorithm was not measured, and where
        only one of both has several nodes.
        """
        if topology.size == 1:
            return 0.0
        planned, measured = (_bytes_of_node(n) for n in (len(topology.nodes), len(self._nodes)))
        if (planned == 0) != (measured == 0):
            return None
        total = 0.0
        for bucket in plan:
            for verb, own, wire, number in travel.parts(stage, bucket.dtype.itemsize):
                times = self._times.get((verb, travel.algorithm))
                if not times:
                    return None
                total += number * _seconds(times, bucket.numel * (wire if measured else own))
        return total * planned / measured if measured else total


def _bytes_of_node(nodes: int) -> float:
    return (nodes - 1) / nodes


def _seconds(measured: Sequence[tuple[int, float]], nbytes: int) -> float:
    """Return the time of a size, between those measured; above, at the speed of the largest."""
    sizes, seconds = zip(*measured, strict=True)
    if nbytes > sizes[-1]:
        return float(seconds[-1] * nbytes / sizes[-1])
    return float(np.interp(nbytes, sizes, seconds))
