"""`python -m mntrain sample` on the runs of jobs."""

import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from corpora import stories, write_bpe, write_records
from job import SMALL

import mntrain
from mntrain.__main__ import main
from mntrain.cli import parse

pytestmark = pytest.mark.xdist_group("sample")  # one job for all tests

TASK = """
from torch import nn
from mntrain.tasks import Loss, Task

class Silent(Task):
    def model(self):
        return nn.Linear(1, 1)

    def dataset(self, split):
        return [[1.0]] * 9

    def loss(self, model, batch):
        return Loss(model(batch[0].float().reshape(-1, 1)).mean(), 1)

class Speaking(Silent):
    def sample(self, model):
        return f"{model.weight.shape}\\x1b[31m"
"""


def train(folder: Path, *options: str) -> str:
    """Train in this process; return the printed text. The run directory is folder/run."""
    config = parse([*SMALL, "--run.dir", str(folder / "run"), *options])
    with redirect_stdout(StringIO()) as printed:
        mntrain.train.run(config.task, config)
    return printed.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a finished run, which no test changes, and what the job printed."""
    folder = tmp_path_factory.mktemp("saved")
    path = write_records(folder / "a.jsonl", stories(300))
    options = ["--data.path", str(path), "--data.tokenizer", f"bpe:{write_bpe(folder).name}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        return folder, train(folder, *options, "--checkpoint.every", "3")


@pytest.fixture
def run_dir(saved, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(saved[0] / "cache"))
    return Path(shutil.copytree(saved[0] / "run", tmp_path / "run"))


def test_the_sample_is_that_of_the_end_of_training(saved, run_dir, capsys):
    assert main(["sample", str(run_dir)]) == 0
    sample = "".join(capsys.readouterr().out.split())  # the job's report breaks long lines
    assert len(sample) > 50
    assert sample in "".join(saved[1].split())


def test_options_and_a_checkpoint_can_be_given(run_dir, capsys):
    def sampled(path, *words):
        assert main(["sample", str(path), "--tokens", "20", *map(str, words)]) == 0
        return capsys.readouterr().out

    assert sampled(run_dir, "--prompt", "12 and", "--tokens", 5).startswith("12 and")
    assert sampled(run_dir, "--seed", 0) == sampled(run_dir)
    assert sampled(run_dir, "--seed", 1) != sampled(run_dir)
    first, last = sorted(run_dir.glob("checkpoints/step-*"))
    greedy = ["--temperature", 0, "--prompt", "1"]
    assert sampled(last) == sampled(run_dir)
    assert sampled(first, *greedy) == sampled(first, *greedy, "--seed", 5)
    with (last / "model.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"wrong")
    assert main(["sample", str(run_dir)]) == 2
    assert "step-00000006: model.safetensors is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "absent: there is no such folder; give the folder of a run"),
        (["run", "--tokens", "0"], "--tokens 0: must be at least 1"),
        (["run", "--temperature", "nan"], "--temperature nan: must be 0 or a positive number"),
        (["run", "--temperature", "-1"], "--temperature -1.0: must be 0 or a positive number"),
        (["run", "--seed", "-1"], "--seed -1: must be between 0 and"),
    ],
)
def test_bad_input_is_one_sentence(run_dir, monkeypatch, capsys, words, message):
    monkeypatch.chdir(run_dir.parent)
    assert main(["sample", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"mntrain: {message}")
    assert err.count("\n") == 1


def test_a_run_of_an_own_loop_or_without_configuration_is_refused(run_dir, capsys):
    (run_dir / "config.toml").write_text("lr = 0.5")
    assert main(["sample", str(run_dir)]) == 2
    assert "is no run of `python -m mntrain`" in capsys.readouterr().err
    (run_dir / "config.toml").unlink()
    assert main(["sample", str(run_dir)]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_a_run_whose_tokenizer_was_changed_is_refused_or_has_the_same_size(saved, run_dir, capsys):
    config = run_dir / "config.toml"
    assert str(saved[0] / "tok.json") in config.read_text()  # found from any folder
    config.write_text(config.read_text().replace(str(saved[0] / "tok.json"), "absent.json"))
    assert main(["sample", str(run_dir)]) == 2
    assert "there is no file absent.json" in capsys.readouterr().err


def test_a_task_of_the_users_own_gets_what_it_takes(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    options = ["--task", "own:Speaking", "--train.batch-size", "2", "--train.steps", "1"]
    train(tmp_path, *options, "--checkpoint.every", "1")
    assert main(["sample", "run"]) == 0
    assert capsys.readouterr().out == "torch.Size([1, 1])\N{REPLACEMENT CHARACTER}[31m\n"
    for words in (["--prompt", "a"], ["--seed", "1"]):
        assert main(["sample", "run", *words]) == 2
        message = f"{words[0]}: sample() of --task own:Speaking has no argument"
        assert message in capsys.readouterr().err
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("own:Speaking", "own:Silent"))
    assert main(["sample", "run"]) == 2
    assert "--task own:Silent has no sample" in capsys.readouterr().err
    del sys.modules["own"]
