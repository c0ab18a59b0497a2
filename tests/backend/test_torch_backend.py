"""Backend mntrain of torch.distributed, as scripts use it under mpirun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from job import completed
from launch import mpirun

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples" / "torch_backend"
RARE = pytest.mark.exhaustive


def run(ranks, name, *words, **options):
    return mpirun(ranks, [sys.executable, SCRIPTS / name, *words], timeout=250, **options)


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=RARE)])
def test_every_verb_has_its_result_over_the_world_and_parts_of_it(ranks):
    left_over = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "5", "LEFT_OVER": "yes"}
    result = completed(run(ranks, "torch_verbs.py", env=left_over))
    assert result.stdout.count(" tests passed") == ranks
    named = "LOCAL_RANK, RANK, WORLD_SIZE" if ranks > 1 else "LOCAL_RANK"
    assert result.stderr.count(f"mntrain: warning: {named} of the environment were not") == 1


@pytest.mark.exhaustive
def test_each_device_has_the_backend_that_it_was_given():
    words = ["cpu:gloo,cuda:mntrain=gloo", "cpu:mntrain,cuda:nccl=mntrain"]
    result = completed(run(2, "mixed_backends.py", "cpu", *words))
    for backends, served in (word.split("=") for word in words):
        assert result.stdout.count(f"served by {served} in {backends}") == 2


@pytest.mark.exhaustive
def test_torchs_own_tests_pass_as_over_gloo():
    """Some of them; docs/results/torch-suite.md has all."""
    some = ["all_gather_coalesced", "get_rank_size", "sparse_all_reduce", "test_gather"]
    command = [sys.executable, SCRIPTS.parent / "torch_suite.py", "--ranks", "2", "-k", *some]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"mntrain \| (\d+) \|", done.stdout)[1]) > 8, done.stdout


@pytest.mark.thorough
def test_torch_finds_the_backend_without_an_import(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "assert 'RANK' not in os.environ\n"
        "dist.init_process_group('mntrain')\n"
        "dist.all_reduce(tensor := torch.ones(3))\n"
        "assert tensor[0] == int(os.environ['WORLD_SIZE']) == 2\n"
        "print(f\"{dist.get_backend()} {os.environ['RANK'] == str(dist.get_rank())}\\n\", end='')\n"
    )
    result = completed(mpirun(2, [sys.executable, script], timeout=250))
    assert result.stdout.count("mntrain True") == 2


@pytest.mark.thorough
@pytest.mark.usefixtures("no_launcher")
def test_a_process_without_a_launcher_is_told_how_to_start():
    words = [sys.executable, "-c", "import torch.distributed as d; d.init_process_group('mntrain')"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode != 0
    assert "start the script with mpirun or srun" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.usefixtures("no_launcher")
def test_a_script_without_a_launcher_says_that_it_is_one_rank():
    script = (
        "import torch.distributed as dist, mntrain.torch_backend\n"
        "dist.init_process_group('mntrain')\n"
        "print(dist.get_backend_config())"
    )
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=True)
    assert done.stderr.count("the group has one rank, since neither mpirun -n nor srun has") == 1
    assert ("cuda" in done.stdout) == torch.cuda.is_available()


@pytest.mark.exhaustive
def test_a_script_that_spawns_its_ranks_is_told_how_to_start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist, mntrain.torch_backend\n"
        "def main(rank):\n"
        "    dist.init_process_group('mntrain', rank=rank, world_size=2)\n"
        "if __name__ == '__main__':\n"
        "    torch.multiprocessing.spawn(main, nprocs=2)\n"
    )
    result = mpirun(1, [sys.executable, script], timeout=250)
    assert result.returncode not in (0, None), result.report()
    assert "start the script with mpirun" in result.stderr, result.report()


@pytest.mark.exhaustive
def test_another_backend_starts_no_mpi_where_ranks_are_given(tmp_path):
    """Give ranks, as scripts do in a job of Slurm, whose variables name ranks of MPI as well."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True)\n"
        "import os; os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(store.port))\n"
        "os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'True'\n"
        "dist.init_process_group('gloo', rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(3))\n"
        "print('mpi4py' in sys.modules)\n"
    )
    environment = {**os.environ, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    words = [sys.executable, script]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=RARE)])
