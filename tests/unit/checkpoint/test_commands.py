"""`python -m mntrain ckpt`: what it says of checkpoints that one job has saved, sound and not."""

import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import TESTS, mpirun
from safetensors.torch import load_file, save_file
from test_format import TENSORS, filled, write_in_parts
from torch import nn

from mntrain.checkpoint import compare as compare_module
from mntrain.checkpoint import export
from mntrain.checkpoint.commands import run
from mntrain.checkpoint.compare import CheckpointDifference, compare
from mntrain.checkpoint.discovery import opened
from mntrain.checkpoint.manifest import FILE, MODEL, OPTIMIZER
from mntrain.checkpoint.verified_file import VerifiedFile

ENDINGS = ["safetensors", "pt", "pth"]


class Model(nn.Module):
    """Has what a plain file may lose: a tie, several dtypes, a scalar, nothing, and buffers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.norm, self.coarse = nn.BatchNorm1d(6), nn.Linear(6, 6).bfloat16()
        self.scale, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        wide = torch.tensor([0.0, math.nan, math.inf], dtype=torch.float64)
        self.register_buffer("wide", wide)


class Other(Model):
    """Has another shape, another dtype, one tensor less and one more."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 6), nn.Linear(6, 7, bias=False).double()
        self.more = nn.Parameter(torch.ones(2))
        del self.mask


