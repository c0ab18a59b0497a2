"""`mpirun python -m mntrain`, as a user runs it: what it prints, writes and learns."""

import sys
from pathlib import Path

import pytest
from job import (
    completed,
    losses,
    losses_alone,
    metrics,
    summary,
    train,
)
from launch import mpirun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_run_leaves_its_records(tmp_path):
    options = ["--comm.ranks-per-node", "1", "--train.eval-every", "4", "--zero.stage", "2"]
    result = completed(train(2, tmp_path, *options))
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    wanted = {"step", "loss", "lr", "grad_norm", "clip_coef", "samples", "tokens_per_s", "step_s"}
    assert all(wanted <= set(line) for line in lines)
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 6]
    whole = summary(tmp_path)
    assert (whole["status"], whole["steps"]) == ("completed", 6)
    assert (whole["world"]["size"], whole["world"]["nodes"]) == (2, 2)
    assert (whole["stage"], whole["compress"], whole["sync"]) == (2, "none", "every-step")
    assert [rank["node"] for rank in whole["ranks"]] == [0, 1]
    assert all(rank["peak_memory"] > 50e6 for rank in whole["ranks"])
    assert all(rank["cross_bytes"] > 0 for rank in whole["ranks"])
    assert (whole["utilisation"], whole["computes_in"]) == (None, "fp32")  # of a CPU: unknown
    assert "FLOP/s of the model" in result.stdout
    memory = whole["memory"]
    assert memory["process_peak"]["least"] > 50e6
    for role in ("parameters", "gradients", "state", "total"):
        sizes = memory[role]
        assert 0 < sizes["least"] <= sizes["median"] <= sizes["most"]
    # Adam keeps two numbers for every parameter, and a rank has half of them.
    assert memory["state"]["most"] < 1.1 * memory["parameters"]["least"]
    assert "2 ranks on 2 nodes of 1" in result.stdout
    assert "zero: stage 2, by element; precision fp32" in result.stdout
    assert "optimizer state" in result.stdout
    assert "\nsample\n" in result.stdout
    assert result.stdout.strip().endswith(str(tmp_path / "run"))


@pytest.mark.exhaustive
def test_a_compiled_model_follows_the_plain_one(tmp_path):
    options = ["--model.layers", "1", "--train.eval-samples", "12"]  # few shapes to compile for
    completed(train(1, tmp_path, *options, "--train.compile", timeout=250))
    assert losses(tmp_path) == pytest.approx(losses_alone(*options), rel=1e-4)


@pytest.mark.exhaustive
def test_a_loop_of_ones_own():
    result = completed(mpirun(2, [sys.executable, EXAMPLES / "own_loop.py"], timeout=250))
    values = [float(line.split()[3]) for line in result.stdout.splitlines() if "loss" in line]
    assert len(values) == 20
    assert values[-1] < 0.1 * values[0]
