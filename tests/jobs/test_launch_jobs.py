"""`mntrain launch` on one machine: a rank of a job, or of a script for DDP, is killed."""

import json
import os
import re
import sys
from functools import cache
from itertools import pairwise

import pytest
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
            checkpoints.save(step, now=step == 20)
            time.sleep(0.05)
            lose(world.rank, step, 15)
"""
# In its first start, the nodes' memory is full for a while, and rank 1 is stopped for a while.
TROUBLED = OWN_LOOP.replace(
    "            lose(",
    """            pids, filler = world.gather(os.getpid()), pathlib.Path("memory/filler")
            if not done and world.rank == 0:
                if step == 3:
                    with contextlib.suppress(OSError), filler.open("wb", 0) as file:
                        while file.write(bytes(512)):
                            pass
                if step == 9:
                    filler.unlink()
                if step == 12:
                    stop = f"kill -STOP {pids[1]}; sleep 2; kill -CONT {pids[1]}"
                    subprocess.Popen(["sh", "-c", stop])
            lose(""",
).replace("import time\n", "import contextlib, subprocess, time\n")
SMALL_MEMORY = """mkdir memory && chmod 700 memory
mount -t tmpfs -o size=4m,mode=700 none memory && exec "$@" """


def run(folder, command, *, lose, small_memory=False):
    """Run a command on two ranks, under launch if one is to be lost; return its output."""
    begin = [sys.executable, "-m", "mntrain", "launch", "--"] if lose else []
    if small_memory:
        begin = ["unshare", "--mount", "sh", "-c", SMALL_MEMORY, "sh", *begin]
    words = [*begin, *mpirun_words(2), *command]
    settings = {"LOSE": str(int(lose)), "PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}
    with in_own_group(words, folder, env=settings) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err
    said = [line for line in err.splitlines() if line.startswith("mntrain: launch: ")]
    assert [line.split()[2:4] for line in said] == [["start", "2:"], ["start", "2"]] * lose, err
    return out + err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the losses of a script by step without the loss of a rank."""

    @cache
    def of(script):
        folder = tmp_path_factory.mktemp("undisturbed")
        (folder / "train.py").write_text(script)
        run(folder, [sys.executable, "train.py"], lose=False)
        return losses_of(folder)[0]

    return of


def losses_of(folder):
    """Return the losses by step, the last of each, and how often a start went back."""
    noted = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    assert noted[0][0] == 1
    assert not list(folder.glob("memory/*"))  # after a clean end
    steps = [step for step, _ in noted]
    return dict(noted), sum(after <= before for before, after in pairwise(steps))


def test_a_script_for_ddp_that_saves_by_itself_goes_on_as_an_undisturbed_one(tmp_path, undisturbed):
    (tmp_path / "train.py").write_text(DDP)
    run(tmp_path, [sys.executable, "train.py"], lose=True)
    found, again = losses_of(tmp_path)
    assert sorted(found) == list(range(1, 9))
    assert again == 0  # it saves in each step
    assert found == undisturbed(DDP)


@pytest.mark.exhaustive  # tests/cluster/test_node_memory.py shows most of it
@pytest.mark.parametrize("trouble", [False, True])
def test_an_own_loop_goes_on_from_the_nodes_memory_as_an_undisturbed_one(
    tmp_path, undisturbed, trouble
):
    """Also where the memory was full for a while, and a partner was stopped."""
    if trouble and os.geteuid():
        pytest.skip("needs root to mount a file system")
    (tmp_path / "train.py").write_text(TROUBLED if trouble else OWN_LOOP)
    out = run(tmp_path, [sys.executable, "train.py"], lose=True, small_memory=trouble)
    (step,) = re.findall(r"restored step (\d+) in the nodes' memory", out)
    assert 10 <= int(step) <= 14
    warned = "warning: in the nodes' memory, "
    assert out.count(warned) == trouble, out
    assert ("No space left on device" in out) == trouble
    found, again = losses_of(tmp_path)
    assert (sorted(found), again) == (list(range(1, 21)), 1)
    assert found == undisturbed(OWN_LOOP)
