"""The page about runs: what it shows of each kind of run, and that a browser shows it."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from pages import Page
from reports import rank, record, summary

from mntrain.__main__ import main
from mntrain.metrics import files
from mntrain.metrics.registry import PHASES
from mntrain.options.command_line import to_toml
from mntrain.options.config import Config, TrainConfig
from mntrain.recorder.events import Recorder
from mntrain.report import charts, report_command
from mntrain.report.report_command import phase_means

pytest.importorskip("matplotlib")

OUTSIDE = '<script>&amp;"$x$'


def make(folder: Path, steps: int = 40, *, slow: int | None = None, **changes) -> Path:
    """A run of a job of four ranks on two nodes."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        line = record(step, loss=5 / step, step_s=0.5 + 0.01 * step).to_json()
        line["metrics"] = {OUTSIDE: step / steps}
        if step % 10 == 0:
            line |= {"eval_loss": 6 / step, "eval_metrics": {OUTSIDE: 0.5}}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    config = Config(train=TrainConfig(steps=steps), task=f"my:{OUTSIDE}")
    (folder / "config.toml").write_text(to_toml(config))
    ranks = [
        rank(r, host=OUTSIDE, samples=320, own_s=32.0 * (2 if r == slow else 1), cross_bytes=10**9)
        for r in range(4)
    ]
    whole = summary(steps=steps, ranks=ranks, run_dir=str(folder), stragglers=[], **changes)
    whole["world"] |= {"size": 4, "nodes": 2}
    whole["stage"] = [0, 2]  # of two optimizers
    whole["checkpoints"] = {"saved": 2, "failed": 0, "waited_s": 0.2, "longest_s": 1.5}
    if slow is not None:
        whole["stragglers"] = [
            {"rank": slow, "since": 11, "ratio": 2.31, "phase": "forward", "until": None}
        ]
    (folder / "summary.json").write_text(json.dumps(whole))
    return folder


def report(*words: object) -> int:
    return main(["report", *map(str, words)])


def page(*words: object) -> Page:
    assert report(*words) == 0
    output = Path(words[-1]) if "--output" in words else Path(words[0]) / "report.html"
    found = Page(output.read_text())
    assert found.problems == []
    return found


@pytest.mark.thorough
def test_a_page_has_all_of_a_run_and_nothing_from_outside_is_markup(tmp_path):
    run = make(tmp_path / OUTSIDE.replace("/", "_"), slow=3)
    found = page(run)
    titles = ["Result", "Curves", "Speed", "Memory", "Communication", "Speed of ranks"]
    titles += ["Checkpoints and events", "Configuration"]
    assert [cell for cell in found.cells if cell in titles] == titles
    assert found.after("status") == "completed"
    assert found.after("stage") == "0, 2"
    assert (found.after("final loss"), found.after("eval accuracy")) == ("1.5", "0.93")
    assert found.after("between nodes") == "0"  # messages
    assert "4.0 GB" in found.cells
    means = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[3:]]
    step_s = math.fsum(line["step_s"] for line in means) / len(means)
    at = len(found.cells) - 1 - found.cells[::-1].index("data")
    table = dict(zip(found.cells[at : at + 14 : 2], found.cells[at + 1 : at + 15 : 2], strict=True))
    assert [*table] == ["data", "forward", "backward", "wait", "optimizer", "other", "step"]
    assert table["step"] == f"{step_s:.2f} s"
    assert found.cells[at + 14 : at + 17 : 2] == [
        "communication in the step",
        "exposed communication",
    ]
    assert found.after("train.steps") == "40"
    assert {OUTSIDE, f"my:{OUTSIDE}", f"Run {run.name}"} <= set(found.cells)
    text = (run / "report.html").read_text()
    bars = re.findall(r"fill: (#d62728|#1f77b4)", text.partition("own time for a sample")[2])
    assert bars == ["#1f77b4"] * 3 + ["#d62728"]
    assert found.after("phase") == "until"
    assert [found.after("until"), "2.31" in found.cells] == ["3", True]


