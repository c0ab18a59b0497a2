"""The link between two nodes, from which lengths of chunks follow. Measured, or given.

What follows from it is rounded to powers of two, so that noise of the measurement
(`links.measure_link`) rarely changes it. No sum depends on it: wherever a tensor is cut, its
elements are summed in the same order.
"""

import math
import re
from dataclasses import dataclass

_UNITS = {"us": 1e-6, "ms": 1e-3, "mbit": 1e6 / 8, "gbit": 1e9 / 8}


@dataclass(frozen=True)
class Link:
    """Seconds of a message without content from rank to rank, and the bytes per second."""

    latency_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, text: str) -> "Link":
        """Return the link of words such as "100gbit,5us". Raises ValueError for others."""
        number = r"(\d+(?:\.\d+)?)"
        found = re.fullmatch(rf"{number}([mg]bit),{number}([um]s)", text.lower())
        values = [float(found[1]), float(found[3])] if found else []
        if found is None or 0 in values:
            raise ValueError("must be a rate and a latency, such as 100gbit,5us")
        return cls(values[1] * _UNITS[found[4]], values[0] * _UNITS[found[2]])

    def bytes_during(self, messages: float) -> float:
        """Return the bytes that pass while so many short messages do, one after the other."""
        return messages * self.latency_s * self.bytes_per_s


def power_of_two(number: float) -> int:
    """Return the largest power of two that is no larger; of a number below 1 one, and of 0 none."""
    return 1 << max(0, math.floor(math.log2(number))) if number else 0
