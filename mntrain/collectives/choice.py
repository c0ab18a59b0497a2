"""Which algorithm moves a tensor of which size, and in pieces of which length. Pure."""

from dataclasses import dataclass

ALGORITHMS = ("lanes", "leader", "flat", "naive")
PIECE_BYTES = 512 << 10


@dataclass(frozen=True)
class Choice:
    """One way to move a tensor."""

    algorithm: str
    piece_bytes: int = PIECE_BYTES  # that a lane has in one piece, over all nodes

    def __post_init__(self) -> None:
        """Check the algorithm's name: ValueError for an unknown one."""
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"unknown algorithm {self.algorithm!r}: choose auto, {', '.join(ALGORITHMS)}"
            )

    def __str__(self) -> str:
        """As a person says it: "lanes, 1 MiB pieces"."""
        kib = self.piece_bytes // 1024
        size = f"{kib // 1024} MiB" if kib % 1024 == 0 else f"{kib} KiB"
        return f"{self.algorithm}, {size} pieces"


@dataclass(frozen=True)
class Table:
    """A choice for every size: up to so many bytes, ascending; the last one also beyond."""

    steps: tuple[tuple[int, Choice], ...]

    def of(self, nbytes: int) -> Choice:
        """The choice for a tensor of so many bytes."""
        return next((choice for most, choice in self.steps if nbytes <= most), self.steps[-1][1])

    @classmethod
    def always(cls, algorithm: str, piece_bytes: int = PIECE_BYTES) -> "Table":
        """One choice for all sizes. ValueError for an unknown algorithm."""
        return cls(((0, Choice(algorithm, piece_bytes)),))
