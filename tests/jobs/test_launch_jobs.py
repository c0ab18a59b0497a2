"""`mntrain launch` on one machine: a rank of a job, or of a script for DDP, is killed."""

import json
import os
import sys
from itertools import pairwise

import pytest
from job import job_words, losses, summary
from launch import in_own_group, mpirun_words

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

# Kills rank 1 once; and notes the losses of the run by step.
BEGIN = """
import json, os, pathlib, signal, torch

def lose(rank, step, last):
    if os.environ["LOSE"] == "1" and rank == 1 and step == last and not os.path.exists("killed"):
        open("killed", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)

def note(rank, step, loss):
    if rank == 0:
        with open("losses", "a") as file:
            print(json.dumps([step, loss]), file=file)
"""
# Saves in each step.
DDP = f"""{BEGIN}
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
for step in range(done + 1, 9):
    torch.manual_seed(100 * step + rank)
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    note(rank, step, loss.item())
    if rank == 0:
        torch.save((step, model.module.state_dict(), optimizer.state_dict()), "new.pt")
        os.replace("new.pt", state)
    dist.barrier()
    lose(rank, step, 4)
dist.destroy_process_group()
"""
# Saves in the memory of two virtual nodes alone.
OWN_LOOP = f"""{BEGIN}
import time
import mntrain

with mntrain.init(device="cpu", ranks_per_node=1) as world:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.1, stage=1)
    checkpoints = world.checkpoints(
        "run", model=model, optimizer=optimizer, every=0, local=os.path.abspath("memory"),
        local_every=2,
    )
    with checkpoints:
        done = checkpoints.restore()
        for step in range(done + 1, 21):
            torch.manual_seed(100 * step + world.rank)
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note(world.rank, step, world.mean(loss.item()))
            checkpoints.save(step)
            time.sleep(0.05)
            lose(world.rank, step, 15)
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


@pytest.mark.parametrize(
    ("script", "last"), [pytest.param(DDP, 8, id="DDP"), pytest.param(OWN_LOOP, 20, id="own loop")]
)
def test_a_script_that_saves_by_itself_goes_on_with_the_losses_of_an_undisturbed_one(
    tmp_path, script, last
):
    found = []
    for lose in (True, False):
        folder = tmp_path / f"lose {lose}"
        folder.mkdir()
        (folder / "train.py").write_text(script)
        out = run(folder, [sys.executable, "train.py"], lose=lose)
        noted = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
        begins = [
            step for step, after in pairwise([0, *(step for step, _ in noted)]) if after <= step
        ]
        assert noted[0][0] == 1
        assert len(begins) == (lose and script is OWN_LOOP), noted  # DDP saves each step
        assert ("restored step" in out) == (lose and script is OWN_LOOP)
        found.append(dict(noted))
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(1, last + 1))
    assert not list(tmp_path.glob("*/memory/*"))
