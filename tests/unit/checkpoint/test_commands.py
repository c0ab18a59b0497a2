"""`python -m mntrain ckpt` on sound and on damaged checkpoints."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from damages import DAMAGES
from kernel_cases import bits
from manifests import manifest
from safetensors.torch import load_file
from saved_runs import SavedModel, save_all

from mntrain.checkpoint import commands, reader
from mntrain.checkpoint.format import MODEL, OPTIMIZER

pytestmark = pytest.mark.xdist_group("commands")  # of the same runs


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of runs, which no test changes."""
    folder = tmp_path_factory.mktemp("saved")
    save_all(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    """A copy of the runs, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copied"))


@pytest.fixture
def ckpt(capsys):
    """Runs the command in this process; gives its exit code, stdout and stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        code = commands.run([str(word) for word in words])
        return (code, *capsys.readouterr())

    return call


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / "step-00000002"


# list


@pytest.mark.parametrize(
    ("metric", "scored"),
    [
        ("eval_loss", ([3.0, 1.0, 2.0], 1)),
        ("accuracy:max", ([-0.25, -0.5, -0.75], 2)),
        ("accuracy:max", ([None, -0.5, None], 1)),
        ("eval_loss", ([None, None, None], None)),
    ],
)
def test_the_best_checkpoint_is_listed(tmp_path, ckpt, monkeypatch, metric, scored):
    scores, best = scored
    paths = [tmp_path / f"step-{step:08}" for step in range(3)]
    contents = {}
    for path, score in zip(paths, scores, strict=True):
        losses = {"eval_loss": score if metric == "eval_loss" else None, "score": score}
        contents[path] = replace(manifest(), scored_by=metric, **losses)
    monkeypatch.setattr(reader, "list_checkpoints", lambda path: paths[::-1])
    monkeypatch.setattr(reader, "inspect", contents.__getitem__)
    monkeypatch.setattr(reader, "read_manifest", contents.__getitem__)
    code, out, _ = ckpt("list", tmp_path)
    assert code == 0
    for score in filter(None, scores if metric == "eval_loss" else []):
        assert f" {score:.4f}" in out
    assert (f"the best by {metric}: step-0000000{best}\n" in out) == (best is not None)


# diff


def expected_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the difference in fp64, by numpy; 0 where both are the same infinity or NaN."""
    a, b = (tensor.double().numpy() for tensor in (ours, theirs))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return np.abs(np.where(same, 0.0, a - b)).max()


def test_diff_measures_what_differs(saved):
    paths = newest(saved / "run"), newest(saved / "nudged")
    both = ((path, reader.inspect(path)) for path in paths)
    all_of_them = ((name, commands._difference(*pair)) for name, *pair in commands._pairs(*both))
    found = {name: text for name, text in all_of_them if text}
    ours, theirs = (load_file(path / MODEL) for path in paths)
    differ = {name for name in ours if bits(ours[name]) != bits(theirs[name])}
    assert differ > {"tokens.weight", "head.weight", "coarse.weight", "mask", "wide"}
    assert found.keys() == differ
    for name, text in found.items():
        expected = expected_difference(ours[name], theirs[name])
        assert float(text) == pytest.approx(expected, rel=1e-3, nan_ok=True)
    assert (found["norm.running_mean"], found["norm.running_var"]) == ("nan", "inf")
    assert found["wide"] == "0"  # but for the sign of a zero


def test_a_checkpoint_equals_itself(saved, ckpt):
    code, out, err = ckpt("diff", saved / "run", newest(saved / "run"))
    assert (code, err) == (0, "")
    count = sum(len(load_file(newest(saved / "run") / name)) for name in (MODEL, OPTIMIZER))
    label = f"{newest(saved / 'run')}, step 2"
    assert out == f"A: {label}\nB: {label}\nequal bit for bit: {count}; different: 0\n"


def test_diff_lists_tensors_of_one_side_only_and_mismatched_ones(saved, ckpt):
    code, out, _ = ckpt("diff", saved / "run", saved / "Other")
    assert code == 1
    for name, difference in (
        ("mask", "bool (3,) and absent"),
        ("more", "absent and float32 (2,)"),
        ("tokens.weight", "float32 (7, 6) and float32 (8, 6)"),
        ("head.weight", "float32 (7, 6) and float64 (7, 6)"),
        ("tokens.weight/exp_avg", "float32 (7, 6) and absent"),
        ("tokens.weight/step", "2.0 and absent"),
    ):
        assert re.search(rf"{re.escape(name)} +│ {re.escape(difference)} ", out), name


# export


def test_an_exported_model_is_the_one_that_was_saved(saved, tmp_path, ckpt):
    out = tmp_path / "model.safetensors"
    code, said, err = ckpt("export", saved / "run", out)
    assert (code, err) == (0, "")
    assert said.startswith(f"{out}: the model of {newest(saved / 'run')}, 0.")
    found, expected = load_file(out), torch.load(saved / "run.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert bits(tensor) == bits(expected[name])
    model = SavedModel()
    model.load_state_dict(found)
    assert all(bits(tensor) == bits(expected[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.tokens.weight
    assert os.listdir(tmp_path) == [out.name]


def test_export_replaces_a_file_only_with_force(saved, tmp_path, ckpt):
    out = tmp_path / "model.safetensors"
    out.write_text("mine")
    said = f"mntrain: {out} exists: give another name, or --force to replace it\n"
    assert ckpt("export", saved / "run", out) == (2, "", said)
    assert out.read_text() == "mine"
    mode = out.stat().st_mode
    assert ckpt("export", saved / "run", out, "--force")[0] == 0
    assert "tokens.weight" in load_file(out)
    assert out.stat().st_mode == mode  # as the umask says


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    "where",
    [
        ("model.pt", "must end in .safetensors, or give --hf for a folder"),
        ("model", "must end in .safetensors"),
        ("none/model.safetensors", "none is not a folder: make it, or give another"),
        ("file/model.safetensors", "file is not a folder: make it, or give another"),
        ("folder.safetensors", "is a folder: give the name of a file"),
    ],
)
def test_export_refuses_a_target_that_cannot_be_written(saved, tmp_path, ckpt, where, force):
    name, said = where
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").touch()
    code, out, err = ckpt("export", saved / "run", tmp_path / name, *force)
    assert (code, out) == (2, "")
    assert err.count(said) == err.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*")} == {"folder.safetensors", "file"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_export_to_a_full_disk_is_one_error_and_keeps_the_old_file(saved, tmp_path, ckpt):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", small], check=True)
    try:
        out = small / "model.safetensors"
        out.write_text("mine")
        code, _, err = ckpt("export", saved / "Many", out, "--force")
        assert code == 2
        assert err == f"mntrain: {out} was not written: [Errno 28] No space left on device\n"
        assert out.read_text() == "mine"
        assert os.listdir(small) == [out.name]
    finally:
        subprocess.run(["umount", small], check=True)


# Runs that remove checkpoints.


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved / "run", tmp_path / "run")


def removed_once(monkeypatch, module, name, run):
    """Let the run replace its newest checkpoint by a newer one when a function is first called."""
    original, newer = getattr(module, name), newest(run).with_name("step-00000003")

    def called(*arguments):
        if not newer.exists():
            shutil.copytree(newest(run), newer)
            newest(run).rename(newer.with_name(".step-00000002.old"))
        return original(*arguments)

    monkeypatch.setattr(module, name, called)
    return newer


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        *product(["inspect", "verify"], ["verify {}", "export {} {}.safetensors", "diff {} {}"]),
        ("inspect", "show {}"),  # which compares no bytes
    ],
)
def test_of_a_run_that_removes_its_newest_checkpoint_the_newer_one_is_read(
    run, ckpt, monkeypatch, moment, words
):
    newer = removed_once(monkeypatch, reader, moment, run)
    code, said, err = ckpt(*words.format(run, run).split())
    assert (code, err) == (0, "")
    assert str(newer) in said
    assert str(newest(run)) not in said


def test_a_list_leaves_out_a_checkpoint_that_is_removed_meanwhile(run, ckpt, monkeypatch):
    removed_once(monkeypatch, reader, "inspect", run)
    code, said, err = ckpt("list", run)
    assert (code, err) == (0, "")
    assert "step-00000002" not in said
    assert "step-00000001" in said


def test_a_checkpoint_that_was_given_and_is_removed_is_an_error(run, ckpt, monkeypatch):
    removed_once(monkeypatch, reader, "verify", run)
    code, _, err = ckpt("verify", newest(run))
    assert (code, err.startswith(f"mntrain: {newest(run)}: ")) == (1, True)


# Damaged checkpoints, for every subcommand.


COMMANDS = [  # the words, {} for the damaged checkpoint, and the exit code
    ("show {}", 1),
    ("verify {}", 1),
    ("diff {} {sound}", 2),
    ("diff {sound} {}", 2),
    ("export {} {out}.safetensors", 2),
]


def fill(template, path, saved, tmp_path):
    """The words of a command."""
    return [word.format(path, sound=saved / "run", out=tmp_path / "a") for word in template.split()]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_one_error_that_names_it(saved, copied, tmp_path, ckpt, how):
    damage, said = DAMAGES[how]
    path = newest(copied / "run")
    damage(path)
    for template, expected in COMMANDS:
        code, out, err = ckpt(*fill(template, path, saved, tmp_path))
        assert (code, out) == (expected, "")
        assert err.count(str(path)) == err.count(said) == err.count("\n") == 1
    assert os.listdir(tmp_path) == ["copied"]
    code, out, err = ckpt("list", copied / "run")
    assert code == 1
    assert err.count(str(path)) == err.count(said) == err.count("\n") == 1
    assert out.count("unsound") == out.count("complete") == 1


SAID = {
    "nothing": "there is no such folder; ",
    "an empty folder": "neither a checkpoint nor a run that has one; ",
    "a file": "neither a checkpoint nor a run that has one; ",
    "too long a name": "",
}


@pytest.mark.parametrize("what", SAID)
def test_a_path_without_a_checkpoint_is_one_error(saved, tmp_path, ckpt, what):
    path = tmp_path / ("x" * 300 if what == "too long a name" else "x")
    if what == "an empty folder":
        path.mkdir()
    elif what == "a file":
        path.write_text("x")
    for template, expected in COMMANDS:
        code, out, err = ckpt(*fill(template, path, saved, tmp_path))
        assert (code, out) == (expected, "")
        assert err.startswith(f"mntrain: {path}: {SAID[what]}")
        assert ("; give the folder of a run, or one of" in err) == (what != "too long a name")
        assert err.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == (what in ("an empty folder", "a file"))
    code, out, err = ckpt("list", path)
    assert (code, out) == (1, "")
    assert ("; give the folder of a run" in err) == (what != "too long a name")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["compare"],
        ["diff", "a"],
        ["export", "a"],
        ["list"],
        ["export", "a", "b.safetensors", "--frce"],
    ],
)
def test_a_malformed_command_line_is_refused_in_one_line(words):
    with pytest.raises(ValueError, match=r"^[^\n]*python -m mntrain ckpt[^\n]*$"):
        commands.run(words)
