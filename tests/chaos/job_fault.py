"""A job of `python -m mntrain` that one rank starts otherwise.

    mpirun -n 3 python job_fault.py KIND RANK RUN_DIR [options]

Every rank writes its own copy of the data and the task, as nodes without a shared file system have.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from job import SMALL, write_corpus

from mntrain.__main__ import main as mntrain_job

TASK = "from mntrain.tasks.lm import LanguageModel\n\n\nclass Own(LanguageModel):\n    width = %d\n"
NEW_MOUNTS = 0x20000  # CLONE_NEWNS of linux/sched.h
PRIVATE = ["mount", "--make-rprivate", "/"]


def mount(path: Path, *options: str) -> None:
    """Mount an empty file system that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(PRIVATE, check=True)
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", path], check=True)


def main() -> None:
    """Prepare this rank, and become the job."""
    kind, rank, run_dir = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    own = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    now = own == rank
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder)
        if now and kind == "other data":
            corpus.write_bytes(corpus.read_bytes()[::-1])
        (folder / "own_task.py").write_text(TASK % (2 if now and kind == "other task" else 1))
        sys.path.insert(0, name)
        options = ["--data.path", str(corpus), "--run.dir", str(run_dir), *SMALL]
        options += ["--task", "own_task:Own", "--checkpoint.every", "2"]
        if now and kind == "other option":
            options += ["--optim.lr", "0.1"]
        if now and kind == "other version":
            torch.__version__ = "1.0"
        if own == 0 and kind == "read-only run directory":
            run_dir.mkdir()
            mount(run_dir, "-o", "ro")
        if now and kind == "run directory not shared":
            mount(run_dir.parent)
        code = mntrain_job([*options, *sys.argv[4:]])
    sys.exit(code)


if __name__ == "__main__":
    main()
