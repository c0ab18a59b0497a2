"""The algorithm and the chunk length for each size of a tensor. Pure."""

from dataclasses import dataclass, replace

from mntrain.comm.algorithms import check_name

CHUNK_BYTES = 512 << 10
# A lane is cut into at least so many chunks, unless they get very short: the wire idles while the
# first one is summed within the node, and while the last one is distributed there.
MIN_CHUNKS = 8


@dataclass(frozen=True)
class AlgorithmChoice:
    """One way to move a tensor."""

    algorithm: str
    chunk_bytes: int = CHUNK_BYTES  # at most, of a lane, over all nodes
    min_chunks: int = MIN_CHUNKS  # of a lane
    concurrent: bool = False  # whether other tensors are in flight at the same time

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown algorithm."""
        check_name(self.algorithm)

    def among_others(self) -> "AlgorithmChoice":
        """Return the same choice for one of several tensors that are in flight together.

        The others keep the wire busy, so fewer chunks suffice, which cost less of the core.
        """
        return replace(self, chunk_bytes=2 * self.chunk_bytes, min_chunks=2, concurrent=True)

    def __str__(self) -> str:
        """Return words for a person: "lanes, 1 MiB chunks"."""
        kib = self.chunk_bytes // 1024
        size = f"{kib // 1024} MiB" if kib % 1024 == 0 else f"{kib} KiB"
        return f"{self.algorithm}, {size} chunks"


@dataclass(frozen=True)
class AlgorithmTable:
    """A choice for every size: each up to so many bytes, ascending; the last also beyond."""

    steps: tuple[tuple[int, AlgorithmChoice], ...]

    def of(self, nbytes: int) -> AlgorithmChoice:
        """Return the choice for a tensor of `nbytes` bytes."""
        for most, choice in self.steps:
            if nbytes <= most:
                return choice
        return self.steps[-1][1]

    def among_others(self) -> "AlgorithmTable":
        """Return the table of `AlgorithmChoice.among_others` for every size."""
        return AlgorithmTable(tuple((most, choice.among_others()) for most, choice in self.steps))

    @classmethod
    def always(cls, algorithm: str, chunk_bytes: int = CHUNK_BYTES) -> "AlgorithmTable":
        """Return the table of one choice for all sizes. Raises ValueError for an unknown name."""
        return cls(((0, AlgorithmChoice(algorithm, chunk_bytes)),))
