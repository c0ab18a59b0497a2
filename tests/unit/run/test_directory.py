"""A run directory, and files of earlier jobs in it."""

import json
import shutil
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mntrain.checks import storage
from mntrain.errors import AgreedError, agreement
from mntrain.run.directory import RunDirectory, rewind


def test_rewinding_removes_what_later_steps_have_left(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in (1, 2, 3, 4)]
    foreign = ["5", "[4]", "null", '{"loss": 1}', '{"step": "4"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines + foreign) + '\n{"step": 5, "lo')
    assert RunDirectory(alone(), tmp_path).last_step == 4
    (tmp_path / "summary.json").write_text("{}")
    for step in (2, 3, 4):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    rewind(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:3]
    assert not (tmp_path / "summary.json").exists()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000002", "step-00000003", "step-00000004.aside"]


def alone():
    recorder = Mock(opened=True)
    world = SimpleNamespace(rank=0, size=1, master=True, watchdog=Mock(), recorder=recorder)
    world.gather, world.agreement = lambda x: [x], nullcontext
    return world


def test_metrics_that_cannot_be_read_are_an_error_of_all_ranks(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    world = alone()
    world.agreement = partial(agreement, world.gather, 0)
    with pytest.raises(AgreedError, match=r"Is a directory: '.*/metrics.jsonl'$"):
        RunDirectory(world, tmp_path)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_new_directory_belongs_to_one_job_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [RunDirectory(alone()) for _ in range(16)]
    assert names(tmp_path / "runs") == sorted(
        f"{one.path.name}{end}" for one in made for end in ("", "/.lock")
    )
    for one in made:
        one.close()


def test_a_refused_job_leaves_nothing_but_what_was_there(tmp_path):
    RunDirectory(alone(), tmp_path / "a" / "b").close()
    assert names(tmp_path) == []
    (tmp_path / "a").mkdir()
    refused = RunDirectory(alone(), tmp_path / "a")
    refused.write_files({"config.toml": b""})
    refused.close()
    rewind(tmp_path / "a", 0)
    assert names(tmp_path) == ["a"]


def test_a_run_that_has_begun_stays_with_the_files_that_it_was_given(tmp_path):
    run = RunDirectory(alone(), tmp_path / "a")
    run.write_files({"be/fore/all": b"1", "lines": None})
    assert names(run.path) == [".lock"]
    (run.path / "lines").write_text("a cut")
    run.begin()
    run.write_files({"later": b""})
    run.close()
    assert names(run.path) == ["be", "be/fore", "be/fore/all", "later", "lines"]
    assert (run.path / "lines").read_text() == "a cut\n"


def test_a_directory_that_was_removed_is_not_made_anew(tmp_path):
    run = RunDirectory(alone(), tmp_path / "a")
    run.begin()
    shutil.rmtree(run.path)
    for name in ("config.toml", "hf/config.json"):
        with pytest.raises(ValueError, match="no files can be made in the run directory"):
            run.write_files({name: b""})
    run.close()
    assert names(tmp_path) == []


def test_a_run_is_started_over_only_by_a_job_that_saves_and_without_a_result(tmp_path):
    with RunDirectory(alone(), tmp_path) as run:
        run.write_files({"config.toml": b""})
        run.rewind(0, saves=False)
        run.rewind(0)
        with pytest.raises(ValueError, match="holds a run already: give another run directory"):
            run.rewind(0, saves=False)
        run.write_early_end("crashed", "")
        run.rewind(0)
        (tmp_path / "summary.json").write_text('{"status": "completed"}')
        with pytest.raises(ValueError, match="holds a run already"):
            run.rewind(0)
        run.rewind(2)
        assert not (tmp_path / "summary.json").exists()


def test_recordings_go_to_the_given_folder_and_a_run_without_them_is_warned(tmp_path):
    world = alone()
    world.output = world.recorder
    for problem in (None, "f: Not a directory"):
        world.recorder.opened, world.recorder.open.return_value = False, problem
        with RunDirectory(world, tmp_path / "a", tmp_path / "local") as run:
            run.begin()
        folder, _ = world.recorder.open.call_args.args
        assert folder.is_relative_to(tmp_path / "local")
        told = [f"no recording for autopsy: {problem}"] if problem else []
        assert [call.args[0] for call in world.recorder.warn.call_args_list] == told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_see_what_rank_0_writes_is_named(tmp_path, monkeypatch, rank):
    world = SimpleNamespace(**{**vars(alone()), "size": 2, "rank": rank})
    world.gather = lambda own: [own, False] if isinstance(own, bool) else [own] * 2
    monkeypatch.setattr(storage, "_SEEN_S", 0.1)
    said = pytest.raises(ValueError, match=f"^{tmp_path} is not the folder that rank 0 sees, and a")
    with RunDirectory(world, tmp_path) as run, said if rank else nullcontext():
        run.expect_shared()
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["runs", "runs/a"])
@pytest.mark.parametrize("kind", ["file", "dangling link", "loop"])
def test_what_is_no_folder_in_place_of_one_is_named(name, kind, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(path.name if kind == "loop" else tmp_path / "nothing")
    said = rf"\(\[Errno \d+\] \w.*: '{path}.*'\): give a folder in which they"
    with pytest.raises(ValueError, match=said):
        RunDirectory(alone(), tmp_path / "runs" / "a")
    assert not (tmp_path / "nothing").exists()


def test_a_link_to_a_folder_is_one(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "run").symlink_to("there")
    made = RunDirectory(alone(), tmp_path / "run" / "a")
    RunDirectory(alone(), tmp_path / "run").close()
    assert names(tmp_path / "there") == ["a", "a/.lock"]
    made.close()
    assert names(tmp_path / "there") == []
