"""Backend mntrain of torch.distributed with tensors on a GPU, which all ranks share."""

import sys
from pathlib import Path

import pytest
from job import completed
from launch import mpirun

from gpu.place import ON, device_memory, gpu

pytestmark = gpu

SCRIPTS = Path(__file__).parents[1] / "backend" / "scripts"


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_verb_has_its_result(ranks):
    result = completed(mpirun(ranks, [sys.executable, SCRIPTS / "torch_verbs.py", ON], timeout=250))
    assert result.stdout.count(" tests passed") == ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_fsdp_and_checkpoints_work_as_on_the_cpu(ranks):
    result = completed(mpirun(ranks, [sys.executable, SCRIPTS / "training.py", ON], timeout=250))
    assert result.stdout.count("as over gloo") == 4 * ranks
    assert result.stdout.count("checkpoint: as saved") == ranks


@device_memory
def test_tensors_of_a_gpu_go_to_nccl_where_it_is_asked_for():
    words = [SCRIPTS / "mixed_backends.py", ON, *["cpu:mntrain,cuda:nccl=nccl"] * 2]
    result = completed(mpirun(1, [sys.executable, *words], timeout=250))
    assert "served by nccl in cpu:mntrain,cuda:nccl" in result.stdout
