"""Options: on construction, as they are typed, and in TOML files."""

import dataclasses
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from mntrain import compression
from mntrain.__main__ import READERS
from mntrain.options.command_line import from_mapping, parse, to_toml
from mntrain.options.config import (
    CommConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    WorldConfig,
    ZeroConfig,
    flag_of,
)
from mntrain.options.types import construct, option_name
from zero.comm_hooks.between_nodes import Int8Hook


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("device", "tpu", "Input should be 'auto', 'cpu' or 'cuda', not 'tpu'"),
        ("timeout", "soon", "Input should be a valid number, not 'soon'"),
    ],
)
def test_a_bad_argument_of_a_world_is_named_with_its_value(name, value, words):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {words}')}"):
        construct(WorldConfig, {name: value}, {name: name})


def test_an_option_of_a_script_is_named_as_it_is_given():
    said = "^train.steps: Input should be a valid integer, not 'many'$"
    with pytest.raises(ValueError, match=said):
        from_mapping({"train.steps": "many"})


def test_each_compression_is_an_option_and_a_hook():
    for name in compression.NAMES:
        assert CommConfig(compress=name).compress == name
        assert isinstance(compression.select_hook(name, None), Int8Hook)
    with pytest.raises(ValueError, match="compress int8 and a comm_hook both say"):
        compression.select_hook("int8", Int8Hook())


# As they are typed.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--data.path a_folder", {"data": DataConfig(path=Path("a_folder"))}),
        ("--data.valid-path v=1/b", {"data": DataConfig(valid_path={"v": Path("1/b")})}),
        ("--data.valid-path ./v=1/b", {"data": DataConfig(valid_path=Path("v=1/b"))}),
        (
            "--data.valid-path news=a=b code=c --data.valid-fraction 0",
            {
                "data": DataConfig(
                    valid_path={"code": Path("c"), "news": Path("a=b")}, valid_fraction=0
                )
            },
        ),
        ("--data.valid-path a=b --data.valid-path none", {}),
        ("--train.batch-size=5 --train.batch_size=64", {"train": TrainConfig(batch_size=64)}),
        ("--train.compile", {"train": TrainConfig(compile=True)}),
        ("--train.compile --train.no-compile", {}),
        ("--train.steps none", {"train": TrainConfig(steps=200)}),
        ("--train.steps 5 --train.epochs 3 --train.steps none", {"train": TrainConfig(epochs=3)}),
        ("--zero.stage 1", {"zero": ZeroConfig(stage=1)}),
        (
            "--optim.lr 1e-5 --optim.max-grad-norm none",
            {"optim": OptimConfig(lr=1e-5, max_grad_norm=None)},
        ),
        ("--run.dir out --run.dir none", {}),
    ],
)
def test_options_of_the_command_line(line, expected):
    assert parse(line.split()) == Config(**expected)
    assert parse(["--data.valid-path=a b"]).data.valid_path == Path("a b")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--train.batch-size 0",
            "--train.batch-size: Input should be greater than or equal to 1, not 0",
        ),
        (
            "--checkpoint.best accuracy:MAX",
            "--checkpoint.best: must be a metric, such as eval_loss or accuracy:max, not "
            "'accuracy:MAX'",
        ),
        (
            "--train.precision fp8",
            "--train.precision: Input should be 'fp32', 'bf16', 'bf16-pure' or 'fp16', not 'fp8'",
        ),
        ("--train.steps 1e3", "--train.steps: Input should be a valid integer, not '1e3'"),
        (
            "--train.steps 200 --train.epochs 3",
            "--train.epochs 3 and --train.steps 200 both say when the run ends: give one of the "
            "two (none takes back the one of a file)",
        ),
        ("--train.steps", "argument --train.steps: expected one argument"),
        ("--train.compile yes", "yes: no option takes it; see python -m mntrain --help"),
        ("--train.compile=no", "argument --train.compile: ignored explicit argument 'no'"),
        ("--trian.steps 5", "--trian.steps: no such option; did you mean --train.steps?"),
        ("--lr 0.1", "--lr: no such option; did you mean --optim.lr?"),
        ("--every 5", "--every: no such option; did you mean --sync.every or --checkpoint.every?"),
        ("--quux", "--quux: no such option; python -m mntrain --help lists all"),
        (
            "--data.valid-path a b",
            "--data.valid-path: must be one path, or several as NAME=PATH, such as news=news.txt "
            "code=code/, not ('a', 'b')",
        ),
        (
            "--data.valid-path a --data.valid-fraction 0.1",
            "--data.valid-fraction 0.1: --data.valid-path gives other validation data, so that all "
            "of --data.path trains: leave one of both out",
        ),
        ("--optim.lr nan", "--optim.lr: Input should be a finite number, not nan"),
        ("--optim.lr=-1e-3", "--optim.lr: Input should be greater than 0, not -0.001"),
        ("--run.dir=", "--run.dir: must be a path or none, not ''"),
        (
            "--checkpoint.every 0min",
            "--checkpoint.every: must be a number of steps, minutes such as 10min, or auto, "
            "not '0min'",
        ),
        *(
            (
                f"--log.timeline {steps}",
                "--log.timeline: must be the first and the last step, such as 20:22, "
                f"not '{steps}'",
            )
            for steps in ("5", "0:3", "5:3", "2:x")
        ),
        (
            "--model.heads 3",
            "--model.heads 3: must divide --model.width 128 into even parts, since rotary "
            "embeddings rotate pairs of features; "
            "set a width that is a multiple of 6, or other heads",
        ),
    ],
)
def test_error_states_the_value_and_what_is_allowed(argv, message):
    assert refused(*argv.split(" ")) == [f"mntrain: {message}"]


