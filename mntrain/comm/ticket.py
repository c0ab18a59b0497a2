"""Tickets of calls: what all ranks must call alike, and where this rank called it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from mntrain.comm.link import Link

MASK = (1 << 63) - 1
SPREAD = 0x9E3779B97F4A7C15  # odd, so that unequal digests stay so; 2^64 by the golden ratio

Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


CHUNK_BYTES = 512 << 10
# A lane is cut into at least so many chunks, unless they get very short: the wire idles while the
# first one is summed within the node, and while the last one is distributed there.
MIN_CHUNKS = 8


class AlgorithmChoice(NamedTuple):
    """An algorithm and the chunks into which it cuts a tensor; see `HierarchyPlan.lengths`."""

    algorithm: str
    chunk_bytes: int = CHUNK_BYTES  # at most, of a lane, over all nodes
    min_chunks: int = MIN_CHUNKS  # of a lane
    concurrent: bool = False  # whether other tensors are in flight at the same time
    link: Link | None = None  # between nodes, if chunks are to suit it

    def among_others(self) -> "AlgorithmChoice":
        """Return the same choice for one of several tensors that are in flight together.

        The others keep the wire busy, so fewer chunks suffice, which cost less CPU time.
        """
        return self._replace(chunk_bytes=2 * self.chunk_bytes, min_chunks=2, concurrent=True)


class Signature(NamedTuple):
    """The properties of a call that all ranks must share. `label` says what it is for: a bucket."""

    verb: str  # a `Verb`, or words for a call that takes no tensor
    label: str = ""
    dtype: torch.dtype | None = None
    bounds: tuple[int, ...] = ()  # of the shards; of the tensor if the verb has no shards
    root: int = 0
    wire: torch.dtype | None = None  # None: the tensor's own
    choice: AlgorithmChoice | None = None
    small: bool = False  # whether every rank gathers the tensors of all ranks
    parts: int = 1  # collectives that the call is made of: of a long tensor of a GPU, several

    def __str__(self) -> str:
        """Return the call in words: "bucket 3: all_reduce of 1024 float32"."""
        text = f"{self.label}: {self.verb}" if self.label else self.verb
        if self.dtype is not None:
            text += f" of {self.bounds[-1]} {_name(self.dtype)}"
        return text

    @property
    def details(self) -> tuple[str, ...]:
        """The rest of the call, each in words, for calls whose text is the same."""
        bounds = ", ".join(map(str, self.bounds[:8])) + (", ..." if self.bounds[8:] else "")
        wire = _name(self.wire) if self.wire else "that of the tensor"
        return (
            f"root {self.root}",
            f"bounds ({bounds})",
            f"wire dtype {wire}",
            str(self.choice),
            f"small={self.small}",
            f"parts {self.parts}",
        )


@dataclass(eq=False, slots=True)
class Ticket:
    """One call of a stream on this rank: a collective, or one that waits for single ranks.

    `ratio`: bytes that it would send without compression, for each that it sends. The engine sets
    the last three: a collective's number in its stream and its digest when it begins, and in
    seconds of `clock.now` when it was submitted.
    """

    signature: Signature
    site: str
    ratio: float = 1
    # Of a call that ranks do not compare: the world's ranks for which it waits, and whether it may
    # end although these call nothing more.
    peers: Sequence[int] | None = None
    may_end: Callable[[], bool] | None = None
    number: int = 0
    digest: int = 0
    queued: float = 0.0


@lru_cache(maxsize=1024)
def digest_of(words: str | Signature) -> int:
    """Return 63 bits that depend on the words only; those of `hash` depend on the process."""
    digest = hashlib.sha256(repr(tuple(words)).encode()).digest()[:8]
    return int.from_bytes(digest, "big") & MASK


@lru_cache(maxsize=1024)
def text_of(signature: Signature) -> str:
    """Return the call in words; str() takes 10 times as long."""
    return str(signature)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
