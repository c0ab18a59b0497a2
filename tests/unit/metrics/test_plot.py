"""Curves of runs, and the command that draws them."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mntrain.__main__ import main
from mntrain.metrics import plot
from mntrain.metrics.plot import running_mean

mpl = pytest.importorskip("matplotlib")
FigureCanvasAgg = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg


def make(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def lines(count: int, scale: float = 1.0) -> list[dict]:
    made = []
    for step in range(1, count + 1):
        line = {"step": step, "loss": scale * (2 + 1 / step), "samples": 8, "step_s": 0.5 * step}
        line |= {"tokens_per_s": 100.0, "metrics": {"accuracy": step / count}}
        if step % 5 == 0:
            line |= {"eval_loss": scale * 3.0, "eval_metrics": {"accuracy": 0.5}}
        made.append(line)
    return made


def draw(*words: object) -> int:
    return main(["plot", *map(str, words)])


def test_the_running_mean_weights_recent_values_and_skips_missing_ones():
    values = np.random.default_rng(0).normal(size=200)
    values[[0, 50]] = np.nan
    smoothed = running_mean(values)
    keep = 1 - 2 / (200 / 40 + 1)
    for at in (1, 7, 100, 199):
        known = values[: at + 1][np.isfinite(values[: at + 1])]
        weights = keep ** np.arange(len(known))[::-1]
        assert smoothed[at] == pytest.approx((weights * known).sum() / weights.sum())
    assert np.isnan(smoothed[[0, 50]]).all()
    assert running_mean(values[:30]) is None


def figure(paths: list[Path], metrics: list[str], *, log: bool = False):
    runs = plot.read_runs(paths)
    panels = [plot.curves_of(runs, metric) for metric in metrics]
    return plot.make_figure([run.label for run in runs], panels, log=log)


def test_a_run_has_its_loss_its_running_mean_and_its_evaluations(tmp_path):
    run = make(tmp_path / "a", [*lines(100), {"step": 101, "loss": None}, {"step": 102}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 103, "lo')  # as a kill leaves it
    [axes] = figure([run], ["loss"]).axes
    each, mean, evaluation = axes.lines
    assert axes.get_yscale() == "linear"
    axes = figure([run], ["loss"], log=True).axes[0]
    assert axes.get_yscale() == "log"
    assert sum(bool(label.get_text()) for label in axes.get_yticklabels(which="both")) >= 3
    assert each.get_ydata()[:100].tolist() == [2 + 1 / step for step in range(1, 101)]
    assert np.isnan(each.get_ydata()[100:]).tolist() == [True]
    assert len(mean.get_ydata()) == 101
    assert evaluation.get_xdata().tolist() == list(range(5, 101, 5))
    assert each.get_linewidth() < mean.get_linewidth()
    assert each.get_color() == mean.get_color() != evaluation.get_color()
    for name in ("accuracy", "metrics/accuracy"):
        [axes] = figure([make(tmp_path / "b", lines(10))], [name]).axes
        drawn = [line.get_ydata().tolist() for line in axes.lines]
        assert drawn == [[step / 10 for step in range(1, 11)], [0.5, 0.5]]


def test_each_run_has_a_colour_of_its_own_that_the_legend_names(tmp_path):
    count = 14
    paths = [make(tmp_path / f"r{index}", lines(9, index + 1)) for index in range(count)]
    drawn = figure(paths, ["loss"])
    colours = [mpl.colors.to_hex(line.get_color()) for line in drawn.axes[0].lines[:count]]
    assert len(set(colours)) == count
    [legend] = drawn.legends
    handles = [mpl.colors.to_hex(handle.get_color()) for handle in legend.legend_handles]
    assert [text.get_text() for text in legend.get_texts()] == [f"r{i}" for i in range(count)]
    assert handles == colours


NAMES = ["_hidden $x^", "a" * 200, "lr=3e-4 " * 25, "ä\n\tb"]


@pytest.mark.parametrize(
    ("names", "log"),
    [
        (NAMES, True),
        ([f"run {index}" for index in range(25)], False),
        (["_$x^ ä\n\tb " + "a" * 180], False),
    ],
    ids=["long names", "many", "one"],
)
def test_no_text_is_cut_off(tmp_path, names, log):
    paths = [make(tmp_path / name, lines(60)) for name in names]
    drawn = figure(paths, ["loss", "accuracy"], log=log)
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    renderer = canvas.get_renderer()
    width, height = drawn.bbox.size
    parts = [axes.get_tightbbox(renderer) for axes in drawn.axes]  # with labels, ticks and titles
    parts += [legend.get_window_extent(renderer) for legend in drawn.legends]
    for box in parts:
        assert -1 <= box.x0 <= box.x1 <= width + 1
        assert -1 <= box.y0 <= box.y1 <= height + 1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(parts, 2))
    texts = [text for legend in drawn.legends for text in legend.get_texts()]
    texts += [axes.title if len(names) > 1 else axes._left_title for axes in drawn.axes]
    shown = "".join(text.get_text() for text in texts).replace("\n", "").replace(" ", "")
    for name in names:
        clean = name.replace("$", r"\$").replace("\n", "\ufffd").replace("\t", "\ufffd")
        assert clean.replace(" ", "") in shown
    assert drawn.axes[0].get_position().height * height > 200  # pixels are left for the curves


@pytest.mark.parametrize(
    ("ending", "begin"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("PDF", b"%PDF")]
)
def test_the_ending_selects_the_format(tmp_path, capsys, ending, begin):
    run, output = make(tmp_path / "a", lines(30)), tmp_path / f"curve.{ending}"
    assert draw(run, "--output", output) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_bytes().startswith(begin)


def test_default_files_are_in_the_run_or_here_for_several(tmp_path, monkeypatch, capsys):
    first, second = (make(tmp_path / name, lines(9)) for name in "ab")
    monkeypatch.chdir(tmp_path)
    assert draw(first) == draw(second, "--metric", "accuracy", "loss") == draw(first, second) == 0
    written = [first / "loss.svg", second / "accuracy-loss.svg", Path("loss.svg")]
    assert capsys.readouterr().out.split() == list(map(str, written))
    assert all(path.stat().st_size > 1000 for path in written)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("empty", "empty has no metrics.jsonl: give the folder of a run"),
        ("begun", "begun: its metrics.jsonl has no step yet"),
        (
            "a --metric lss",
            "--metric lss: a has no value of it; it has loss, samples, step_s, tokens_per_s, "
            "metrics/accuracy, eval_loss, eval_metrics/accuracy",
        ),
        ("a own --metric samples", "--metric samples: own has no value of it; it has v"),
        ("a --output a.txt", "Format 'txt' is not supported (supported formats: "),
        ("a --output a", "Format '' is not supported (supported formats: "),
        ("a --output no/a.png", "--output no/a.png: there is no folder no"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_leaves_no_file(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        make(Path(name), lines(6))
    make(Path("own"), [{"step": 1, "v": -1.0}, {"step": 2, "v": 0}])
    make(Path("begun"), [])
    Path("empty").mkdir()
    assert draw(*words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"mntrain: {message}")
    assert err.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"metrics.jsonl"}
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert draw("a") == 2
    needs = "which is not installed: pip install jinja2 matplotlib"
    assert capsys.readouterr().err == f"mntrain: plot needs matplotlib, {needs}\n"


def test_the_command_needs_neither_torch_nor_mpi(tmp_path):
    run = make(tmp_path, lines(3))
    program = f"""
import sys
from mntrain.__main__ import main
assert main(["plot", {str(run)!r}]) == 0
print([name for name in sys.modules if name in ("torch", "mpi4py")])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.stdout.splitlines()[1:], done.stderr) == (["[]"], "")


def test_a_job_draws_in_a_process_of_its_own_or_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setitem(plot.JOB_LIMITS_S, "plot", 60)
    assert plot.draw_at_end("plot", make(tmp_path, [])).endswith("metrics.jsonl has no step yet")
    make(tmp_path, lines(30))
    picture = tmp_path / "loss.svg"
    assert plot.draw_at_end("plot", tmp_path) == ""
    assert picture.read_bytes().startswith(b"<?xml")
    picture.unlink()
    monkeypatch.setitem(plot.JOB_LIMITS_S, "plot", 0.01)
    why = plot.draw_at_end("plot", tmp_path)
    assert why == f"it took more than 0.01 s; python -m mntrain plot {tmp_path} draws it"