@pytest.mark.thorough
def test_throughput_is_of_what_the_loss_counts_and_flops_have_a_unit(tmp_path):
    found = page(make(tmp_path / "a", items="pictures", model_flops_per_s=3.124e14))
    assert found.after("pictures/s") == "12,345"
    assert found.after("step pictures/s") == "13,456"
    assert found.after("model flops/s") == "312 TFLOP/s"
    assert not any("tokens" in cell for cell in found.cells)


def test_phases_add_up_to_the_step():
    lines = [record(step, step_s=0.5 + step).to_json() for step in range(1, 9)]
    means = phase_means(lines)
    assert [*means] == [*PHASES, "other", "step_s", "communication", "exposed"]
    assert means["step_s"] == pytest.approx(6.5)
    assert sum(means[name] for name in (*PHASES, "other")) == pytest.approx(6.5)
    assert phase_means([{"step": 1, "step_s": 0.1}]) == {}


@pytest.mark.thorough
def test_runs_stand_side_by_side_with_the_options_that_differ(tmp_path):
    one, other = make(tmp_path / "a"), make(tmp_path / "b", steps=8)
    found = page(one, other, "--output", tmp_path / "both.html")
    assert found.cells[:2] == ["2 runs", "a: There are no recordings of ranks."]
    at = found.cells.index("options that differ")
    assert found.cells[at + 1 : at + 7] == ["a", "b", "train.steps", "40", "8", "all options"]
    at = found.cells.index("steps")
    assert found.cells[at : at + 3] == ["steps", "40", "8"]
    assert {"a: sent, by rank", "b: sent, by rank"} <= set(found.cells)
    assert found.cells.count("mean of a step, without the first 3") == 1
    odd = own_loop(tmp_path / "\x1b[31m\u4e2d")
    one = page(odd, other, "--output", tmp_path / "one.html")
    assert "\ufffd[31m\u4e2d" in one.cells
    assert "b: mean of a step, without the first 3" in one.cells


