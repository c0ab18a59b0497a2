"""The results of a benchmark run and their JSON form, in which names carry units."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mntrain.bench.limits import HardwareLimits


@dataclass(frozen=True)
class BenchCase:
    """One collective by one algorithm, or by the MPI library, at one size."""

    verb: str
    algorithm: str
    size_bytes: int
    dtype: str
    limit_s: float
    times_s: tuple[float, ...] = ()
    """Of the slowest rank, by round; empty if the case was skipped."""
    wrong_ranks: tuple[int, ...] = ()
    """The ranks with a wrong result, which makes the times invalid."""

    @property
    def skipped(self) -> bool:
        """True if there was no time to run it."""
        return not (self.times_s or self.wrong_ranks)

    @property
    def timed(self) -> bool:
        """True if it has valid times."""
        return bool(self.times_s) and not self.wrong_ranks

    @property
    def median_s(self) -> float:
        """The median time."""
        return median(self.times_s)

    @property
    def share(self) -> float:
        """The speed as a fraction of the limit's."""
        return self.limit_s / self.median_s

    @property
    def bandwidth(self) -> float:
        """The tensor's bytes over the median time, in bytes/s."""
        return self.size_bytes / self.median_s


@dataclass(frozen=True)
class BenchResults:
    """All results of a run. `facts` describes the machine and the command, ready for JSON."""

    facts: Mapping[str, Any]
    limits: HardwareLimits
    cases: tuple[BenchCase, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        names = ("verb", "algorithm", "size_bytes")
        without_time = [
            {name: getattr(case, name) for name in names} | {"ranks": list(case.wrong_ranks)}
            for case in self.cases
            if not case.timed
        ]
        return {
            **self.facts,
            "link_bytes_per_s": self.limits.link,
            "copy": [
                {"size_bytes": size, "bytes_per_s": speed}
                for size, speed in self.limits.copy.items()
            ],
            "limit": self.limits.description,
            "results": [
                asdict(case)
                | {
                    "median_s": case.median_s,
                    "bandwidth_bytes_per_s": case.bandwidth,
                    "share_of_limit": case.share,
                }
                for case in self.cases
                if case.timed
            ],
            "skipped": [case for case in without_time if not case["ranks"]],
            "wrong": [case for case in without_time if case["ranks"]],
        }
