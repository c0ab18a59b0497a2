"""Checks of one host: its shared memory and its limits. Local; MPI need not run."""

import os
import re
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from mntrain.checks import launcher
from mntrain.checks.finding import ORDER, Finding, Status, passed

SHM = Path("/dev/shm")
# Of MPICH's segment: measured with MPICH 5.0 on 1 to 4 ranks, 1,058,000 bytes for each.
MPICH_BYTES_PER_RANK = 1_100_000
SEGMENTS = "mpich_shm_*"
FEWEST_FILES = 64  # ranks of small jobs on one node had up to 46 open, and some more for data
_MIN_AGE_S = 60.0  # of a segment that is called left behind: a starting rank may not have mapped it
_MB = 1_000_000


def shared_memory(library: str, ranks: int, *, creates: bool = True, folder: Path = SHM) -> Finding:
    """Check that MPI can make its segment in /dev/shm for the `ranks` of this host.

    Only the rank that `creates` the segment, local rank 0, compares the free space: when another
    one looks, the segment may lie there; it compares the size of all of /dev/shm. MPICH would end
    with a signal; other libraries use slower ways.
    """
    if sys.platform != "linux":
        return passed("shared memory does not lie in a folder on this system")
    bad: Status = "fail" if library.startswith("MPICH") else "warn"
    fix = "mount a tmpfs there; in a container, start it with --ipc=host or --shm-size=1g"
    try:
        free = os.statvfs(folder)
    except OSError as error:
        return Finding(bad, f"{folder} cannot be used ({error.strerror})", fix)
    if free.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
        return Finding(bad, f"{folder} is read-only, and MPI's shared memory lies there", fix)
    needed = MPICH_BYTES_PER_RANK * ranks
    space = (free.f_bavail if creates else free.f_blocks) * free.f_frsize
    if space < needed:
        left = left_behind(folder)
        dead = sum(path.stat().st_size for path in left)
        if dead:
            fix = f"remove {dead / _MB:.1f} MB of dead jobs ({_removal(left)}), or {fix}"
        return Finding(
            bad,
            f"{folder} has {space / _MB:.1f} MB{' free' * creates}, and MPI needs "
            f"{needed / _MB:.1f} MB for the {ranks} ranks of this host",
            fix,
        )
    return passed(f"{folder}: {space / _MB:.0f} MB{' free' * creates}")


def shared_memory_at_start(environment: Mapping[str, str], library: str) -> Finding:
    """Check /dev/shm for the ranks that the launcher says are on this host. Before MPI starts."""
    local_rank = launcher.first_number(environment, launcher.LOCAL_RANK_VARIABLES)
    return shared_memory(library, launcher.local_size(environment), creates=not local_rank)


def segments_left_behind(folder: Path = SHM) -> Finding:
    """Look for segments that killed jobs of this user have left in /dev/shm."""
    left = left_behind(folder)
    if not left:
        return passed(f"no segments of dead jobs in {folder}")
    size = sum(path.stat().st_size for path in left) / _MB
    return Finding(
        "warn",
        f"{len(left)} segments of dead jobs lie in {folder}, {size:.1f} MB in all",
        _removal(left),
    )


def _removal(paths: list[Path]) -> str:
    """Return the command that removes files of one folder: each by name, lest others match."""
    return f"cd {paths[0].parent} && rm {' '.join(path.name for path in paths)}"


def left_behind(folder: Path = SHM) -> list[Path]:
    """Return MPICH's segments of this user, a minute old, that no visible process uses.

    A process in a container of its own may use one that is not visible here, so they are named and
    not removed.
    """
    now, found = time.time(), []
    for path in folder.glob(SEGMENTS):
        try:
            status = path.stat()
        except OSError:
            continue  # its job has removed it meanwhile
        if status.st_uid == os.getuid() and now - status.st_ctime > _MIN_AGE_S:
            found.append(path)
    used = _used_files() if found else set()
    return sorted(path for path in found if str(path) not in used)


def _used_files() -> set[str]:
    """Return the paths of files that processes have mapped or open, as far as one may see."""
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # In this order: a process opens the file, maps it and then closes it.
        with suppress(OSError):  # the process has ended, or is another user's
            for file in (process / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    used.add(os.readlink(file))
        with suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            used |= {line.split(maxsplit=5)[-1] for line in lines if "mpich_shm_" in line}
    return used


def open_files(ranks: int) -> Finding:
    """Check that this process may open its files, and connect to each of the job's ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 256 + 2 * ranks
    if not 0 <= soft < needed:
        return passed(f"ulimit -n: {soft if soft >= 0 else 'unlimited'}")
    fix = f"ulimit -n {needed} before the job is started"
    if 0 <= hard < needed:
        fix = (
            f"raise the hard limit of {hard} on all hosts to {needed}: nofile in limits.conf, "
            "docker run --ulimit nofile, LimitNOFILE of slurmd"
        )
    return Finding(
        "fail" if soft < FEWEST_FILES else "warn",
        f"a rank may open {soft} files (ulimit -n), and may need {needed} for its data and for "
        f"connections to {ranks} rank{'s' * (ranks > 1)}",
        fix,
    )


def locked_memory(fabrics: Path = Path("/sys/class/infiniband")) -> Finding:
    """Check that this process may lock memory (ulimit -l) if the host has an RDMA network."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = sorted(path.name for path in fabrics.glob("*"))
    if devices and 0 <= soft < 1 << 30:
        return Finding(
            "warn",
            f"a rank may lock {soft / _MB:.1f} MB of memory (ulimit -l), and the network "
            f"{devices[0]} locks all buffers: MPI may fall back to TCP or end",
            "ask the administrator for ulimit -l unlimited (memlock in limits.conf; under Slurm "
            "PropagateResourceLimitsExcept=MEMLOCK)",
        )
    network = f"for {', '.join(devices)}" if devices else "no RDMA network needs it"
    limit = "unlimited" if soft < 0 else f"{soft / _MB:.1f} MB"
    return passed(f"ulimit -l: {limit}, {network}")


def merge(findings: Iterable[tuple[str, Finding]]) -> Finding:
    """Return the worst of one check's findings, by host; it names the hosts unless it is of all.

    Where hosts differ in the text alone, the first counts.
    """
    by_host = list(findings)
    bad = max(by_host, key=lambda item: ORDER.index(item[1].status))[1]
    hosts = {host: None for host, found in by_host if found.status == bad.status}
    if bad.status == "pass" or len(hosts) == len(dict(by_host)):
        return bad
    names = ", ".join(list(hosts)[:4]) + (f" and {len(hosts) - 4} others" if len(hosts) > 4 else "")
    return Finding(bad.status, f"{names}: {bad.text}", bad.fix)


# Flags of a CPU with instructions for a dtype, in /proc/cpuinfo: those of x86, and those of Arm.
_INSTRUCTIONS = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "fphp"},
}


def arithmetic(dtype: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """Check that this CPU has instructions for bf16 or fp16; others convert to fp32 and back."""
    try:
        line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        line = None
    if line is None or _INSTRUCTIONS[dtype] & set(line[1].split()):
        return passed(f"nothing is known to make {dtype} slow on this CPU")
    return Finding(
        "warn",
        f"this CPU has no instructions for {dtype}, which may take several times as long as fp32",
        "give --train.precision fp32 on CPUs",
    )
