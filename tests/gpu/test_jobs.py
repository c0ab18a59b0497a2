"""Jobs of the command line on a GPU complete, learn and report."""

import pytest
import torch
from job import completed, losses, metrics, summary, train

from gpu.place import CUDA, ON, gpu
from mntrain.train.compiling import check_compiler

pytestmark = [*gpu, pytest.mark.timeout(240)]

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
