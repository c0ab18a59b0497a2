"""Peak memory of a rank, with shared pages counted in part."""

from pathlib import Path


class Peak:
    """A rank's peak memory above its memory at construction, in bytes.

    A page that k ranks have mapped counts 1/k for each, so that the sum over the ranks of a node is
    physical memory. Linux reports the peak of the whole resident set, and the current size of the
    shared memory in it, both whole and in part (Pss_Shmem). Therefore

        peak = VmHWM - RssShmem + Pss_Shmem

    minus the same at construction. This assumes that shared memory is as large at the peak as now:
    growth after the peak is missed. Mapped files (the programs) count whole and cancel out. Shared
    pages that no rank has touched do not count.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = _now("VmRSS")

    def bytes(self) -> int:
        """Return the peak so far. All ranks of the node must still hold their memory."""
        return _now("VmHWM") - self._before

    @staticmethod
    def shared() -> dict[str, int]:
        """Return the shared memory in this rank's resident set, and its part of it."""
        return {"mapped": _of("status", "RssShmem"), "part": _of("smaps_rollup", "Pss_Shmem")}


def _now(whole: str) -> int:
    """Return a resident set size in which shared memory counts in part."""
    shared = Peak.shared()
    return _of("status", whole) - shared["mapped"] + shared["part"]


def _of(file: str, field: str) -> int:
    """Return a field of this process's memory in /proc, in bytes."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
