"""Ranks that are started with other options, sources or data: one error before any work."""

from pathlib import Path

from job import job_words
from launch import Result, mpirun

# Rank 1 runs other shell words, in which "$@" is the command of all; options that come last count.
ODD = 'if [ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1 ]; then %s; else exec "$@"; fi'
FIX = "give all ranks the same options, and all nodes the same files"


def start(folder: Path, *options: str, odd: str = 'exec "$@"', ranks: int = 2) -> Result:
    """Run a small job in folder, in which rank 1 runs `odd`, where "$@" is the common command."""
    command = ["sh", "-c", ODD % odd, "sh", *job_words(folder, *options)]
    return mpirun(ranks, command, timeout=250, cwd=folder)


def refused(result: Result, folder: Path) -> str:
    """Return the line that the job says; it must be one, before anything is made."""
    assert not result.timed_out, result.report()
    assert result.returncode == 2, result.report()
    said = [line for line in result.stderr.splitlines() if line.startswith("mntrain:")]
    assert len(said) == 1, result.report()
    assert "Traceback" not in result.stderr
    assert not (folder / "run").exists()
    return said[0]


def test_options_that_differ_are_named_with_values_and_ranks(tmp_path):
    differing = {
        "--train.steps": ("6", "3"),
        "--train.batch-size": ("8", "4"),
        "--comm.bucket-mb": ("25.0", "1.0"),  # an option of the world too: one error, not two
        "--run.resume": ("auto", "never"),
        "--checkpoint.every": ("0", "2"),
    }
    words = " ".join(f"{flag} {other}" for flag, (_, other) in differing.items())
    said = "; ".join(
        f"{flag} differs between ranks: ranks 0, 2 have {usual}, rank 1 has {other}"
        for flag, (usual, other) in differing.items()
    )
    result = start(tmp_path, odd=f'exec "$@" {words}', ranks=3)
    assert refused(result, tmp_path) == f"mntrain: {said}: {FIX}"
