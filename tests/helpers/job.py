"""A small training job for tests: run it as a user does, and read what it wrote."""

import functools
import io
import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from launch import Result, mpirun

from mntrain.__main__ import main
from mntrain.checkpoint.reader import inspect, list_checkpoints, verify

SMALL = [
    *("--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--model.context", "32"),
    *("--train.batch-size", "8", "--train.micro-batch-size", "2", "--train.eval-samples", "13"),
    *("--train.steps", "6", "--optim.warmup-steps", "2", "--device", "cpu"),
]

# The beginning of a module of tasks, and of one whose rank 1 breaks.
RANKED = """
import os, signal, sys, time
from mntrain.tasks import Loss
from mntrain.tasks.lm import LanguageModel

RANK = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
"""
LATE = f'''{RANKED}
FIXED = os.environ.get("FIXED")

class Late(LanguageModel):
    """Breaks in one forward of rank 1, the third, in the way that a subclass says."""
    at, calls = 3, 0
    def loss(self, model, batch):
        self.calls += 1
        if RANK == 1 and self.calls == self.at and not FIXED:
            return self.broken(model, batch)
        return super().loss(model, batch)

class Raises(Late):
    def broken(self, model, batch):
        raise KeyError("a bug of rank one")

class Hangs(Late):
    def broken(self, model, batch):
        while True:
            time.sleep(0.1)
'''


def write_corpus(folder: Path, windows: int = 60) -> Path:
    """A text of so many windows of 32 bytes, which has something to learn."""
    text = "".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(windows * 3))
    path = folder / "corpus.txt"
    path.write_text(text[: windows * 32 + 1])
    return path


def job_words(folder: Path, *options: str) -> list[str]:
    """Return the command of a job on a small model and corpus; the run directory is folder/run."""
    corpus = folder / "corpus.txt" if (folder / "corpus.txt").exists() else write_corpus(folder)
    words = ["--data.path", str(corpus), "--run.dir", str(folder / "run"), *SMALL, *options]
    return [sys.executable, "-m", "mntrain", *words]


def train(
    ranks: int,
    folder: Path,
    *options: str,
    timeout: float = 250,
    env=None,
    cluster=None,
) -> Result:
    """Run a small job on ranks: see `job_words`."""
    settings = {"timeout": timeout, "env": env, "cluster": cluster}
    return mpirun(ranks, job_words(folder, *options), cwd=folder, **settings)


@functools.cache
def losses_alone(*options: str) -> list[float]:
    """The losses of the job with these options in one process; the oracle, run once."""
    with tempfile.TemporaryDirectory() as name:
        completed(train(1, Path(name), *options))
        return losses(Path(name))


def losses(folder: Path) -> list[float]:
    """The losses of every step of the run in folder, and of the evaluation at its end."""
    lines = metrics(folder)
    return [*(line["loss"] for line in lines), lines[-1]["eval_loss"]]


def completed(result: Result) -> Result:
    """The result, which must be a success, without an error while the interpreter ends."""
    assert result.returncode == 0, result.report()
    assert "Exception ignored" not in result.stderr, result.report()
    return result


def ckpt(*words: object) -> tuple[int, str, str]:
    """Run `python -m mntrain ckpt` in this process, and return its code, stdout and stderr."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(["ckpt", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def autopsy(*paths: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m mntrain autopsy`."""
    words = [sys.executable, "-m", "mntrain", "autopsy", *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def lines_of(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl of a run."""
    return [*map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def summary_of(run: Path) -> dict:
    """Return the content of summary.json of a run."""
    return json.loads((run / "summary.json").read_text())


def steps_kept(run: Path) -> list[int]:
    """The steps of the run's checkpoints, the newest first; every byte of them is right."""
    paths = list_checkpoints(run)
    for path in paths:
        verify(path, inspect(path))
    return [inspect(path).step for path in paths]


def metrics(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl of the run in a folder."""
    return lines_of(folder / "run")


def summary(folder: Path) -> dict:
    """Return the content of summary.json of the run in a folder."""
    return summary_of(folder / "run")
