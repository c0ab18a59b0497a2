"""`mntrain launch` on one machine: a rank of a job, or of a script for DDP, is killed."""

import os
import sys

import pytest
from job import job_words, losses, summary
from launch import in_own_group, mpirun_words

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

# Saves in each step; in the fourth step of the first start, rank 1 is killed.
DDP = """
import os, pathlib, signal, torch
import torch.distributed as dist
import mntrain.torch_backend

dist.init_process_group("mntrain")
rank, state = dist.get_rank(), pathlib.Path("state.pt")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
done = 0
if state.exists():
    done, weights, moments = torch.load(state)
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(moments)
for step in range(done, 8):
    torch.manual_seed(100 * step + rank)
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        torch.save((step + 1, model.module.state_dict(), optimizer.state_dict()), "new.pt")
        os.replace("new.pt", state)
    dist.barrier()
    if os.environ["LOSE"] == "1" and not done and step == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    print([value.tolist() for value in model.module.parameters()], flush=True)
dist.destroy_process_group()
"""
TASK = """
import os, signal
from mntrain.tasks.lm import LanguageModel

class Killed(LanguageModel):
    calls = 0
    def loss(self, model, batch):
        self.calls += model.training
        rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
        if os.environ["LOSE"] == "1" and rank == "1" and self.calls == 10:
            if not os.path.exists("killed"):
                open("killed", "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


def run(folder, command, *, lose):
    """Run a command on two ranks, under launch if one is to be lost; return its output."""
    begin = [sys.executable, "-m", "mntrain", "launch", "--"] if lose else []
    words = [*begin, *mpirun_words(2), *command]
    settings = {"LOSE": str(int(lose)), "PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}
    with in_own_group(words, folder, env=settings) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err
    said = [line for line in err.splitlines() if line.startswith("mntrain: launch: ")]
    assert [line.split()[2:4] for line in said] == [["start", "2:"], ["start", "2"]] * lose, err
    return out


def test_a_job_on_virtual_nodes_whose_rank_is_killed_ends_as_an_undisturbed_one(tmp_path):
    found = []
    for lose in (True, False):
        folder = tmp_path / f"lose {lose}"
        folder.mkdir()
        (folder / "killed.py").write_text(TASK)
        options = ["--task", "killed:Killed", "--checkpoint.every", "2", "--train.steps", "8"]
        run(folder, job_words(folder, *options, "--comm.ranks-per-node", "1"), lose=lose)
        found.append(losses(folder))
        assert (summary(folder)["resumed_from"] is not None) == lose
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_a_script_for_ddp_with_checkpoints_of_its_own_goes_on(tmp_path):
    found = []
    for lose in (True, False):
        folder = tmp_path / f"lose {lose}"
        folder.mkdir()
        (folder / "train.py").write_text(DDP)
        found.append(run(folder, [sys.executable, "train.py"], lose=lose).splitlines()[-1])
    assert found[0] == found[1]
    assert found[0].startswith("[[[")