def test_ddp_fsdp_and_checkpoints_work_as_over_gloo(ranks):
    result = completed(run(ranks, "training.py"))
    assert result.stdout.count("as over gloo") == 4 * ranks
    assert result.stdout.count("checkpoint: as saved") == ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ddp", r"accuracy 0\.9\d* on 2 ranks"),
        ("sync_batchnorm", r"accuracy 0\.9\d* on 2 ranks"),
        ("fsdp", r"loss (0\.\d+), and \1 from the checkpoint"),
        ("accelerate_loop", r"loss 0\.000\d on 2 ranks"),
        ("hf_trainer", r"loss 0\.\d+ on 2 ranks"),
    ],
)
def test_an_example_learns_on_two_ranks(name, said):
    result = completed(mpirun(2, [sys.executable, EXAMPLES / f"{name}.py"], timeout=250))
    assert re.search(said, result.stdout), result.report()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_torch_builds_on_groups_works_as_over_gloo(ranks):
    found, expected = (
        [line.split() for line in completed(run(ranks, "frameworks.py", name)).stdout.splitlines()]
        for name in ("mntrain", "gloo")
    )
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, ours), (_, theirs) in zip(found, expected, strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=1e-5), name


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param("fabric", marks=RARE), "trainer"])
def test_lightning_trains_as_over_gloo(name, tmp_path):
    ours = EXAMPLES / f"lightning_{name}.py"
    theirs = tmp_path / "gloo.py"
    theirs.write_text(ours.read_text().replace('backend="mntrain"', 'backend="gloo"'))
    losses = []
    for script, backend in ((ours, "mntrain"), (theirs, "gloo")):
        result = mpirun(2, [sys.executable, script], timeout=250)
        assert f"distributed_backend={backend}" in result.stderr, result.report()
        if script is ours:  # torch's gloo sometimes aborts while the interpreter ends
            completed(result)
        losses += re.findall(r"loss (0\.000\d+) on 2 ranks", result.stdout)
    assert len(losses) == 2
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-4)


@pytest.mark.exhaustive
def test_lightning_with_other_numbers_than_mpi_is_refused(tmp_path):
    script = tmp_path / "script.py"
    example = EXAMPLES / "lightning_fabric.py"
    script.write_text(example.read_text().replace("devices=2", "devices=1"))
    result = mpirun(2, [sys.executable, script], timeout=250)
    assert result.returncode not in (0, None), result.report()
    said = "the product (1 * 1) does not match the world size (2)"  # Lightning's words
    assert said in result.stderr, result.report()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("averages", "average: all_reduce of 4 float32, called at ", marks=RARE),
        pytest.param("roots", "reduce to rank 1: all_reduce of 4 float32, called", marks=RARE),
        pytest.param("never_sent", "in recv of 12 bytes from rank 1, tag 0 (messages", marks=RARE),
        pytest.param("sender_gone", ": has left the world, or ended its script", marks=RARE),
        pytest.param("late", "in all_reduce of 4 float32 (collective 0 of torch's", marks=RARE),
        pytest.param("late_message", "in recv of 16 bytes from rank 1, tag 0 (mess", marks=RARE),
        pytest.param("ddp_raises", "KeyError: 'a bug of rank one'", marks=RARE),
        ("ddp_differs", "rank 1: all_reduce of 1 float32, called at "),
        pytest.param("ddp_late", "all_reduce of 20 float32 (collective ", marks=RARE),
        pytest.param("ddp_first_step_late", " in ddp_first_step_late", marks=RARE),
        pytest.param("ddp_uneven", ": has left the world, or ended its script", marks=RARE),
        pytest.param("chain_differs", "rank 1: all_reduce of 5 float32, called at ", marks=RARE),
        pytest.param(
            "last_roots_of_a_group", "rank 1: broadcast of 3 float32 [root 1], ", marks=RARE
        ),
        pytest.param("last_calls", "rank 1: the end of the script", marks=RARE),
    ],
)
def test_an_error_names_what_went_wrong(name, said):
    alone = ("never_sent", "gone", "late", "raises", "uneven")  # one rank is to blame
    alike = not name.endswith((*alone, "late_message"))  # all ranks say the same
    result = run(2, "faults.py", name, outlived=not alike)
    assert result.returncode not in (0, None), result.report()
    assert not result.timed_out, result.report()
    assert said in result.stderr, result.report()
    assert "Segmentation fault" not in result.stderr, result.report()
    assert not alike or result.stderr.count(said) == 1, result.report()
    if "late" in name:
        waits_s = [int(waited) for waited in re.findall(r"has waited (\d+) s", result.stderr)]
        assert waits_s, result.report()
        limits = range(3, 8)  # of this group and of all
        assert all(waited_s in limits for waited_s in waits_s), result.report()


def test_waits_in_cpp_end_with_the_error_of_their_call_each_of_many_times():
    said = "10 ways, 8 times"
    assert said in completed(run(1, "waits_in_cpp.py", "8")).stdout


@pytest.mark.exhaustive
def test_groups_go_on_after_refusals_wait_end_and_start_again_beside_worlds_and_workers():
    completed(run(2, "faults.py", "refused", "patient", "workers", "again", "destroyed"))


@pytest.mark.usefixtures("no_launcher")
def test_processes_of_torchrun_are_refused_in_one_sentence():
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*words, SCRIPTS / "faults.py", "roots"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode != 0
    said = "start the script with mpirun or srun in place of torchrun"
    assert done.stderr.count(said) == 1, done.stderr
