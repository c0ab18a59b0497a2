"""The network of a simulation: when the first and the last byte of a message arrive.

Between nodes, a node sends one message after the other at the rate of its link, and receives so,
both at once. A message is under way for the latency, and is late by a random time on top. Left out:
switches and their buffers, the way through them, packets and their loss, and messages within a node
that share the rate of its memory.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """Seconds from end to end of an empty message, and bytes per second."""

    latency_s: float
    rate: float


@dataclass(frozen=True)
class NetworkModel:
    """Links by level, and what messages cost.

    - `rates`: bytes per second of single nodes, by node and direction ("out" or "in").
    - `message_s`, `byte_s`: a CPU's time for each message that it sends or receives, and a byte.
    - `eager_bytes`: longer messages wait until their receive has been posted.
    - `late_s`: at most, by which a message is late at random.
    """

    inside: Link = Link(0.5e-6, 10e9)
    between: Link = Link(5e-6, 12.5e9)
    rates: dict[tuple[int, str], float] = field(default_factory=dict)
    message_s: float = 0.0
    byte_s: float = 0.0
    eager_bytes: int = 64 << 10
    late_s: float = 0.0


class Network:
    """The links of nodes, in virtual time. `nodes` maps ranks to nodes."""

    def __init__(self, model: NetworkModel, nodes: Sequence[int], rng: random.Random) -> None:
        self.model, self._nodes, self._random = model, nodes, rng
        self._free: defaultdict[tuple[int, str], float] = defaultdict(float)  # links, from when on

    def latency(self, source: int, target: int) -> float:
        """Return the seconds that an empty message between two ranks is under way."""
        same = self._nodes[source] == self._nodes[target]
        return (self.model.inside if same else self.model.between).latency_s

    def leave(self, now: float, source: int, target: int, nbytes: int) -> float:
        """Send a message, and return when its first byte is with its receiver."""
        here, there = self._nodes[source], self._nodes[target]
        if here == there:
            return now + self.model.inside.latency_s
        begun = max(now, self._free[here, "out"])
        rate = self.model.rates.get((here, "out"), self.model.between.rate)
        self._free[here, "out"] = begun + nbytes / rate
        return begun + self.model.between.latency_s

    def enter(self, now: float, source: int, target: int, nbytes: int) -> float:
        """Receive a message whose first byte is there, and return when all of it is."""
        here, there = self._nodes[source], self._nodes[target]
        late_s = self._random.uniform(0, self.model.late_s) if self.model.late_s else 0.0
        if here == there:
            return now + nbytes / self.model.inside.rate + late_s
        own = self.model.between.rate
        slowest = min(self.model.rates.get(end, own) for end in ((here, "out"), (there, "in")))
        received = max(now, self._free[there, "in"]) + nbytes / slowest
        self._free[there, "in"] = received
        return received + late_s
