"""Options read from a TOML file, and written to one."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from mntrain.cli import parse, to_toml
from mntrain.config import (
    CommConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
)

COUNTS = st.integers(1, 10**12)
FLOATS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
TEXTS = st.text(min_size=1)
PATHS = st.none() | st.sampled_from([Path("none"), Path()]) | TEXTS.map(Path)
SETS = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9_.-]+", fullmatch=True), PATHS.filter(bool), min_size=1
)
# Options of every kind: texts, paths, sets, numbers, choices, switches, and none.
CONFIGS = st.builds(
    Config,
    task=TEXTS,
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    data=st.builds(DataConfig, path=PATHS, glob=TEXTS, valid_path=PATHS | SETS),
    model=st.builds(ModelConfig, layers=COUNTS, context=COUNTS),
    optim=st.builds(
        OptimConfig,
        lr=FLOATS | COUNTS,
        max_grad_norm=st.none() | FLOATS,
        min_lr_fraction=st.floats(0, 1),
    ),
    train=st.builds(TrainConfig, steps=COUNTS, compile=st.booleans()),
    comm=st.builds(CommConfig, bucket_mb=FLOATS, ranks_per_node=st.none() | COUNTS),
    zero=st.builds(ZeroConfig, stage=st.sampled_from([0, 1, 2])),
    run=st.builds(RunConfig, dir=PATHS, seed=st.integers(0, 2**32 - 1)),
)


@pytest.fixture
def toml(tmp_path):
    """A function that writes a TOML file of the given text."""

    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_validation_data_are_a_path_or_a_table(toml):
    config = parse(["--config", str(toml('[data]\nvalid_path = "a=b"'))])
    assert config.data.validation_paths == {"": Path("a=b")}
    config = parse(["--config", str(toml('[data.valid_path]\nnews = "n"\ncode = "c"'))])
    assert list(config.data.validation_paths.items()) == [("code", Path("c")), ("news", Path("n"))]
    assert config.data.validation_paths == config.data.valid_path
    assert parse(["--config", str(toml("[data.valid_path]"))]).data.valid_path is None


def test_command_line_wins_over_the_file_and_both_are_checked_together(toml):
    path = toml("[train]\nsteps = 7\nbatch_size = 16\ncompile = true\n[optim]\nlr = 1\n")
    config = parse(["--train.steps", "9", "--config", str(path), "--train.no-compile"])
    expected = Config(train=TrainConfig(steps=9, batch_size=16), optim=OptimConfig(lr=1))
    assert config == dataclasses.replace(expected, config=path)
    words = ["--config", str(toml("[model]\nheads = 3\n[train]\nsteps = 0"))]
    config = parse([*words, "--model.width", "96", "--train.steps", "5"])
    assert (config.model, config.train.steps) == (ModelConfig(heads=3, width=96), 5)
    for text in ("", "[train]\n"):
        assert parse(["--config", str(toml(text))]) == Config(config=path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[train]\nsteps = 5.0", "train.steps: Input should be a valid integer, not 5.0"),
        ("[train]\nsteps = true", "train.steps: Input should be a valid integer, not True"),
        ("[train]\ncompile = 1", "train.compile: Input should be a valid boolean, not 1"),
        (
            "[data.valid_path]\na = 3",
            "data.valid_path: must be names and paths (the path of 'a' is missing), not {'a': 3}",
        ),
        (
            "[checkpoint]\nevery = true",
            "checkpoint.every: must be a number of steps, minutes such as 10min, or auto, not True",
        ),
        ("[trian]\nsteps = 5", "trian.steps: no such option; did you mean train.steps?"),
        (
            "[train]\nbatch-siz = 5",
            "train.batch-siz: no such option; did you mean train.batch_size?",
        ),
        (
            "[train]\nbatch_size = 5\nbatch-size = 5",
            "train.batch_size and train.batch-size are one option: give it once",
        ),
        ("[[zero]]\nstage = 0", "zero: no such option; python -m mntrain --help lists all"),
        (
            'config = "other.toml"',
            "config: no such option; python -m mntrain --help lists all",
        ),
    ],
)
def test_error_names_the_file_and_the_option(toml, text, problem):
    path = toml(text)
    assert refused("--config", path) == [f"mntrain: {path}: {problem}"]


def test_all_problems_of_a_file_are_reported_at_once(toml):
    path = toml("[train]\nsteps = 0\nlr = 1\n[foo]\nbar = 1")
    assert [line.split(": ")[2] for line in refused("--config", path)] == ["train.lr", "foo.bar"]


def test_file_that_cannot_be_read(toml, tmp_path):
    assert refused("--config=") == ["mntrain: --config: must be a path or none, not ''"]
    missing = tmp_path / "missing.toml"
    assert refused("--config", missing) == [
        f"mntrain: --config {missing}: cannot be read: No such file or directory"
    ]
    assert refused("--config", tmp_path) == [
        f"mntrain: --config {tmp_path}: cannot be read: Is a directory"
    ]


@pytest.mark.parametrize("content", [b"steps 5", b"task = '\xff'", b"a = 1\na = 2"])
def test_file_that_is_not_toml(tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    (line,) = refused("--config", path)
    assert line.startswith(f"mntrain: --config {path}: is not TOML: ")


@settings(max_examples=30, deadline=None)
@given(CONFIGS)
def test_to_toml_gives_the_same_configuration_again(config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(to_toml(config), encoding="utf-8")
        again = parse(["--config", str(path)])
    assert again == dataclasses.replace(config, config=path)
    assert to_toml(again) == to_toml(config)  # without the file of origin


def test_names_may_have_dashes_as_on_the_command_line(toml):
    text = "[train]\nbatch-size = 40\nmicro_batch-size = 5\n[checkpoint]\nevery = 5\n"
    text += "[run]\nallow-change = ['batch-size']\n"
    text += "[data.valid-path]\na-b = 'x'\n[optim.options]\nmax-lr = 1"
    config = parse(["--config", str(toml(text))])
    assert (config.train.batch_size, config.train.micro_batch_size) == (40, 5)
    assert config.checkpoint.every == "5"  # a file may have a number
    assert config.run.allow_change == ("batch-size",)
    assert config.data.valid_path == {"a-b": Path("x")}  # names of the user's own stay
    assert config.optim.options == {"max-lr": 1}
