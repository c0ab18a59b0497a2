"""The folder of a run before it begins, and after a loop or a job that was refused."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import mntrain
from mntrain import AgreedError, checkpoint
from mntrain.checkpoint.format import FILE, read_manifest
from mntrain.checkpoint.objects import HOOK, UNNAMED
from mntrain.options.config import Config, ModelConfig, RunConfig, TrainConfig
from mntrain.train.trainer import Trainer


def files_of(folder):
    return {path: path.is_dir() or path.read_bytes() for path in folder.rglob("*")}


def begin(world, run, features=2, kind=torch.optim.SGD, **objects):
    model = nn.Linear(features, 1)
    optimizer = world.optimizer(model, kind, lr=0.1)
    checkpoints = world.checkpoints(run, model=model, optimizer=optimizer, every=1, **objects)
    return model, optimizer, checkpoints, world.metrics(run, config={"features": features})


def train(run, features=2, kind=torch.optim.SGD):
    """A loop of one step, with a checkpoint, and all files of a run."""
    with mntrain.init(device="cpu") as world:
        model, optimizer, checkpoints, metrics = begin(world, run, features, kind)
        with metrics:
            for step in range(checkpoints.restore() + 1, 2):
                loss = model(torch.ones(1, features)).sum()
                loss.backward()
                optimizer.step()
                metrics.log(step, loss=loss)
                checkpoints.save(step, now=True)


class Unsaved:
    def state_dict(self):
        return {"a function": len}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_loop_whose_restore_is_refused_leaves_no_new_folder(tmp_path):
    with mntrain.init(device="cpu") as world:
        *_, checkpoints, _ = begin(world, tmp_path / "runs" / "a", other=Unsaved())
        with pytest.raises(AgreedError, match="a builtin_function"):
            checkpoints.restore()
    assert files_of(tmp_path) == {}


@pytest.mark.parametrize("name", [HOOK, UNNAMED])
def test_an_object_with_the_name_of_another_state_is_refused(tmp_path, name):
    said = f"checkpoints have {name} anyway: give the object another name"
    with mntrain.init(device="cpu") as world, pytest.raises(AgreedError, match=said):
        begin(world, tmp_path, **{name: Unsaved()})


def test_a_loop_with_another_model_leaves_a_run_as_it_was(tmp_path):
    train(tmp_path, 2)
    before = files_of(tmp_path)
    assert {"config.toml", "summary.json", "recorder"} < {path.name for path in before}
    with pytest.raises(AgreedError, match="of another model"):
        train(tmp_path, 3)
    assert files_of(tmp_path) == before


def test_a_loop_with_an_optimizer_of_another_class_leaves_a_run_as_it_was(tmp_path):
    train(tmp_path)
    before = files_of(tmp_path)
    said = "was saved with the optimizer SGD, and this one is AdamW: give the same class, or "
    with pytest.raises(AgreedError, match=f"step-00000001 {said}another run directory$"):
        train(tmp_path, kind=torch.optim.AdamW)
    assert files_of(tmp_path) == before
    folder = tmp_path / "checkpoints" / "step-00000001"
    with mntrain.init(device="cpu") as world:  # as a partial, the same class
        *_, checkpoints, _ = begin(world, tmp_path, kind=partial(torch.optim.SGD, momentum=0.5))
        assert checkpoints.restore() == 1
    earlier = replace(read_manifest(folder), optimizer_class="")  # of a version without it
    (folder / FILE).write_text(earlier.to_json())
    with mntrain.init(device="cpu") as world:
        *_, checkpoints, _ = begin(world, tmp_path, kind=torch.optim.AdamW)
        assert checkpoints.restore() == 1


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq AdamW"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum_buffer RMSprop"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg RMSprop"),
        (torch.optim.SGD, {"momentum": 0.9}, ""),  # which begins with the next gradient
    ],
)
def test_a_loop_whose_optimizer_needs_state_that_was_not_saved_is_told_so(
    tmp_path, kind, options, said
):
    train(tmp_path, kind=kind)
    before, other = files_of(tmp_path), partial(kind, **options)
    if not said:
        train(tmp_path, kind=other)
        return
    key, name = said.split()
    text = f"has no {key} in the optimizer's state, which {name} needs with these options: give tho"
    with pytest.raises(AgreedError, match=text):
        train(tmp_path, kind=other)
    assert files_of(tmp_path) == before
    with mntrain.init(device="cpu") as world:
        model, optimizer, *_ = begin(world, tmp_path / "other", kind=other)
        kept = checkpoint.newest(world, tmp_path)
        weights = copy.deepcopy(model.state_dict())
        with pytest.raises(AgreedError, match=text):
            checkpoint.load(kept, model, optimizer, world)
        assert all(torch.equal(weights[n], tensor) for n, tensor in model.state_dict().items())


def test_metrics_alone_begin_a_run_at_once(tmp_path):
    with mntrain.init(device="cpu") as world:
        world.metrics(tmp_path / "a", config={"seed": 3})
        assert {path.name for path in (tmp_path / "a").iterdir()} >= {"config.toml", "recorder"}


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with mntrain.init(device="cpu") as world:
        for make in (world.metrics, partial(begin, world)):
            with pytest.raises(AgreedError, match='run_dir is "": give the folder of a run'):
                make("")
    assert files_of(tmp_path) == {}


def test_a_job_that_is_refused_in_its_last_check_leaves_no_new_folder(tmp_path, monkeypatch):
    def refuse(self):
        raise ValueError("refused")

    monkeypatch.setattr("mntrain.checkpoint.saver.Saver.check", refuse)
    config = Config(
        device="cpu",
        model=ModelConfig(layers=1, heads=1, width=8, context=8),
        train=TrainConfig(steps=1, batch_size=1, eval_samples=1),
        run=RunConfig(dir=tmp_path / "a", stop_after=1),
    )
    with mntrain.init(device="cpu") as world, pytest.raises(AgreedError, match="refused"):
        Trainer(world, config)
    assert files_of(tmp_path) == {}
