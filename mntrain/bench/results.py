"""What was measured, and how it is kept: every figure with its unit in its name."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mntrain.bench.limits import HardwareLimits


@dataclass(frozen=True)
class BenchCase:
    """A verb by an algorithm, or by the MPI library, at one size."""

    verb: str
    algorithm: str
    size_bytes: int


@dataclass(frozen=True)
class SkippedCase(BenchCase):
    """What was left out, since it would have taken too long."""

    predicted_s: float  # once, all in all
    allowed_s: float


@dataclass(frozen=True)
class WrongCase(BenchCase):
    """What gave a wrong result, which has no speed."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TimedCase(BenchCase):
    """What was measured, with every result right."""

    dtype: str
    limit_s: float
    times_s: tuple[float, ...]  # each that of the slowest rank

    @property
    def median_s(self) -> float:
        """The median of the times."""
        return median(self.times_s)

    @property
    def share(self) -> float:
        """What share of the limit's speed this is; 1.0 is the limit."""
        return self.limit_s / self.median_s

    @property
    def bandwidth(self) -> float:
        """Bytes of the tensor by the median time: bytes/s."""
        return self.size_bytes / self.median_s


@dataclass(frozen=True)
class BenchResults:
    """All of one run. `facts` are what was measured where, ready for JSON."""

    facts: Mapping[str, Any]
    limits: HardwareLimits
    timed: tuple[TimedCase, ...]
    skipped: tuple[SkippedCase, ...]
    wrong: tuple[WrongCase, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object of everything."""
        return {
            **self.facts,
            "link_bytes_per_s": self.limits.link,
            "copy": [
                {"size_bytes": size, "bytes_per_s": speed}
                for size, speed in self.limits.copy.items()
            ],
            "limit": self.limits.meaning,
            "results": [
                {
                    "verb": case.verb,
                    "algorithm": case.algorithm,
                    "size_bytes": case.size_bytes,
                    "dtype": case.dtype,
                    "median_s": case.median_s,
                    "bandwidth_bytes_per_s": case.bandwidth,
                    "limit_s": case.limit_s,
                    "share_of_limit": case.share,
                    "times_s": list(case.times_s),
                }
                for case in self.timed
            ],
            "skipped": [asdict(case) for case in self.skipped],
            "wrong": [asdict(case) for case in self.wrong],
        }
