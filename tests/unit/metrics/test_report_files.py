"""What the master's reporter writes: metrics.jsonl and summary.json."""

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


def test_each_step_is_on_disk_at_once_as_a_line_of_json(tmp_path):
    with reporting(tmp_path, console(False)) as reporter:
        for number in (1, 2, 3):
            reporter.step(record(number))
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert [strict(line)["step"] for line in lines] == list(range(1, number + 1))
    assert strict(lines[0]) == record(1).to_json()


def test_numbers_that_json_lacks_become_null_and_a_skipped_step_lacks_some(tmp_path):
    nan, inf = math.nan, math.inf
    with reporting(tmp_path, console(False)) as reporter:
        reporter.step(record(1, loss=nan, metrics={"a": -inf, "b": 1.0}))
        reporter.step(skipped(2, loss=inf))
        finish(reporter, final_loss=nan, ranks=[rank(0, share=nan)])
    done, left_out = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
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


def test_summary_replaces_an_old_one_as_a_whole(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with path.open() as reader:
        finished(tmp_path, run_dir=tmp_path)
        assert reader.read() == "old"  # who had it open keeps the old file
    assert strict(path.read_text())["run_dir"] == str(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_failed_write_leaves_the_old_summary_and_nothing_else(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError("no space left")

    (tmp_path / "summary.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with reporting(tmp_path, console(False)) as reporter:
        assert finish(reporter) == ["summary.json (no space left)"]
    assert (tmp_path / "summary.json").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]
