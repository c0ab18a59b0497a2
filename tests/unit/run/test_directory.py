"""What a run directory keeps of earlier jobs."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from mntrain.run.directory import make_and_lock, make_new, rewind


def test_rewinding_removes_what_later_steps_have_left(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    (tmp_path / "summary.json").write_text("{}")
    for step in (2, 3, 4):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    rewind(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:3]
    assert not (tmp_path / "summary.json").exists()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000002", "step-00000003", "step-00000004.aside"]


def test_rewinding_an_empty_directory_does_nothing(tmp_path):
    rewind(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_lock_names_its_holder_and_ends_with_the_file(tmp_path):
    make_and_lock(tmp_path).close()
    with make_and_lock(tmp_path):
        assert ", process " in (tmp_path / ".lock").read_text()


def test_a_new_directory_belongs_to_one_job_alone(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a-2").write_text("a file of somebody's")
    with ThreadPoolExecutor(8) as jobs:
        made = list(jobs.map(lambda _: make_new(tmp_path / "runs" / "a"), range(16)))
    assert {path.name for path in made} == {"a", *(f"a-{n}" for n in range(3, 18))}
    assert all(path.is_dir() for path in made)


@pytest.mark.parametrize("make", [make_new, make_and_lock])
@pytest.mark.parametrize("link", ["runs", "runs/a"])
def test_a_link_that_leads_nowhere_is_named(make, link, tmp_path):
    if make is make_new and link == "runs/a":
        pytest.skip("another name is free")
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "unmounted")
    with pytest.raises(
        ValueError,
        match=rf"runs.a \({tmp_path}/{link} is a link to {tmp_path}/unmounted, which does not "
        r"exist\): give a folder in which they can",
    ):
        make(tmp_path / "runs" / "a")


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(ValueError, match=rf"\({tmp_path}/runs is a file\): give a folder"):
        make_and_lock(tmp_path / "runs" / "a")