def own_loop(folder: Path) -> Path:
    """A run of a loop of two ranks that goes on: its lines have each rank's values."""
    folder.mkdir()
    own = {"step_s": 0.1, "rank_step_s": {"0": 0.1, "1": 0.2}}
    lines = [{"step": step, "loss": 1 / step, "psnr": step, **own} for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_curves_of_many_ranks_are_of_those_that_each_step_had():
    lines = [
        {"step": step, **{f"memory/{rank}": float(step + rank) for rank in range(ranks)}}
        for step, ranks in enumerate([10, 10, 12, 9], 1)
    ]
    run = SimpleNamespace(names=sorted({n for one in lines for n in one}))
    run.curve = lambda name: tuple(
        np.array([float(one[key]) for one in lines if name in one]) for key in ("step", name)
    )
    curves = report_command._rank_curves(run, "memory")
    assert {name: (list(steps), list(values)) for name, (steps, values) in curves.items()} == {
        "least": ([1, 2, 3, 4], [1, 2, 3, 4]),
        "median": ([1, 2, 3, 4], [5.5, 6.5, 8.5, 8]),
        "most": ([1, 2, 3, 4], [10, 11, 14, 12]),
    }


@pytest.mark.thorough
def test_what_a_run_lacks_is_said(tmp_path):
    found = page(own_loop(tmp_path / "own"))
    assert {"psnr", "loss", "seconds of a step", "rank step", "rank 1"} <= set(found.cells)
    said = "There is no summary.json: the job still runs, or it was killed."
    assert said in found.cells
    assert "There is no config.toml: the loop gave no configuration." in found.cells
    assert found.after("status") == "no result"
    begun = make(tmp_path / "begun")
    lines = (begun / "metrics.jsonl").read_text().splitlines()
    (begun / "metrics.jsonl").write_text("")
    (begun / "summary.json").write_text('{"st')
    found = page(begun)
    assert {"No step is in metrics.jsonl.", "Configuration"} <= set(found.cells)
    assert any(cell.startswith("summary.json is damaged") for cell in found.cells)
    bad = [line.replace('"loss": 5.0', '"loss": null') for line in lines]
    bad.append('{"step": 41, "error": "in step 41, <b>"}')
    (begun / "metrics.jsonl").write_text("\n".join(bad) + '\n{"step": 42, "lo')
    (begun / "summary.json").unlink()
    found = page(begun)
    assert "The loss is not finite in 1 steps, first in step 1." in found.cells
    assert found.after("step 41") == "in step 41, <b>"


@pytest.mark.thorough
def test_the_state_of_a_job_without_a_summary_is_that_of_its_recordings(tmp_path):
    run = make(tmp_path / "run")
    (run / "summary.json").unlink()
    recorders = [Recorder(number, 2) for number in range(2)]
    for recorder in recorders:
        assert recorder.open(run / "recorder", "job") == ""
    [end] = [cell for cell in page(run).cells if cell.startswith("2 ranks on 1 host, began ")]
    assert "\nThe job still runs, as far as can be seen from here.\n" in end
    recorders[1].error_raised(KeyError("<i>"))
    for recorder in recorders:
        recorder.close()
    found = page(run)
    [end] = [cell for cell in found.cells if cell.startswith("2 ranks on 1 host, began ")]
    assert "stopped first" in end
    assert any(cell.startswith("rank 1: KeyError: '<i>'") for cell in found.cells)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none", "none has no metrics.jsonl, summary.json, config.toml: give the folder of a run"),
        ("own --output no/a.html", "--output no/a.html: there is no folder no"),
    ],
)
def test_what_is_no_run_is_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    own_loop(Path("own"))
    assert report(*words.split()) == 2
    assert capsys.readouterr() == ("", f"mntrain: {message}\n")
    monkeypatch.setattr(report_command, "find_spec", lambda name: None)
    assert report("own") == 2
    assert "report needs matplotlib, which is not installed: pip" in capsys.readouterr().err


def test_the_running_mean_weights_recent_values_and_skips_missing_ones():
    values = np.random.default_rng(0).normal(size=200)
    values[[0, 50]] = np.nan
    smoothed = charts.running_mean(values)
    keep = 1 - 2 / (200 / 40 + 1)
    for at in (1, 7, 100, 199):
        known = values[: at + 1][np.isfinite(values[: at + 1])]
        weights = keep ** np.arange(len(known))[::-1]
        assert smoothed[at] == pytest.approx((weights * known).sum() / weights.sum())
    assert np.isnan(smoothed[[0, 50]]).all()
    assert charts.running_mean(values[:30]) is None


@pytest.mark.thorough
def test_charts_are_files_on_request(tmp_path):
    own_loop(tmp_path / "own")
    page(tmp_path / "own", "--svg", tmp_path / "charts", "--output", tmp_path / "own.html")
    found = sorted((tmp_path / "charts").iterdir())
    assert [path.name for path in found] == [f"{n:02}.svg" for n in range(1, len(found) + 1)]
    assert len(found) == (tmp_path / "own.html").read_text().count("<svg") > 0
    assert {ElementTree.parse(path).getroot().tag for path in found} == {f"{{{charts.SVG}}}svg"}


@pytest.mark.thorough
def test_a_job_writes_in_a_process_of_its_own_or_says_why_not(tmp_path, monkeypatch):
    assert files.write_page(tmp_path).endswith("config.toml: give the folder of a run")
    own_loop(tmp_path / "own")
    assert files.write_page(tmp_path / "own") == ""
    assert (tmp_path / "own" / "report.html").exists()
    monkeypatch.setattr(files, "PAGE_LIMIT_S", 0.01)
    said = f"it took more than 0.01 s; python -m mntrain report {tmp_path}/own writes it"
    assert files.write_page(tmp_path / "own") == said
