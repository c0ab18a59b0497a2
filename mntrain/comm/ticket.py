"""Tickets of collectives: what all ranks must call alike, and where this rank called it."""

import hashlib
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from mntrain.comm import clock
from mntrain.comm.link import Link

_MASK = (1 << 63) - 1
_SPREAD = 0x9E3779B97F4A7C15  # odd, so that unequal digests stay so; 2^64 by the golden ratio

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


class Ticket:
    """One collective of a stream on this rank. `number` and `digest` are set when it begins.

    `ratio`: bytes that it would send without compression, for each that it sends. `queued`: when it
    was made, in seconds of `clock.now`.
    """

    __slots__ = ("digest", "number", "queued", "ratio", "signature", "site")

    def __init__(self, signature: Signature, site: str, ratio: float = 1) -> None:
        self.signature, self.site, self.ratio = signature, site, ratio
        self.number = self.digest = 0
        self.queued = clock.now()

    def begin(self, number: int, previous: int) -> None:
        """Set the number, and the digest of 63 bits by which ranks compare the collective.

        It depends on the digest of the previous collective, and so on all that came before: some
        disagree unnoticed, such as two ranks that both broadcast as the root.
        """
        self.number = number
        self.digest = (previous * _SPREAD + digest_of(self.signature)) * _SPREAD & _MASK

    def copy(self) -> "Ticket":
        """Return a ticket of the same call that has not begun."""
        return Ticket(self.signature, self.site, self.ratio)


@lru_cache(maxsize=1024)
def digest_of(words: str | Signature) -> int:
    """Return 63 bits that depend on the words only; those of `hash` depend on the process."""
    digest = hashlib.sha256(repr(tuple(words)).encode()).digest()[:8]
    return int.from_bytes(digest, "big") & _MASK


@lru_cache(maxsize=1024)
def text_of(signature: Signature) -> str:
    """Return the call in words; str() takes 10 times as long."""
    return str(signature)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
