"""metrics.jsonl and its copies: TensorBoard and W&B."""

import errno
import json
import math
import os
import resource
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from reports import line, rank, record, skipped, summary, write

from mntrain.metrics import writers
from mntrain.metrics.copies import expect_installed
from mntrain.metrics.files import (
    METRICS_FILE,
    append_whole,
    end_last_line,
    flatten,
    read_metrics,
    write_summary,
    write_whole,
)
from mntrain.metrics.writers import MetricsFiles
from mntrain.options.config import LogConfig
from mntrain.run.directory import rewind

NONE, BOARD = LogConfig(), LogConfig(tensorboard=True)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


class Disk:
    """A disk that is full while `full` is, below the files of metrics."""

    full = False

    def __init__(self, monkeypatch):
        monkeypatch.setattr(writers, "append_whole", self.guarded(append_whole))

    def guarded(self, write):
        def unless_full(*arguments):
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(*arguments)

        return unless_full


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_lines_wait_in_memory_and_reach_the_record_in_order(tmp_path, disk, clock):
    warnings: list[str] = []
    files = MetricsFiles(tmp_path, NONE, warnings.append)
    lines = [line(step, metrics={f"m{step // 100}": float(step)}) for step in range(1, 200)]
    for step, written in enumerate(lines, 1):  # a step a second
        disk.full = 20 <= step < 190
        clock[0] += 1
        files.write(written)
    full = "metrics.jsonl cannot be written: No space left on device. Training continues, and lines"
    full += " wait in memory until there is space"
    assert warnings == [full] * 3 + ["all lines of metrics that waited are written"]
    disk.full = True
    files.write(line(200))
    files.close()
    files.close()
    assert files.missing == ["1 line of metrics.jsonl (No space left on device)"]
    disk.full = False
    write(tmp_path / "whole", NONE, *lines)
    record = (tmp_path / "metrics.jsonl").read_bytes()
    assert record == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_what_the_disk_has_no_room_for_is_not_there_in_part(tmp_path):
    path = tmp_path / "file"
    append_whole(path, b"whole\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left on device"):
            append_whole(path, b"a part of this line\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"whole\n"


def test_tensorboard_has_numbers_that_are_not_finite_and_the_options(tmp_path):
    tmp_path.joinpath("config.toml").write_text('task = "lm"\n')
    assert write(tmp_path, BOARD, line(1, loss=math.nan), {"step": 2, "error": "stopped"}) == []
    [(step, loss)] = scalars(tmp_path)["loss"]
    assert (step, math.isnan(loss)) == (1, True)
    text = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    assert b'    task = "lm"' in text


@pytest.mark.thorough
def test_tensorboard_has_each_step_of_a_resumed_run_once(tmp_path):
    write(tmp_path, BOARD, *(line(step, loss=1.0) for step in range(1, 7)))
    rewind(tmp_path, 4)
    time.sleep(1.1)  # TensorBoard orders files by the second in their name
    write(tmp_path, BOARD, *(line(step, loss=2.0) for step in range(5, 8)))
    losses = [1.0] * 4 + [2.0] * 3
    assert [one["loss"] for one in read_metrics(tmp_path)] == losses
    assert scalars(tmp_path)["loss"] == list(enumerate(losses, 1))


class FakeWandb:
    """Stands in for the package; `online` runs keep what they were sent."""

    def __init__(self):
        self.runs, self.down = [], False
        self.Settings = SimpleNamespace

    def init(self, **options):
        if self.down:
            raise ConnectionError("no network")  # an OSError, which no line waits for
        run = SimpleNamespace(options=options, logged=[], exit_code=None)

        def log(values, step):
            if self.down:
                raise ConnectionError("no network")
            run.logged.append((step, values))

        def finish(exit_code):
            run.exit_code = exit_code

        run.log, run.finish = log, finish
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


WANDB = LogConfig(wandb="digits")


def test_wandb_gets_flat_values_the_configuration_and_the_end_of_each_job(tmp_path, wandb):
    run_dir = tmp_path / "run-7"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("[optim]\nlr = 0.5\n")
    assert write(run_dir, WANDB, line(1, metrics={"top5": 0.5})) == []
    [run] = wandb.runs
    assert run.logged == [(1, flatten(line(1, metrics={"top5": 0.5})))]
    expected = {"project": "digits", "name": "run-7", "config": {"optim": {"lr": 0.5}}}
    expected |= {"resume": "allow", "dir": str(run_dir)}
    assert expected.items() <= run.options.items()
    assert run.options["settings"].finish_timeout <= 60
    assert run.exit_code == 0
    rewind(run_dir, 1)
    MetricsFiles(run_dir, WANDB, pytest.fail).close()
    assert wandb.runs[1].exit_code == 1  # it did not end well
    rewind(run_dir, 0)
    write(run_dir, WANDB, line(1))
    first, resumed, anew = (run.options["id"] for run in wandb.runs)
    assert first == resumed != anew


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_an_error_of_one_copy_is_one_warning_and_ends_that_copy_alone(
    tmp_path, monkeypatch, wandb, when
):
    pytest.importorskip("tensorboard")
    if when == "at the start":
        (tmp_path / "tensorboard").write_text("in the way")
        wandb.down = True
    warnings: list[str] = []
    log = LogConfig(tensorboard=True, wandb="digits")
    files = MetricsFiles(tmp_path, log, warnings.append)
    for step in (1, 2, 3, 4):
        if step == 2:
            encode = "tensorboard.summary.writer.record_writer.masked_crc32c"
            monkeypatch.setattr(encode, None)
            wandb.down = True
        files.write(line(step))
    files.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    board, of_wandb = warnings
    assert board.startswith("TensorBoard gets no more metrics: ")
    assert of_wandb.startswith("W&B gets no more metrics: ConnectionError")
    assert all((" at step 2: " in text) == (when == "later") for text in warnings)


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch, tmp_path):
    modules = ["tensorboard", "torch.utils.tensorboard", "wandb", "mlflow", "matplotlib"]
    for module in [*modules, "prometheus_client"]:
        monkeypatch.setitem(sys.modules, module, None)
    for option, value, package, wheels in (
        ("tensorboard", True, "tensorboard", "tensorboard"),
        ("wandb", "digits", "wandb", "wandb"),
        ("mlflow", "digits", "mlflow-skinny", "alembic mlflow-skinny sqlalchemy"),
        ("prometheus", True, "prometheus_client", "prometheus-client"),
        ("report", True, "matplotlib", "jinja2 matplotlib"),
    ):
        log = LogConfig(**{option: value})
        needs = rf"^--log.{option} needs the package {package}, which cannot"
        with pytest.raises(ValueError, match=needs):
            expect_installed(log)
        with pytest.raises(ValueError, match=rf"pip install {wheels}, or leave the opt"):
            expect_installed(log, "{}=")
    expect_installed(NONE)
    assert write(tmp_path, LogConfig(), line(1)) == []
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("moved", [False, True])
def test_a_directory_that_is_gone_is_not_made_anew_and_what_it_lacks_is_told(
    tmp_path, clock, moved
):
    folder, there, warnings = tmp_path / "run", tmp_path / "there", list[str]()
    folder.mkdir()
    log = LogConfig(tensorboard=bool(find_spec("tensorboard")))
    files = MetricsFiles(folder, log, warnings.append)
    for step in (1, 2, 3):
        if step == 2:
            folder.rename(there)
            if not moved:
                shutil.rmtree(there)
        clock[0] += 10
        files.write({"step": step})
    files.close()
    assert not folder.exists()
    assert "metrics.jsonl cannot be written: No such file or directory" in warnings[0]
    lost = "2 lines of metrics.jsonl (No such file or directory)"
    assert files.missing[0] == lost
    with pytest.raises(FileNotFoundError):
        write_summary(folder, {"status": "completed"})
    assert moved == there.exists()
    if moved:
        assert [line["step"] for line in read_metrics(there)] == [1]


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path):
    """A program that may write in the directory could foresee its name, and choose a victim."""
    victim, path = tmp_path / "victim", tmp_path / "summary.json"
    victim.write_text("words")
    (tmp_path / f".{path.name}.{os.getpid()}").symlink_to(victim)
    write_whole(path, b"new")
    path.unlink()
    path.symlink_to(victim)
    write_whole(path, b"newer")
    assert (path.read_text(), path.is_symlink(), victim.read_text()) == ("newer", False, "words")


