"""Jobs on text that is tokenized: a saved dataset with a byte-pair encoding."""

import sys
from pathlib import Path

import pytest
from corpora import stories, write_bpe, write_records
from job import completed, losses, train
from launch import mpirun

PAGE = Path(__file__).parents[2] / "docs" / "job.md"
STEPS = ["--train.steps", "30", "--optim.lr", "1e-2", "--checkpoint.every", "10"]


@pytest.fixture
def options(tmp_path, monkeypatch) -> list[str]:
    """The options of the data, which has a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_records(tmp_path / "a", stories(400), field="story")
    given = f"bpe:{write_bpe(tmp_path)}"
    return ["--data.path", str(path), "--data.text-field", "story", "--data.tokenizer", given]


@pytest.mark.exhaustive
def test_a_job_on_a_saved_dataset_learns_resumes_and_its_sample_decodes(tmp_path, options):
    first = train(2, tmp_path, *options, *STEPS, "--run.stop-after", "20")
    completed(first)
    assert first.stderr.count("mntrain: tokenizing") == 1  # by one rank of the node
    assert "epochs" in first.stdout
    second = completed(train(2, tmp_path, *options, *STEPS))
    assert "tokenizing" not in second.stderr
    found = losses(tmp_path)
    assert found[0] > 5
    assert found[-1] < 0.8 * found[0]
    whole = tmp_path / "whole"
    whole.mkdir()
    completed(train(2, whole, *options, *STEPS))
    assert losses(whole) == found
    begin = "import mntrain.options.command_line"  # of the lines of job.md that generate text
    lines = begin + PAGE.read_text().partition(begin)[2].partition('"\n```')[0]
    for of_page, here in {"runs/text": "run", "00001000": "00000030", "Once": "12 and 13"}.items():
        assert of_page in lines
        lines = lines.replace(of_page, here)
    result = completed(mpirun(1, [sys.executable, "-c", lines], cwd=tmp_path, timeout=250))
    assert result.stdout.startswith("12 and 13")
