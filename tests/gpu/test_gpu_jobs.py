"""Jobs of the command line on a GPU complete, learn and report."""

import os
from pathlib import Path

import pytest
import torch
from job import completed, losses, metrics, summary, train, write_corpus

from gpu.place import CUDA, ON, gpu
from mntrain.train.forward import check_compiler

pytestmark = [*gpu, pytest.mark.timeout(600)]

TESTS = Path(__file__).parents[1]
STEPS = 30
JOBS = [
    ("fp32", 0, ()),
    ("bf16", 0, ()),
    ("bf16", 1, ()),
    ("bf16-pure", 1, ()),
    ("bf16-pure", 2, ()),
    ("fp16", 2, ()),
    ("bf16", 2, ("--train.compile",)),
]


def skip_without_compiler():
    try:
        check_compiler(torch.device(ON))
    except ValueError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize(("precision", "stage", "more"), JOBS)
def test_a_job_on_the_gpu_learns_and_reports_its_utilisation(tmp_path, precision, stage, more):
    if "--train.compile" in more:
        skip_without_compiler()
    options = ["--device", ON, "--train.precision", precision, "--zero.stage", str(stage)]
    options += ["--train.steps", str(STEPS), *more]
    completed(train(2, tmp_path, *options, timeout=180))
    values = losses(tmp_path)
    assert len(values) == STEPS + 1
    assert sum(values[-6:-1]) / 5 < 0.9 * values[0]
    found = summary(tmp_path)
    assert found["status"] == "completed"
    assert found["world"]["transport"] in (["host", "cuda-aware", "nccl"] if CUDA else [""])
    assert found["model_flops_per_s"] > 0
    utilisation = found["utilisation"]  # None where the GPU's peak is not known
    assert utilisation is None or 0 < utilisation < 1


def test_a_job_on_the_gpu_resumes_from_its_checkpoint_on_the_cpu(tmp_path):
    options = ["--train.steps", str(STEPS), "--zero.stage", "1"]
    where = ["--device", ON, "--run.stop-after", str(STEPS // 2)]
    completed(train(2, tmp_path, *options, *where))
    first = [line["loss"] for line in metrics(tmp_path)]
    completed(train(2, tmp_path, *options, "--device", "cpu"))
    both = [line["loss"] for line in metrics(tmp_path)]
    assert len(both) == STEPS
    assert both[: STEPS // 2] == first
    assert both[-1] < first[-1]


# The work of a sample takes 8 ms on rank 1, and 1 ms on rank 0.
UNEQUAL = """
import os
from mntrain.tasks.lm import LanguageModel
from gpu.place import compute

RANK = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])

class Unequal(LanguageModel):
    def loss(self, model, batch):
        compute((0.001, 0.008)[RANK] * len(batch))
        return super().loss(model, batch)
"""
EQUAL = ["--device", ON, "--train.steps", str(STEPS), "--train.eval-every", "0"]
ENV = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def train_unequal(folder, *options):
    (folder / "unequal.py").write_text(UNEQUAL)
    options = [*EQUAL, *options, "--task", "unequal:Unequal"]
    return completed(train(2, folder, *options, timeout=180, env=ENV))


def test_a_rank_with_more_work_gets_fewer_samples_and_the_losses_stay(tmp_path):
    train_unequal(tmp_path, "--balance.mode", "throughput")
    plans = summary(tmp_path)["shares"]
    assert plans
    assert all(plan["samples"][1] < plan["samples"][0] for plan in plans)
    balanced = losses(tmp_path)
    equal = tmp_path / "equal"
    equal.mkdir()
    train_unequal(equal)
    assert [one["rank"] for one in summary(equal)["stragglers"]] == [1]
    assert balanced == pytest.approx(losses(equal), rel=2e-3)


def test_a_rank_with_more_work_gets_fewer_micro_batches(tmp_path):
    write_corpus(tmp_path, 3000)
    cadence = ["--balance.mode", "cadence", "--train.batch-size", "32"]
    train_unequal(tmp_path, *cadence)
    fast, slow = summary(tmp_path)["cadence"][-1]["batch_counts"]
    assert slow < fast