def test_a_forked_child_does_not_end_the_copies_of_its_parent(tmp_path, monkeypatch, disk):
    """The child leaves blocks that close them; their servers would take the run for ended."""
    ended = tmp_path / "ended"
    copy = SimpleNamespace(write=lambda line: None, close=lambda succeeded: ended.touch())
    monkeypatch.setattr(writers, "COPIES", {"wandb": ("a server", lambda *_: copy)})
    files = MetricsFiles(tmp_path, WANDB, print)
    disk.full = True
    files.write(line(1))
    disk.full = False
    if (child := os.fork()) == 0:
        files.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not ended.exists()
    files.close()
    assert ended.exists()
    assert [one["step"] for one in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize("torn", ["", '{"step": 1}\n', '{"step": 1}\n{"step": 2, "los'])
def test_a_line_behind_one_that_was_cut_short_is_whole(tmp_path, torn):
    path = tmp_path / METRICS_FILE
    path.write_text(torn)
    end_last_line(path)
    written = MetricsFiles(tmp_path, NONE, print)
    written.write(line(3))
    written.close()
    assert [one["step"] for one in read_metrics(tmp_path)] == [1, 3][torn == "" :]


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_each_step_is_a_line_of_json_at_once_and_numbers_that_json_lacks_are_null(tmp_path):
    nan, inf = math.nan, math.inf
    steps = [record(1), record(2, loss=nan, metrics={"a": -inf, "b": 1.0}), skipped(3, loss=inf)]
    files = MetricsFiles(tmp_path, NONE, pytest.fail)
    for number, step in enumerate(steps, 1):
        files.write(step.to_json())
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [strict(line)["step"] for line in lines] == list(range(1, number + 1))
    assert files.finish(summary(final_loss=nan, ranks=[rank(0, share=nan)])) == []
    first, done, left_out = map(strict, lines)
    assert first == record(1).to_json()
    assert done["loss"] is done["metrics"]["a"] is left_out["loss"] is None
    assert done["metrics"]["b"] == 1.0
    assert {"grad_norm", "clip_coef", "clipped_norm"} == done.keys() - left_out.keys() - {"metrics"}
    assert (done["skipped"], left_out["skipped"]) == (False, True)
    written = strict((tmp_path / "summary.json").read_text())
    assert written["final_loss"] is written["ranks"][0]["share"] is None


def test_summary_replaces_an_old_one_as_a_whole_or_leaves_it(tmp_path, monkeypatch):
    path, names = tmp_path / "summary.json", ["metrics.jsonl", "summary.json"]
    path.write_text("old")
    with path.open() as reader:
        MetricsFiles(tmp_path, NONE, pytest.fail).finish(summary(run_dir=str(tmp_path)))
        assert reader.read() == "old"  # who had it open keeps the old file
    assert strict(path.read_text())["run_dir"] == str(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == names

    def full(descriptor):
        raise OSError("no space left")

    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    files = MetricsFiles(tmp_path, NONE, pytest.fail)
    assert files.finish(summary()) == ["summary.json (no space left)"]
    assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == names
