"""The comparison of a job with the checkpoint that it continues from."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mntrain.checkpoint import FoundCheckpoint, Manifest
from mntrain.errors import AgreedError
from mntrain.options.command_line import parse, to_toml
from mntrain.options.config import Config, RunConfig, TrainConfig
from mntrain.recorder.launch_notes import VARIABLE, LaunchNotes
from mntrain.train import resumption
from mntrain.train.resumption import (
    changed_options,
    check_left,
    check_same_run,
    regrouped,
    to_json,
    with_absolute_paths,
)

WORLD = SimpleNamespace(rank=0)


def found(config, samples=7, values=None):
    data = {} if values is None else {"values": values}
    manifest = SimpleNamespace(config=config, samples=samples, data=data)
    return FoundCheckpoint(Path("step"), manifest, {})


def check(config, now=None, samples=7):
    check_same_run(WORLD, found(config), now or Config(), samples, {})


def without(*sections):
    return {name: value for name, value in to_json(Config()).items() if name not in sections}


def test_another_tokenizer_is_refused_by_name():
    config, now = to_json(Config()), {"the tokenizer": "sha256 b"}
    for before in (None, {}, now):  # None: a checkpoint of an earlier version
        check_same_run(WORLD, found(config, values=before), Config(), 7, now)
    with pytest.raises(AgreedError, match="another run: the tokenizer was bytes, and is sha256 b"):
        check_same_run(WORLD, found(config, values={"the tokenizer": "bytes"}), Config(), 7, now)


@pytest.mark.parametrize(
    ("begun", "own", "taken"),
    [
        ("", 0, {"auto": 0, "never": 0, "other": 3}),
        ("", 5, {"auto": 5, "never": 0, "other": 3}),
        ("run", 0, {"auto": 0, "never": 0, "other": 3}),
        ("run", 5, {"auto": 5, "never": 5, "other": 5}),
        ("run", 2, {"auto": 2, "never": 2, "other": 3}),  # it was there before
        ("another", 5, {"auto": 5, "never": 0, "other": 3}),
    ],
)
def test_a_later_start_goes_on_with_what_the_run_has_saved(
    tmp_path, monkeypatch, begun, own, taken
):
    if begun:
        monkeypatch.setenv(VARIABLE, str(tmp_path))
        LaunchNotes(tmp_path).use_run(tmp_path / begun)
        LaunchNotes(tmp_path).begin_start(2)
    saved = {tmp_path / "run": own, Path("other"): 3}

    def newest(world, path, local=None):
        step = saved[path]
        return FoundCheckpoint(path, SimpleNamespace(step=step), {}) if step else None

    monkeypatch.setattr(resumption.checkpoint, "newest", newest)
    world = SimpleNamespace(rank=0, master=True, gather=lambda value: [value])
    directory = SimpleNamespace(path=tmp_path / "run", local=None, last_step=0)
    for resume, step in taken.items():
        config = Config(run=RunConfig(resume=resume))
        found = resumption.find_checkpoint(world, config, directory)
        assert (found.manifest.step if found else 0) == step


def test_a_run_whose_epochs_are_complete_is_not_resumed():
    complete = FoundCheckpoint(Path("step"), SimpleNamespace(step=5), {})
    with pytest.raises(AgreedError, match=r"nothing is left to do; give more --train\.epochs,"):
        check_left(WORLD, complete, Config(train=TrainConfig(epochs=2)), 5)


def test_a_configuration_without_a_task_is_refused():
    with pytest.raises(AgreedError, match="its configuration has no task; give another"):
        check({})
    check(without("comm", "zero"))  # sections of later versions


@pytest.mark.parametrize("given", [Path("a"), {"news": Path("a"), "code": Path("/b")}, None])
def test_the_saved_configuration_finds_its_data_from_any_folder(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    data = replace(Config().data, path=Path("corpus"), valid_path=given)
    path, absolute = tmp_path / "config.toml", tmp_path / "a"
    path.write_text(to_toml(with_absolute_paths(replace(Config(), data=data))))
    saved = parse(["--config", str(path)]).data
    assert saved.path == tmp_path / "corpus"
    expected = absolute if given == Path("a") else given and given | {"news": absolute}
    assert saved.valid_path == expected


def test_the_saved_configuration_continues_its_run_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"run.dir": "a", "run.resume": "b", "run.recorder": "c", "checkpoint.local": "d"}
    given = parse([word for name, folder in options.items() for word in (f"--{name}", folder)])
    saved = with_absolute_paths(given)
    found = saved.run.dir, saved.run.resume, saved.run.recorder, saved.checkpoint.local
    assert [str(path) for path in found] == [str(tmp_path / name) for name in "abcd"]
    for word in ("auto", "never"):
        config = Config(run=RunConfig(resume=word))
        assert with_absolute_paths(config) == config


def test_changed_options_are_named_but_not_those_of_the_job():
    config = to_json(replace(Config(), data=replace(Config().data, valid_path={"a": Path("x")})))
    config["optim"]["lr"], config["run"]["grace"] = 5.0, 7.0
    del config["comm"]["timeout"]  # which the version of the checkpoint did not have
    assert set(changed_options(found(config), Config())) == {
        "--optim.lr was 5.0, is 0.003",
        "--data.valid-path was {'a': 'x'}, is none",
    }
    config = to_json(Config())
    config["run"]["seed"] = 5
    with pytest.raises(AgreedError, match=r"--run.seed was 5.* had 8 training samples, and has 7"):
        check_same_run(WORLD, found(config, samples=8), Config(), 7, {})
    check(to_json(Config()), parse(["--run.allow-change", "data"]), samples=8)
    frozen = to_json(Config())
    frozen["init"]["freeze"] = ["embedding*"]
    with pytest.raises(AgreedError, match=r"--init\.freeze was \['embedding\*'\], and is \[\]"):
        check(frozen)


def test_all_parameters_in_one_group_are_divided_as_now():
    one = [{"params": ["a", "b", "c"], "lr": 0.1, "weight_decay": 0}]
    saved = FoundCheckpoint(Path("step"), Manifest(2, {}, 0, 0, None, param_groups=one), {})
    divided = regrouped(saved, [["a", "c"], ["b"]]).manifest
    assert divided == replace(
        saved.manifest,
        param_groups=[{**one[0], "params": ["a", "c"]}, {**one[0], "params": ["b"]}],
    )
    assert regrouped(saved, [["a", "c"], ["d"]]) == saved
    two = replace(saved, manifest=divided)
    assert regrouped(two, [["a"], ["b"], ["c"]]) == two


@pytest.mark.parametrize(
    ("section", "option", "value", "word"),
    [
        ("run", "seed", 5, "seed"),
        ("data", "drop_last", True, "drop-last"),
        ("train", "batch_size", 5, "batch-size"),
        ("balance", "mode", "cadence", "batch-size"),
    ],
)
def test_an_option_changes_only_if_that_is_allowed(section, option, value, word):
    before = to_json(Config())
    before[section][option] = value
    with pytest.raises(AgreedError, match=f"Give the same, or --run.allow-change {word}, or"):
        check(before)
    check(before, parse(["--run.allow-change", word]))


def test_balancing_without_a_cadence_may_change():
    before = to_json(Config())
    before["balance"]["mode"] = "throughput"
    check(before)
    del before["balance"]  # of an earlier version
    check(before)
    with pytest.raises(AgreedError, match=r"--balance\.mode was off, and is cadence"):
        check(before, parse(["--balance.mode", "cadence"]))