class Many(nn.Module):
    """Has 60 parameters; the last one changes most."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList([torch.full((2,), float(i)) for i in range(60)])


CONFIG = {"task": "none", "optim": {"max_grad_norm": None, "lr": 0.01}}
OTHER_CONFIG = {"task": "none", "optim": {"max_grad_norm": 1.0, "lr": 0.01}, "train": {"steps": 5}}


def save_all(folder: Path) -> None:
    """Save the runs of these tests, and what their models then have; in a process with MPI."""
    import mntrain

    with mntrain.init(device="cpu", tune=False) as world:
        model = seeded(Model)
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01)
        for step in (1, 2):
            train(model, optimizer)
            save(world, model, optimizer, folder / "run", step)
        torch.save(model.state_dict(), folder / "run.pt")
        nudge(model)
        save(world, model, optimizer, folder / "nudged", 2, config=OTHER_CONFIG)
        for kind in (Other, Many):
            model = seeded(kind)
            optimizer = world.optimizer(model, torch.optim.SGD, lr=0.25)
            for step in (1, 2):
                train(model, optimizer)
                save(world, model, optimizer, folder / kind.__name__, step)


def seeded(kind):
    torch.manual_seed(3)
    return kind()


def train(model, optimizer):
    sum(parameter.double().square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(world, model, optimizer, folder, step, *, config=CONFIG):
    from mntrain.checkpoint import RunProgress, Saver

    progress = RunProgress(step, config, samples=12, skipped_steps=0, eval_loss=None)
    Saver(world, model, optimizer, folder, keep=3).save(progress)


@torch.no_grad()
def nudge(model):
    model.tokens.weight[2, 3] += 0.5
    model.coarse.weight[-1] *= 1.25
    model.norm.num_batches_tracked += 3
    model.norm.running_mean[:2] = math.nan
    model.norm.running_var[0] = math.inf
    model.mask[1] = True
    model.wide[0] = -0.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of runs; nobody changes them."""
    folder = tmp_path_factory.mktemp("saved")
    program = "import pathlib, test_commands as t; t.save_all(pathlib.Path('.'))"
    path = os.pathsep.join(
        filter(
            None, [str(TESTS / "helpers"), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        )
    )
    command = [sys.executable, "-c", program]
    result = mpirun(1, command, timeout=60, cwd=folder, env={"PYTHONPATH": path})
    assert result.returncode == 0, result.report()
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    """A copy of the runs, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copied"))


@pytest.fixture
def ckpt(capsys):
    """Runs the command in this process; gives its exit code, stdout and stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        try:
            code = run([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return (code, *capsys.readouterr())

    return call


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / "step-00000002"


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


# Reading with checksums.


@settings(max_examples=60, deadline=None)
@given(described=TENSORS, low=st.floats(0, 1), high=st.floats(0, 1))
def test_any_range_is_read_across_runs(tmp_path_factory, described, low, high):
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    tensors = {name: filled(*about) for name, about in described.items()}
    with VerifiedFile(path, write_in_parts(path, tensors)) as reader:
        for name, tensor in tensors.items():
            start, stop = sorted((int(low * tensor.numel()), int(high * tensor.numel())))
            assert torch.equal(reader.read(name, start, stop), tensor.reshape(-1)[start:stop])
        whole = b"".join(bytes(piece) for piece in reader.pieces(0, reader.layout.nbytes))
        assert whole == path.read_bytes()


def test_a_flipped_bit_is_an_error_where_it_is_read_and_nowhere_else(tmp_path):
    path = tmp_path / "a.safetensors"
    runs = write_in_parts(path, {"a": torch.randn(30), "b": torch.randn(30)})
    with VerifiedFile(path, runs) as reader:
        at = reader.layout.entries["b"].start + 4 * 17
        flip(path, at)
        reader.read("a", 0, 30)
        reader.read("b", 0, 10)
        with pytest.raises(ValueError, match=r"a\.safetensors is damaged between bytes") as error:
            reader.read("b", 0, 30)
        low, high = map(int, str(error.value).partition("bytes ")[2].split(" and "))
        assert low <= at < high < low + 4 * 11


# diff


def compared(first: Path, second: Path) -> CheckpointDifference:
    return compare((first, second), (opened(first), opened(second)))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def expected_change(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """In fp64, by numpy; where both are the same infinity or NaN there is no difference."""
    a, b = (tensor.double().numpy() for tensor in (ours, theirs))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.where(same, 0.0, a - b)
        norm = np.linalg.norm(gap)
        return np.abs(gap).max(), norm / np.linalg.norm(a) if norm else 0.0


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_diff_measures_what_differs_and_counts_what_is_equal(saved, monkeypatch, block):
    monkeypatch.setattr(compare_module, "_BLOCK", block)
    paths = newest(saved / "run"), newest(saved / "nudged")
    difference = compared(*paths)
    found = difference.files[MODEL]
    ours, theirs = (load_file(path / MODEL) for path in paths)
    differ = {name for name in ours if bits(ours[name]) != bits(theirs[name])}
    assert differ > {"tokens.weight", "head.weight", "coarse.weight", "mask", "wide"}
    assert {one.name for one in found.changes} == differ
    assert found.equal == len(ours) - len(differ)
    assert (found.only, found.unlike) == (([], []), {})
    for one in found.changes:
        expected = expected_change(ours[one.name], theirs[one.name])
        assert (one.largest, one.relative) == pytest.approx(expected, rel=1e-12, nan_ok=True)
    largest = [one.largest for one in found.changes]
    assert math.isnan(largest[0])
    assert largest[1:] == sorted(largest[1:], reverse=True)
    assert (largest[1], largest[-1], found.changes[-1].name) == (math.inf, 0.0, "wide")
    assert difference.files[OPTIMIZER].same
    assert not difference.same_state


def test_a_checkpoint_does_not_differ_from_itself(saved, ckpt):
    code, out, err = ckpt("diff", saved / "run", newest(saved / "run"))
    assert (code, err) == (0, "")
    assert "step: 2 in both" in out
    for name in (MODEL, OPTIMIZER):
        count = len(load_file(newest(saved / "run") / name))
        assert f"{name}: {count} tensors in both, {count} of them equal bit for bit" in out


def test_diff_says_which_options_differ_by_their_flags(saved, ckpt):
    code, out, _ = ckpt("diff", saved / "run", saved / "nudged")
    assert code == 1
    assert "--optim.max-grad-norm: none and 1.0\n" in out
    assert "--train.steps: absent and 5\n" in out
    assert "--optim.lr" not in out
    assert "--task" not in out


def test_diff_says_what_training_changed(saved, ckpt):
    code, out, _ = ckpt("diff", newest(saved / "run").with_name("step-00000001"), saved / "run")
    assert code == 1
    assert "step: 1 and 2" in out
    assert "step in the optimizer: 1.0 and 2.0 for " in out
    assert "tokens.weight/exp_avg " in out
    assert "coarse.bias/master " in out


def test_diff_names_what_only_one_has_and_what_is_unlike(saved, ckpt):
    code, out, _ = ckpt("diff", saved / "run", saved / "Other")
    assert code == 1
    model, _, state = out.partition(OPTIMIZER)
    assert "  only in A: mask\n" in model
    assert "  only in B: more\n" in model
    assert "tokens.weight is float32 (7, 6) and float32 (8, 6)" in model
    assert "head.weight is float32 (7, 6) and float64 (7, 6)" in model
    assert "only in A: " in state
    assert "only in B: " not in state


@pytest.mark.parametrize(
    "change",
    [
        {"only": (["a"], [])},
        {"only": ([], ["a"])},
        {"unlike": {"a": ()}},
        {"changes": [compare_module.TensorChange("a", 0.0, 0.0)]},
    ],
)
def test_one_tensor_is_enough_for_a_difference(saved, change):
    found = compared(newest(saved / "run"), newest(saved / "run"))
    assert found.same_state
    files = {**found.files, OPTIMIZER: replace(found.files[OPTIMIZER], **change)}
    assert not replace(found, files=files).same_state
    assert not replace(found, numbers={"step": {"a": (1, 2)}}).same_state


def test_diff_shows_the_largest_of_many_and_counts_the_others(saved, ckpt):
    first = newest(saved / "Many").with_name("step-00000001")
    code, out, _ = ckpt("diff", first, saved / "Many")
    assert code == 1
    rows = [int(number) for number in re.findall(r"rows\.(\d+) ", out)]
    assert rows == list(range(59, 39, -1))
    assert "  and 39 more\n" in out
    assert f"{MODEL}: 60 tensors in both, 1 of them equal bit for bit" in out


# export


def loaded(file: Path) -> dict[str, torch.Tensor]:
    """What the format's own library makes of it."""
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_exported_model_is_the_one_that_was_saved(saved, tmp_path, ckpt, ending):
    out = tmp_path / f"model.{ending}"
    code, said, err = ckpt("export", saved / "run", out)
    assert (code, err) == (0, "")
    assert said.startswith(f"{out}: the model of {newest(saved / 'run')}, 0.0 MB")
    found, expected = loaded(out), torch.load(saved / "run.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert bits(tensor) == bits(expected[name])
    model = Model()
    model.load_state_dict(found)
    assert all(bits(tensor) == bits(expected[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.tokens.weight
    assert os.listdir(tmp_path) == [out.name]
    assert out.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_is_replaced_only_where_that_is_asked_for(saved, tmp_path, ckpt, ending):
    out = tmp_path / f"model.{ending}"
    out.write_text("mine")
    said = f"mntrain: {out} exists: give another name, or --force to replace it\n"
    assert ckpt("export", saved / "run", out) == (2, "", said)
    assert out.read_text() == "mine"
    assert ckpt("export", saved / "run", out, "--force")[0] == 0
    assert "tokens.weight" in loaded(out)


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    "where",
    [
        ("model.bin", "its ending is to say the format: .safetensors or .pt or .pth"),
        ("model", "its ending is to say the format"),
        ("none/model.pt", "none is no folder: make it, or give another"),
        ("file/model.pt", "file is no folder: make it, or give another"),
        ("folder.pt", "is a folder: give the name of a file"),
    ],
)
def test_where_nothing_can_be_written_is_refused(saved, tmp_path, ckpt, where, force):
    name, said = where
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "file").touch()
    code, out, err = ckpt("export", saved / "run", tmp_path / name, *force)
    assert (code, out) == (2, "")
    assert err.count(said) == err.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*")} == {"folder.pt", "file"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize(("ending", "room"), [("safetensors", False), ("pt", False), ("pt", True)])
def test_a_full_disk_is_one_error_and_leaves_what_is_there(saved, tmp_path, ckpt, ending, room):
    """Without room there is none for the tensors; with it, none for what torch writes besides."""
    needed = -(-(newest(saved / "Many") / MODEL).stat().st_size // 4096)
    small = tmp_path / "small"
    small.mkdir()
    options = f"size={4096 * (1 + (needed if room else 0))}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", small], check=True)
    try:
        out = small / f"model.{ending}"
        out.write_text("mine")
        code, _, err = ckpt("export", saved / "Many", out, "--force")
        assert code == 2
        assert err.startswith(f"mntrain: {out} was not written: No space left on device: it needs ")
        assert err.count("\n") == 1
        assert out.read_text() == "mine"
        assert os.listdir(small) == [out.name]
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("limit", [1000, 5000, 10_000])  # torch raises one of its own at some
def test_what_torch_makes_of_an_error_of_the_file_is_that_error(saved, tmp_path, limit):
    path, out = newest(saved / "Many") / MODEL, tmp_path / "model.pt"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = out.open("wb")
    with VerifiedFile(path, opened(path.parent).runs[MODEL]) as model:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                export._save(model, path, file)
        finally:
            with suppress(OSError):  # it cannot write the rest either
                file.close()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("ending", ENDINGS[:2])
def test_damage_to_the_model_is_refused_before_anything_is_left(copied, tmp_path, ckpt, ending):
    file, out = newest(copied / "run") / MODEL, tmp_path / "there" / f"model.{ending}"
    out.parent.mkdir()
    chance = random.Random(2)
    for at in chance.sample(range(file.stat().st_size), 40):
        bit = chance.randrange(8)
        flip(file, at, bit)
        code, _, err = ckpt("export", copied / "run", out)
        assert code == 2
        assert err.count(MODEL) == err.count("\n") == 1
        assert not list(out.parent.iterdir())
        flip(file, at, bit)
    assert ckpt("export", copied / "run", out)[0] == 0


# What cannot be read, for every subcommand.


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


def change(file: Path, before: str, after: str) -> None:
    file.write_text(file.read_text().replace(before, after, 1))


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = {
    "a manifest cut": (lambda path: cut(path / FILE, -20), f"{FILE} is not that of a checkpoint"),
    "a manifest emptied": (lambda path: cut(path / FILE, 0), f"{FILE} is not that of a check"),
    "another manifest": (
        lambda path: (path / FILE).write_text('{"name": "an app", "icons": []}'),
        f"{FILE} is not that of a checkpoint",
    ),
    "a later manifest": (
        lambda path: change(path / FILE, "checkpoint 1", "checkpoint 9"),
        f"{FILE} is of format 'mntrain checkpoint 9'",
    ),
    "a changed manifest": (
        lambda path: change(path / FILE, "step", "stop"),
        f"{FILE} is damaged: it does not have its checksum",
    ),
    "a model cut": (lambda path: cut(path / MODEL, -1), f"{MODEL} has "),
    "a model emptied": (lambda path: cut(path / MODEL, 0), f"{MODEL} is no safetensors file"),
    "a pickle": (
        lambda path: torch.save({"a": 1}, path / MODEL),
        f"{MODEL} is no safetensors file, or is cut short",
    ),
    "another model": (
        lambda path: save_file({"a": torch.ones(3)}, path / MODEL),
        f"{MODEL} has 76 bytes, and was written with",
    ),
    "no optimizer": (lambda path: (path / OPTIMIZER).unlink(), f"{OPTIMIZER} is missing"),
    "a folder for a model": (
        lambda path: folder_instead(path / MODEL),
        f"{MODEL} is missing",
    ),
}

# The words, {} for the damaged checkpoint, and the exit code.
COMMANDS = {
    "show": (["show", "{}"], 1),
    "verify": (["verify", "{}"], 1),
    "diff, the first": (["diff", "{}", "{sound}"], 2),
    "diff, the second": (["diff", "{sound}", "{}"], 2),
    "export": (["export", "{}", "{out}.pt"], 2),
    "export to safetensors": (["export", "{}", "{out}.safetensors"], 2),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_what_cannot_be_read_is_one_error_that_names_it(saved, copied, tmp_path, ckpt, how):
    damage, said = DAMAGES[how]
    path = newest(copied / "run")
    damage(path)
    for template, expected in COMMANDS.values():
        words = [word.format(path, sound=saved / "run", out=tmp_path / "a") for word in template]
        code, out, err = ckpt(*words)
        assert (code, out) == (expected, "")
        assert err.count(str(path)) == err.count(said) == err.count("\n") == 1
    assert os.listdir(tmp_path) == ["copied"]
    code, out, err = ckpt("list", copied / "run")
    assert code == 1
    assert err.count(str(path)) == err.count(said) == err.count("\n") == 1
    assert out.count("unsound") == out.count("complete") == 1


@pytest.mark.parametrize("template", COMMANDS)
@pytest.mark.parametrize("what", ["nothing", "an empty folder", "a file", "too long a name"])
def test_what_is_no_checkpoint_is_one_error(saved, tmp_path, ckpt, template, what):
    path = tmp_path / ("x" * 300 if what == "too long a name" else "x")
    if what == "an empty folder":
        path.mkdir()
    elif what == "a file":
        path.write_text("x")
    words, expected = COMMANDS[template]
    words = [word.format(path, sound=saved / "run", out=tmp_path / "a") for word in words]
    code, out, err = ckpt(*words)
    assert (code, out) == (expected, "")
    assert err.startswith(f"mntrain: {path}: ")
    assert err.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == (what in ("an empty folder", "a file"))
    assert ckpt("list", path)[0] == 1


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_a_flipped_bit_is_noticed_by_who_reads_it(saved, copied, ckpt, name):
    path, chance = newest(copied / "run"), random.Random(4)
    for at in chance.sample(range((path / name).stat().st_size), 40):
        bit = chance.randrange(8)
        flip(path / name, at, bit)
        for words, expected in (
            (["verify", path], 1),
            (["diff", path, saved / "run"], 2),
            (["diff", saved / "run", path], 2),
        ):
            code, out, err = ckpt(*words)
            assert (code, out) == (expected, "")
            assert err.count(name) == err.count("\n") == 1
            assert str(path) in err
        flip(path / name, at, bit)
    assert ckpt("verify", path)[0] == 0


def test_a_flipped_bit_of_the_manifest_is_noticed_by_all(saved, copied, tmp_path, ckpt):
    path, chance = newest(copied / "run"), random.Random(6)
    for at in chance.sample(range((path / FILE).stat().st_size), 40):
        bit = chance.randrange(8)
        flip(path / FILE, at, bit)
        for template, expected in COMMANDS.values():
            words = [
                word.format(path, sound=saved / "run", out=tmp_path / "a") for word in template
            ]
            code, out, err = ckpt(*words)
            assert (code, out) == (expected, "")
            assert err.count(FILE) == err.count("\n") == 1
        flip(path / FILE, at, bit)


@pytest.mark.parametrize(
    "words",
    [[], ["compare"], ["diff", "a"], ["export", "a"], ["list"], ["export", "a", "b.pt", "--frce"]],
)
def test_words_that_say_nothing_are_refused(ckpt, words):
    code, out, err = ckpt(*words)
    assert (code, out) == (2, "")
    assert err.count("error: ") == 1
