"""The results of a benchmark run and their JSON form, in which names carry units."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from mntrain.bench.limits import HardwareLimits


@dataclass(frozen=True)
class BenchCase:
    """One collective by one algorithm, or by the MPI library, at one size.

    A case without times was skipped. A case with wrong ranks has no valid times.
    """

    verb: str
    algorithm: str
    size_bytes: int
    dtype: str
    limit_s: float
    times_s: tuple[float, ...] = ()
    """Each is the time of the slowest rank."""
    wrong_ranks: tuple[int, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether it was measured, with correct results on all ranks."""
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

    @property
    def timed(self) -> tuple[BenchCase, ...]:
        """The cases that have a valid time."""
        return tuple(case for case in self.cases if case.timed)

    @property
    def skipped(self) -> tuple[BenchCase, ...]:
        """The cases for which there was no time."""
        return tuple(c for c in self.cases if not c.times_s and not c.wrong_ranks)

    @property
    def wrong(self) -> tuple[BenchCase, ...]:
        """The cases with a wrong result."""
        return tuple(case for case in self.cases if case.wrong_ranks)

    def to_json(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        return {
            **self.facts,
            "link_bytes_per_s": self.limits.link,
            "copy": [
                {"size_bytes": size, "bytes_per_s": speed}
                for size, speed in self.limits.copy.items()
            ],
            "limit": self.limits.description,
            "results": [
                {
                    **_name(case),
                    "dtype": case.dtype,
                    "median_s": case.median_s,
                    "bandwidth_bytes_per_s": case.bandwidth,
                    "limit_s": case.limit_s,
                    "share_of_limit": case.share,
                    "times_s": list(case.times_s),
                }
                for case in self.timed
            ],
            "skipped": [_name(case) for case in self.skipped],
            "wrong": [_name(case) | {"ranks": list(case.wrong_ranks)} for case in self.wrong],
        }


def _name(case: BenchCase) -> dict[str, Any]:
    return {"verb": case.verb, "algorithm": case.algorithm, "size_bytes": case.size_bytes}