def test_help_lists_every_other_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    words = capsys.readouterr().out.split()
    named = {words[at + 1] for at, word in enumerate(words) if word == "mntrain"}
    assert {"verify", "bench", "doctor", *READERS} <= named


def test_help_lists_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    out, err = capsys.readouterr()
    assert err == ""
    for section in dataclasses.fields(Config):
        inner = getattr(Config(), section.name)
        if dataclasses.is_dataclass(inner):
            for option in dataclasses.fields(inner):
                assert flag_of(f"{section.name}.{option_name(option.name)}") in out
    assert "--data.valid-path [NAME=]PATH [[NAME=]PATH ...]" in out
    assert "FLOAT|none" in out
    assert "(default: 32)" in out


# In a file.


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


def test_all_problems_are_reported_at_once(toml):
    path = toml("[train]\nsteps = 0\nlr = 1\n[foo]\nbar = 1")
    for words, number, options in (
        ("--a 1 --train.steps 2 --b", 1, ["--a", "--b"]),
        ("--train.steps 0 --optim.lr x --task=", 1, ["--optim.lr", "--train.steps", "--task"]),
        (f"--config {path}", 2, ["train.lr", "foo.bar"]),
    ):
        assert [line.split(": ")[number] for line in refused(*words.split())] == options


def test_file_that_cannot_be_read(tmp_path):
    assert refused("--config=") == ["mntrain: --config: must be a path or none, not ''"]
    missing = tmp_path / "missing.toml"
    assert refused("--config", missing) == [
        f"mntrain: --config {missing}: cannot be read: No such file or directory"
    ]
    assert refused("--config", tmp_path) == [
        f"mntrain: --config {tmp_path}: cannot be read: Is a directory"
    ]
    path = tmp_path / "run.toml"
    for content in (b"steps 5", b"task = '\xff'", b"a = 1\na = 2"):
        path.write_bytes(content)
        (line,) = refused("--config", path)
        assert line.startswith(f"mntrain: --config {path}: is not TOML: ")


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


@settings(max_examples=15, deadline=None)
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
