"""Which algorithm moves a tensor of which size, and in pieces of which length. Pure."""

from dataclasses import dataclass, replace

ALGORITHMS = ("lanes", "leader", "flat", "naive")
CHUNK_BYTES = 512 << 10
# A lane goes in at least so many pieces, unless they get very short: the wire idles while the first
# one is added, and the last one is.
MIN_CHUNKS = 8


@dataclass(frozen=True)
class AlgorithmChoice:
    """One way to move a tensor."""

    algorithm: str
    piece_bytes: int = CHUNK_BYTES  # that a lane has in one piece, over all nodes
    pieces: int = MIN_CHUNKS  # of a lane, at least
    alone: bool = True  # whether no other tensor is under way meanwhile

    def __post_init__(self) -> None:
        """Check the algorithm's name: ValueError for an unknown one."""
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"unknown algorithm {self.algorithm!r}: choose auto, {', '.join(ALGORITHMS)}"
            )

    def among_others(self) -> "AlgorithmChoice":
        """The same for one of several tensors that are under way at a time.

        The others keep the wire busy, so fewer pieces do, which take less of the core.
        """
        return replace(self, piece_bytes=2 * self.piece_bytes, pieces=2, alone=False)

    def __str__(self) -> str:
        """As a person says it: "lanes, 1 MiB pieces"."""
        kib = self.piece_bytes // 1024
        size = f"{kib // 1024} MiB" if kib % 1024 == 0 else f"{kib} KiB"
        return f"{self.algorithm}, {size} pieces"


@dataclass(frozen=True)
class AlgorithmTable:
    """A choice for every size: up to so many bytes, ascending; the last one also beyond."""

    steps: tuple[tuple[int, AlgorithmChoice], ...]

    def of(self, nbytes: int) -> AlgorithmChoice:
        """The choice for a tensor of so many bytes."""
        for most, choice in self.steps:
            if nbytes <= most:
                return choice
        return self.steps[-1][1]

    def among_others(self) -> "AlgorithmTable":
        """See `AlgorithmChoice.among_others`."""
        return AlgorithmTable(tuple((most, choice.among_others()) for most, choice in self.steps))

    @classmethod
    def always(cls, algorithm: str, piece_bytes: int = CHUNK_BYTES) -> "AlgorithmTable":
        """One choice for all sizes. ValueError for an unknown algorithm."""
        return cls(((0, AlgorithmChoice(algorithm, piece_bytes)),))
