"""Files of the master's reporter: metrics.jsonl and summary.json."""

import io
import json
import math
import os

import pytest
from reports import console, finish, finished, rank, record, reporting, skipped, summary

from mntrain.metrics.report import Reporter


def strict(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_each_step_is_a_line_of_json_at_once_and_numbers_that_json_lacks_are_null(tmp_path):
    nan, inf = math.nan, math.inf
    steps = [record(1), record(2, loss=nan, metrics={"a": -inf, "b": 1.0}), skipped(3, loss=inf)]
    with reporting(tmp_path, console(False)) as reporter:
        for number, step in enumerate(steps, 1):
            reporter.step(step)
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert [strict(line)["step"] for line in lines] == list(range(1, number + 1))
        finish(reporter, final_loss=nan, ranks=[rank(0, share=nan)])
    first, done, left_out = map(strict, lines)
    assert first == record(1).to_json()
    assert done["loss"] is done["metrics"]["a"] is left_out["loss"] is None
    assert done["metrics"]["b"] == 1.0
    assert {"grad_norm", "clip_coef", "clipped_norm"} == done.keys() - left_out.keys() - {"metrics"}
    assert (done["skipped"], left_out["skipped"]) == (False, True)
    written = strict((tmp_path / "summary.json").read_text())
    assert written["final_loss"] is written["ranks"][0]["share"] is None


def test_summary_is_written_after_all_else(tmp_path):
    written = tmp_path / "summary.json"

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            assert not written.exists()
            return super().write(text)

    on = console(True, file=Watched())
    with Reporter(True, tmp_path, 4, on) as reporter:
        reporter.step(record(1))
        finish(reporter)
        assert strict(written.read_text()) == summary()
        reporter.close()
    with pytest.raises(RuntimeError, match="step 2 was reported outside"):
        reporter.step(record(2))


def test_summary_replaces_an_old_one_as_a_whole_or_leaves_it(tmp_path, monkeypatch):
    path, files = tmp_path / "summary.json", ["metrics.jsonl", "summary.json"]
    path.write_text("old")
    with path.open() as reader:
        finished(tmp_path, run_dir=tmp_path)
        assert reader.read() == "old"  # who had it open keeps the old file
    assert strict(path.read_text())["run_dir"] == str(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == files

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with reporting(tmp_path, console(False)) as reporter:
        assert finish(reporter) == ["summary.json (no space left)"]
    assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == files
