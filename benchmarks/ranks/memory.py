"""What a rank needs of its node's memory, whichever of it is shared."""

from pathlib import Path


class Peak:
    """A rank's peak of memory above what it has when this is made, in bytes.

    It is the peak of the resident set, in which memory that is shared between ranks counts only in
    part: a page that k ranks have mapped counts 1/k for each, so that the sum over a node's ranks
    is what is physically there; of two ranks the one that reads the other's pages has more of them
    than the other. Linux tells the peak of the whole set, and now, of shared memory,
    how much is in it and what part is this rank's (Pss_Shmem). Therefore

        peak = VmHWM - RssShmem + Pss_Shmem

    and less the same for the beginning. It takes shared memory to be as large at the peak as at the
    end; where it grew after the peak, that much is missing. Files, which are the programs
    themselves, count whole, and cancel out. Pages of shared memory that nobody has touched do not
    count.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
        self._before = _now("VmRSS")

    def bytes(self) -> int:
        """The peak so far. All ranks of the node must still have their memory."""
        return _now("VmHWM") - self._before

    @staticmethod
    def shared() -> dict[str, int]:
        """What of shared memory is in this rank's resident set, and what part is its own."""
        return {"mapped": _of("status", "RssShmem"), "part": _of("smaps_rollup", "Pss_Shmem")}


def _now(whole: str) -> int:
    """A resident set of which shared memory counts in part."""
    shared = Peak.shared()
    return _of("status", whole) - shared["mapped"] + shared["part"]


def _of(file: str, field: str) -> int:
    """A figure of this process's memory from /proc, in bytes."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
