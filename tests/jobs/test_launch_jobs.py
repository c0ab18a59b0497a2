"""`mntrain launch` on one machine: a rank of a script for DDP is killed."""

import json
import os
import sys

import pytest
import torch
from launch import in_own_group, mpirun_words

SCRIPT = """
import json, os, pathlib, signal, torch
import torch.distributed as dist
import mntrain.torch_backend

dist.init_process_group("mntrain")
rank, state, killed = dist.get_rank(), pathlib.Path("state.pt"), pathlib.Path("killed")
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
    dist.all_reduce(total := loss.detach().clone())
    if rank == 0:
        with open("losses", "a") as file:
            print(json.dumps([step, total.item()]), file=file)
        torch.save((step, model.module.state_dict(), optimizer.state_dict()), "new.pt")
        os.replace("new.pt", state)
    dist.barrier()
    if rank == 1 and step == 4 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def losses_alone():
    """The sums of both ranks' losses by step, in this process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(1, 9):
        losses = []
        for rank in (0, 1):
            torch.manual_seed(100 * step + rank)
            losses.append(model(torch.randn(2, 4)).square().mean())
        found.append([step, sum(losses).item()])
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.exhaustive  # its parts are in unit/launch/test_launch.py and test_slurm.py
@pytest.mark.timeout(600)
def test_a_script_for_ddp_that_saves_by_itself_goes_on_as_an_undisturbed_one(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "mntrain", "launch", "--", *mpirun_words(2)]
    settings = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    with in_own_group([*words, sys.executable, "train.py"], tmp_path, env=settings) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err
    said = [line for line in err.splitlines() if line.startswith("mntrain: launch: ")]
    assert [line.split()[2:4] for line in said] == [["start", "2:"], ["start", "2"]], err
    # It saves in each step, and takes none again.
    noted = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert [step for step, _ in noted] == list(range(1, 9))
    torch.testing.assert_close(noted, losses_alone(), rtol=1e-5, atol=1e-6)
