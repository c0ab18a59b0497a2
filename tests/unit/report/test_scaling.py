"""The scaling of runs, against closed forms, and which runs are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from manifests import manifest
from pages import Page
from reports import rank, record, summary

from mntrain.__main__ import main
from mntrain.options.command_line import to_toml
from mntrain.options.config import Config, ModelConfig, TrainConfig

pytest.importorskip("matplotlib")


def make(
    folder: Path,
    ranks: int,
    step_s: float,
    *,
    batch: int = 32,
    done: int = 0,
    config: Config | None = None,
    **changes,
) -> Path:
    """A run on hosts of two ranks, whose first steps are slow, after `done` steps of another."""
    folder.mkdir(parents=True)
    lines = [record(step, step_s=9.0, samples=batch) for step in range(1, done + 4)]
    lines += [
        record(step, step_s=step_s * (0.5 + step % 2), samples=batch)
        for step in range(done + 4, done + 24)
    ]
    text = "".join(json.dumps(line.to_json()) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    config = config or Config(train=TrainConfig(batch_size=batch))
    (folder / "config.toml").write_text(to_toml(config))
    hosts = [rank(r, host=f"n{r // 2}") for r in range(ranks)]
    whole = summary(ranks=hosts, world={"size": ranks, "nodes": ranks}, **changes)
    if done:
        whole["resumed_from"] = f"runs/x/checkpoints/step-{done:08d}"
    (folder / "summary.json").write_text(json.dumps(whole))
    return folder


def scaling(*runs: Path) -> int:
    return main(["report", "--scaling", *map(str, runs), "--output", "scaling.html"])


def rows(runs: list[Path]) -> tuple[list[list[str]], list[str]]:
    """The rows of the table, and the sentences above it."""
    assert scaling(*runs) == 0
    page = Page(Path("scaling.html").read_text())
    assert page.problems == []
    at = page.cells.index("node hours") + 1
    width = 11
    table = page.cells[at : at + width * len(runs)]
    notes = page.cells[1 : page.cells.index("Measured")]
    return [table[i : i + width] for i in range(0, len(table), width)], notes


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_strong_scaling_is_that_of_the_steps_after_the_warm_up(tmp_path):
    runs = [make(tmp_path / "r4", 4, 0.5, status="stopped", reason="--run.stop-after 23")]
    runs += [make(tmp_path / "r1", 1, 1.0), make(tmp_path / "r3", 3, 0.4, done=50)]
    table, notes = rows(runs)
    spread = ["0.50 s to 1.50 s", "0.20 s to 0.60 s", "0.25 s to 0.75 s"]
    # 32 samples in 1.0, 0.4 and 0.5 s; a million of them in 1, 2 and 2 hosts x 1e6 / rate s.
    assert table == [
        ["r1", "1", "1", "32", "20", "32", "1.00 s", spread[0], "1.00", "100.0%", "8.68"],
        ["r3", "2", "3", "32", "20", "80", "0.40 s", spread[1], "2.50", "83.3%", "6.94"],
        ["r4", "2", "4", "32", "20", "64", "0.50 s", spread[2], "2.00", "50.0%", "8.68"],
    ]
    assert notes[0] == "Strong scaling: the batch has 32 samples in all runs."
    assert notes[2].endswith("The length of an epoch is not known, since no run has a checkpoint.")
    assert notes[3] == "r4 did not complete: stopped: --run.stop-after 23."


@pytest.mark.thorough
def test_weak_scaling_keeps_the_batch_of_a_rank_and_an_epoch_is_that_of_a_checkpoint(tmp_path):
    runs = [make(tmp_path / f"r{n}", n, 0.5, batch=8 * n) for n in (2, 6)]
    saved = runs[1] / "checkpoints" / "step-00000005"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(replace(manifest(), samples=360_000).to_json())
    table, notes = rows(runs)
    assert [row[5:6] + row[8:] for row in table] == [
        ["32", "1.00", "100.0%", "3.12"],
        ["96", "3.00", "100.0%", "3.12"],
    ]
    assert notes[0] == "Weak scaling: the batch of a rank has 8 samples in all runs."
    assert notes[2].startswith("Node hours are those of an epoch of 360,000 samples at this rate")
    assert len(notes) == 3


def test_runs_that_do_not_belong_together_are_one_line(tmp_path, capsys):
    one = make(tmp_path / "one", 1, 1.0)
    wide = Config(model=ModelConfig(width=256), train=TrainConfig(batch_size=32))
    others = {
        "give two runs or more, of different numbers of ranks": [],
        "model.width is 256 in": [make(tmp_path / "wide", 2, 1.0, config=wide)],
        "all runs have 1 ranks: give runs of different numbers": [make(tmp_path / "same", 1, 1.0)],
        "a step has 32 on 1 ranks, 40 on 2 ranks samples": [
            make(tmp_path / "odd", 2, 1.0, batch=40)
        ],
    }
    killed = make(tmp_path / "killed", 2, 1.0)
    (killed / "summary.json").write_text('{"status": "crashed", "steps": 3}')
    others["has no summary.json and config.toml of a job that ended regularly"] = [killed]
    short = make(tmp_path / "short", 2, 1.0, done=20)
    lines = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    (short / "metrics.jsonl").write_text("".join(lines[:23]))
    others["its last job has 3 steps, and the first 3 of a job do not count"] = [short]
    for message, runs in others.items():
        assert scaling(one, *runs) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), message in err) == ("", 1, True), err
    assert not Path("scaling.html").exists()
