"""The figures of a run's summary, computed again from its metrics.jsonl, and its other files."""

import math
import os
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from job import completed, metrics, summary, train
from launch import TESTS
from pages import Page
from safetensors import safe_open

from mntrain.checkpoint.reader import list_checkpoints
from mntrain.metrics.files import flatten

PHASES = ["data", "forward", "backward", "reduce_wait", "optimizer"]
OPTIONS = [
    *("--train.steps", "13", "--train.eval-every", "3", "--checkpoint.every", "100"),
    *("--log.per-rank", "--comm.ranks-per-node", "1", "--zero.stage", "1"),
    *(["--log.tensorboard"] if find_spec("tensorboard") else []),
]
PAGE = ["--log.report"] if find_spec("matplotlib") else []
CONTEXT, LAYERS, WIDTH = 32, 2, 32  # of the small model


pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> tuple[Path, list[tuple[list[dict], dict, str]]]:
    """The folder of a run of two jobs, and the lines, the summary and the output of each."""
    folder, done, found = tmp_path_factory.mktemp("run"), 0, []
    mask = os.umask(0o077)
    for options in (["--run.stop-after", "7"], PAGE):
        result = completed(train(2, folder, *OPTIONS, *options))
        lines = metrics(folder)
        found.append((lines[done:], summary(folder), result.stdout))
        done = len(lines)
    os.umask(mask)
    return folder, found


def flops_per_token(folder: Path) -> float:
    """6 per weight of a matrix, and attention over half the context, forward and backward."""
    with safe_open(list_checkpoints(folder / "run")[0] / "model.safetensors", "pt") as model:
        shapes = {name: model.get_slice(name).get_shape() for name in model.keys()}  # noqa: SIM118
    weights = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    return 6 * weights + 6 * LAYERS * WIDTH * CONTEXT


@pytest.mark.parametrize("job", [0, 1])
def test_the_summary_is_what_its_lines_add_up_to(jobs, job):
    folder, found = jobs
    lines, whole, _ = found[job]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [[3, 6], [9, 12, 13]][job]
    assert (whole["steps"], whole["status"]) == [(7, "stopped"), (13, "completed")][job]
    assert whole["final_loss"] == lines[-1]["loss"]
    assert whole["eval_loss"] == evaluated[-1]["eval_loss"]
    assert whole["eval_metrics"] == evaluated[-1]["eval_metrics"]
    assert whole["skipped_steps"] == sum(line["skipped"] for line in lines) == 0
    tokens = [line["tokens_per_s"] * line["step_s"] for line in lines]
    assert tokens == pytest.approx([line["samples"] * CONTEXT for line in lines])
    assert whole["tokens_per_s"] == pytest.approx(sum(tokens) / whole["wall_s"])
    rates = [count / line["step_s"] for count, line in zip(tokens, lines, strict=True)]
    assert whole["step_tokens_per_s"] == pytest.approx(median(rates[3:]))  # after the warm-up
    flops = flops_per_token(folder) * whole["step_tokens_per_s"]
    assert whole["model_flops_per_s"] == pytest.approx(flops)
    page = (TESTS.parent / "docs" / "metrics.md").read_text()
    inner = [whole["world"], whole["checkpoints"], whole["ranks"][0]]
    for name in [*whole, *(name for part in inner for name in part)]:
        assert f"`{name}`" in page


def test_a_job_says_and_records_what_it_was(jobs):
    folder, found = jobs
    lines, whole, said = found[1]
    wanted = {"step", "loss", "lr", "grad_norm", "clip_coef", "samples", "tokens_per_s", "step_s"}
    assert all(wanted <= set(line) for line in lines)
    assert (whole["world"]["size"], whole["world"]["nodes"]) == (2, 2)
    assert (whole["stage"], whole["compress"], whole["sync"]) == (1, "none", "every-step")
    assert [rank["node"] for rank in whole["ranks"]] == [0, 1]
    assert all(rank["peak_memory"] > 50e6 for rank in whole["ranks"])
    assert all(rank["cross_bytes"] > 0 for rank in whole["ranks"])
    assert (whole["utilisation"], whole["computes_in"]) == (None, "fp32")  # of a CPU: unknown
    assert "FLOP/s of the model" in said
    memory = whole["memory"]
    assert memory["process_peak"]["least"] > 50e6
    for role in ("parameters", "gradients", "state", "total"):
        sizes = memory[role]
        assert 0 < sizes["least"] <= sizes["median"] <= sizes["most"]
    # Adam keeps two numbers for every parameter, and a rank has half of them.
    assert memory["state"]["most"] < 1.1 * memory["parameters"]["least"]
    assert "2 ranks on 2 nodes of 1" in said
    assert "zero: stage 1, by element; precision fp32" in said
    assert "optimizer state" in said
    assert "\nsample\n" in said
    assert said.strip().endswith(str(folder / "run"))


@pytest.mark.parametrize("job", [0, 1])
def test_times_are_parts_of_larger_times(jobs, job):
    _, found = jobs
    lines, whole, _ = found[job]
    for line in lines:
        assert all(line[phase] >= 0 for phase in PHASES)
        assert sum(line[phase] for phase in PHASES) <= line["step_s"]
        assert 0 <= line["exposed"] <= line["communication"] <= line["step_s"]
        assert line["exposed"] <= line["reduce_wait"] + line["forward"] + line["optimizer"] + 1e-3
    assert sum(line["step_s"] for line in lines) < whole["wall_s"]
    master = whole["ranks"][0]  # since the start of its world
    assert sum(line["communication"] for line in lines) < master["communication_s"]
    assert sum(line["exposed"] for line in lines) < master["exposed_s"]
    assert all(0 <= rank["exposed_s"] <= rank["communication_s"] for rank in whole["ranks"])
    assert whole["tokens_per_s"] < whole["step_tokens_per_s"]


def test_the_copy_has_the_numbers_of_metrics_jsonl(jobs):
    folder, _ = jobs
    lines = [flatten(line) for line in metrics(folder)]
    assert [line["step"] for line in lines] == list(range(1, 14))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == set().union(*lines) - {"step"}
    for tag in board.Tags()["scalars"]:
        points = {event.step: event.value for event in board.Scalars(tag)}
        assert points == pytest.approx(
            {line["step"]: float(line[tag]) for line in lines if tag in line}, rel=1e-6
        )


def test_each_rank_tells_its_times_of_the_step_before(jobs):
    _, found = jobs
    for lines, _, _ in found:
        assert not [name for name in lines[0] if name.startswith("rank_")]
        for before, line in pairwise(lines):
            told = PHASES[:-1]
            for name in ("step_s", "exposed", *told):
                own = line[f"rank_{name}"]
                assert (own["0"], list(own)) == (before[name], ["0", "1"])
            phases = sum(line[f"rank_{name}"]["1"] for name in told)
            assert 0 < phases <= line["rank_step_s"]["1"]
            assert all(2**20 < size < 2**40 for size in line["rank_memory"].values())


def test_a_job_leaves_a_page_about_its_run(jobs):
    folder, found = jobs
    pytest.importorskip("matplotlib")
    page = Page((folder / "run" / "report.html").read_text())
    assert page.problems == []
    assert page.after("status") == found[-1][1]["status"] == "completed"
    assert {"step-00000013", "rank step"} <= set(page.cells)


def test_files_of_a_run_are_as_private_as_the_umask_says(jobs):
    run = jobs[0] / "run"
    made = [run, *run.rglob("*")]
    assert run / "recorder" / "rank-00001.bin" in made
    assert [path.name for path in made if path.stat().st_mode & 0o077] == []
