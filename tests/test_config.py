import dataclasses
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mntrain.config import (
    CommConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
    parse,
    to_toml,
)

COUNTS = st.integers(1, 10**12)
FLOATS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
FRACTIONS = st.floats(0, 1)
TEXTS = st.text(min_size=1)
PATHS = st.none() | st.sampled_from([Path("none"), Path()]) | TEXTS.map(Path)
CONFIGS = st.builds(
    Config,
    task=TEXTS,
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    data=st.builds(
        DataConfig,
        path=PATHS,
        glob=TEXTS,
        valid_fraction=st.floats(0, 1, exclude_min=True, exclude_max=True),
        workers=st.integers(0, 99),
        worker_start=st.sampled_from(["spawn", "forkserver", "fork"]),
    ),
    model=st.tuples(COUNTS, COUNTS, COUNTS).map(
        lambda n: ModelConfig(layers=n[0], heads=n[1], width=2 * n[1] * n[2], context=n[2])
    ),
    optim=st.builds(
        OptimConfig,
        name=TEXTS,
        lr=FLOATS | COUNTS,
        weight_decay=FLOATS,
        max_grad_norm=st.none() | FLOATS,
        warmup_steps=COUNTS,
        min_lr_fraction=FRACTIONS,
    ),
    train=st.builds(
        TrainConfig,
        steps=COUNTS,
        batch_size=COUNTS,
        micro_batch_size=COUNTS,
        eval_every=COUNTS,
        precision=st.sampled_from(["fp32", "bf16"]),
        compile=st.booleans(),
        check_every=COUNTS,
    ),
    comm=st.builds(
        CommConfig,
        algorithm=st.sampled_from(["auto", "lanes", "leader", "flat", "naive"]),
        bucket_mb=FLOATS,
        ranks_per_node=st.none() | COUNTS,
    ),
    run=st.builds(RunConfig, dir=PATHS, seed=st.integers(0, 2**32 - 1)),
)


@pytest.fixture
def refuse(capsys):
    """A function that parses a bad command line and returns the lines that it is refused with."""

    def run(*argv):
        with pytest.raises(SystemExit) as exit_:
            parse(list(map(str, argv)))
        captured = capsys.readouterr()
        assert exit_.value.code == 2
        assert captured.out == ""
        assert captured.err.endswith("\n")
        return captured.err.removesuffix("\n").split("\n")

    return run


@pytest.fixture
def toml(tmp_path):
    """A function that writes a TOML file of the given text."""

    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_no_options_give_the_defaults():
    assert parse([]) == Config()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--task", "my.module:Task"], Config(task="my.module:Task")),
        (["--data.path", "a folder"], Config(data=DataConfig(path=Path("a folder")))),
        (["--train.batch-size", "64"], Config(train=TrainConfig(batch_size=64))),
        (["--train.batch_size=64"], Config(train=TrainConfig(batch_size=64))),
        (["--train.compile"], Config(train=TrainConfig(compile=True))),
        (["--train.compile", "--train.no-compile"], Config()),
        (["--train.steps", "5", "--train.steps", "6"], Config(train=TrainConfig(steps=6))),
        (["--train.precision", "bf16"], Config(train=TrainConfig(precision="bf16"))),
        (["--optim.lr", "1e-5"], Config(optim=OptimConfig(lr=1e-5))),
        (["--optim.max-grad-norm", "none"], Config(optim=OptimConfig(max_grad_norm=None))),
        (["--comm.ranks-per-node", "2"], Config(comm=CommConfig(ranks_per_node=2))),
        (["--run.dir", "out", "--run.dir", "none"], Config()),
    ],
)
def test_options_of_the_command_line(argv, expected):
    assert parse(argv) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--train.batch-size 0",
            "--train.batch-size 0: must be at least 1; "
            "give the number of sequences of a whole step, over all ranks",
        ),
        (
            "--train.precision fp8",
            "--train.precision fp8: must be one of fp32, bf16; "
            "give the dtype the model computes in",
        ),
        (
            "--train.steps 1e3",
            "--train.steps 1e3: must be a whole number; give the number of optimizer steps",
        ),
        (
            "--train.steps",
            "--train.steps: must be a whole number; give the number of optimizer steps",
        ),
        (
            "--train.steps 5 6",
            "--train.steps 5 6: must be a whole number; give the number of optimizer steps",
        ),
        (
            "--data.valid-fraction 1",
            "--data.valid-fraction 1.0: must be above 0 and below 1; "
            "give the fraction of the data kept for validation",
        ),
        (
            "--optim.max-grad-norm 0",
            "--optim.max-grad-norm 0.0: must be above 0 or none; "
            "give the norm that gradients are clipped to",
        ),
        (
            "--optim.lr nan",
            "--optim.lr nan: must be a finite number; give the highest learning rate",
        ),
        (
            "--optim.max-grad-norm inf",
            "--optim.max-grad-norm inf: must be a finite number or none; "
            "give the norm that gradients are clipped to",
        ),
        (
            "--zero.stage 2",
            "--zero.stage 2: must be 0; "
            "give the stage of ZeRO that this version has (0: nothing is sharded)",
        ),
        ("--run.dir=", "--run.dir '': must be a path or none; give the folder for the run's files"),
        (
            "--model.heads 3",
            "--model.heads 3: must divide --model.width 128 into even parts, since rotary "
            "positions turn pairs of features; "
            "give a width that is a multiple of 6, or other heads",
        ),
        (
            "--model.heads 128",
            "--model.heads 128: must divide --model.width 128 into even parts, since rotary "
            "positions turn pairs of features; "
            "give a width that is a multiple of 256, or other heads",
        ),
    ],
)
def test_refused_value_is_told_with_what_is_allowed(refuse, argv, message):
    assert refuse(*argv.split(" ")) == [f"mntrain: {message}"]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        ("--train.batchsize 32", "did you mean --train.batch-size or --train.micro-batch-size?"),
        ("--train.batchsize=32", "did you mean --train.batch-size or --train.micro-batch-size?"),
        ("--trian.steps 5", "did you mean --train.steps?"),
        ("--batch-size 5", "did you mean --train.batch-size?"),
        ("--train.lr 5", "did you mean --optim.lr?"),
        ("--quux", "python -m mntrain --help lists all"),
        ("-n 4", "python -m mntrain --help lists all"),
    ],
)
def test_unknown_option_is_refused_with_the_nearest(refuse, argv, hint):
    words = argv.split(" ")
    option = words[0].partition("=")[0]
    assert refuse(*words) == [f"mntrain: {option}: no such option; {hint}"]


def test_all_unknown_options_are_told_at_once(refuse):
    assert [line.split(": ")[1] for line in refuse("--a", "1", "--train.steps", "2", "--b")] == [
        "--a",
        "--b",
    ]


@pytest.mark.parametrize("argv", [["--train.compile=yes"], ["--train.compile", "yes"], ["yes"]])
def test_word_that_belongs_to_no_option(refuse, argv):
    assert refuse(*argv) == [
        "mntrain: yes: belongs to no option; options are typed --train.steps 100, "
        "flags --train.compile or --train.no-compile"
    ]


def test_quiet_ranks_print_nothing(capsys, toml):
    for argv in (["--train.steps", "0"], ["--quux"], ["--config", str(toml("a = 1"))]):
        with pytest.raises(SystemExit, match="2"):
            parse(argv, print_errors=False)
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"], print_errors=False)
    assert capsys.readouterr() == ("", "")


def test_help_lists_every_option_with_its_default_and_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    out, err = capsys.readouterr()
    assert err == ""
    for section in dataclasses.fields(Config):
        inner = getattr(Config(), section.name)
        if dataclasses.is_dataclass(inner):
            for option in dataclasses.fields(inner):
                assert f"--{section.name}.{option.name.replace('_', '-')}" in out
    assert "mpirun -n 4 python -m mntrain --config run.toml" in out
    assert "FLOAT|none" in out
    assert "(default: 200)" in out


def test_command_line_wins_over_the_file(toml):
    path = toml("[train]\nsteps = 7\nbatch_size = 16\ncompile = true\n[optim]\nlr = 1\n")
    config = parse(["--train.steps", "9", "--config", str(path), "--train.no-compile"])
    expected = Config(train=TrainConfig(steps=9, batch_size=16), optim=OptimConfig(lr=1))
    assert config == dataclasses.replace(expected, config=path)


def test_file_and_command_line_are_checked_together(toml):
    path = toml("[model]\nheads = 3\n")
    assert parse(["--config", str(path), "--model.width", "96"]).model == ModelConfig(
        heads=3, width=96
    )


def test_none_in_a_file(toml):
    path = toml('[optim]\nmax_grad_norm = "none"\n[data]\npath = "none"\n')
    config = parse(["--config", str(path)])
    assert config.optim.max_grad_norm is None
    assert config.data.path is None


def test_empty_file_and_empty_table_give_the_defaults(toml):
    for text in ("", "[train]\n"):
        path = toml(text)
        assert parse(["--config", str(path)]) == Config(config=path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '[train]\nbatch_size = "x"',
            'train.batch_size = "x": must be a whole number; '
            "give the number of sequences of a whole step, over all ranks",
        ),
        (
            '[train]\nsteps = "5"',
            'train.steps = "5": must be a whole number; give the number of optimizer steps',
        ),
        (
            "[train]\nsteps = 5.0",
            "train.steps = 5.0: must be a whole number; give the number of optimizer steps",
        ),
        (
            "[train]\nsteps = true",
            "train.steps = true: must be a whole number; give the number of optimizer steps",
        ),
        (
            "[train]\nsteps = 2000-01-01",
            'train.steps = "2000-01-01": must be a whole number; '
            "give the number of optimizer steps",
        ),
        (
            "[train]\ncompile = 1",
            "train.compile = 1: must be true or false; "
            "give the choice to compile the model with torch.compile",
        ),
        (
            "[optim]\nlr = inf",
            "optim.lr = Infinity: must be a finite number; give the highest learning rate",
        ),
        ("[optim]\nlr = 0", "optim.lr = 0: must be above 0; give the highest learning rate"),
        (
            '[run]\ndir = ""',
            'run.dir = "": must be a path or none; give the folder for the run\'s files',
        ),
        ("device = 0", "device = 0: must be one of auto, cpu, cuda; give the device of each rank"),
        ("[trian]\nsteps = 5", "trian.steps = 5: no such option; did you mean train.steps?"),
        (
            "[train]\nbatch-size = 5",
            "train.batch-size = 5: no such option; "
            "did you mean train.batch_size or train.micro_batch_size?",
        ),
        ("steps = 5", "steps = 5: no such option; did you mean train.steps?"),
        ("[[zero]]\nstage = 0", 'zero = [{"stage": 0}]: must be a table, [zero]'),
        ("train = 5", "train = 5: must be a table, [train]"),
        (
            "[train.steps]\nx = 1",
            'train.steps = {"x": 1}: must be a whole number; give the number of optimizer steps',
        ),
        (
            'config = "other.toml"',
            'config = "other.toml": no such option; python -m mntrain --help lists all',
        ),
    ],
)
def test_problem_of_a_file_is_told_with_its_name(refuse, toml, text, problem):
    path = toml(text)
    assert refuse("--config", path) == [f"mntrain: {path}: {problem}"]


def test_all_problems_of_a_file_are_told_at_once(refuse, toml):
    path = toml("[train]\nsteps = 0\nbatch_size = 32\nlr = 1\n[foo]\nbar = 1")
    names = [
        line.removeprefix(f"mntrain: {path}: ").split(" ")[0] for line in refuse("--config", path)
    ]
    assert names == ["train.steps", "train.lr", "foo.bar"]


def test_file_that_cannot_be_read(refuse, toml, tmp_path):
    missing = tmp_path / "missing.toml"
    assert refuse("--config", missing) == [
        f"mntrain: --config {missing}: cannot be read: No such file or directory"
    ]
    assert refuse("--config", tmp_path) == [
        f"mntrain: --config {tmp_path}: cannot be read: Is a directory"
    ]


@pytest.mark.parametrize("content", [b"steps 5", b"task = '\xff'", b"a = 1\na = 2"])
def test_file_that_is_not_toml(refuse, tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    (line,) = refuse("--config", path)
    assert line.startswith(f"mntrain: --config {path}: is not TOML: ")


@settings(max_examples=30, deadline=None)
@given(CONFIGS)
def test_to_toml_gives_the_same_configuration_again(config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(to_toml(config), encoding="utf-8")
        assert parse(["--config", str(path)]) == dataclasses.replace(config, config=path)


def test_to_toml_leaves_the_file_of_origin_out(toml):
    config = parse(["--config", str(toml("[train]\nsteps = 3"))])
    assert "run.toml" not in to_toml(config)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1", None, True])
def test_number_is_finite_and_no_other_type(value):
    with pytest.raises(ValueError, match=r"^--optim.lr .*: must be a finite number; give the"):
        OptimConfig(lr=value)


@pytest.mark.parametrize(
    ("section", "name", "bad"),
    [
        (DataConfig, "valid_fraction", 0),
        (DataConfig, "workers", -1),
        (DataConfig, "worker_start", "thread"),
        (DataConfig, "glob", ""),
        (ModelConfig, "layers", 0),
        (ModelConfig, "heads", 0),
        (ModelConfig, "width", 0),
        (ModelConfig, "context", 0),
        (ModelConfig, "vocab", -1),
        (OptimConfig, "name", ""),
        (OptimConfig, "lr", 0),
        (OptimConfig, "weight_decay", -0.1),
        (OptimConfig, "max_grad_norm", -1.0),
        (OptimConfig, "warmup_steps", -1),
        (OptimConfig, "min_lr_fraction", 1.1),
        (TrainConfig, "steps", 0),
        (TrainConfig, "batch_size", 0),
        (TrainConfig, "micro_batch_size", 0),
        (TrainConfig, "eval_every", -1),
        (TrainConfig, "precision", "fp16"),
        (TrainConfig, "compile", "no"),
        (TrainConfig, "check_every", -1),
        (CommConfig, "algorithm", "ring"),
        (CommConfig, "bucket_mb", 0.0),
        (CommConfig, "ranks_per_node", 0),
        (ZeroConfig, "stage", 1),
        (RunConfig, "dir", "out"),
        (RunConfig, "seed", -1),
        (RunConfig, "seed", 2**32),
        (Config, "task", ""),
        (Config, "device", "tpu"),
    ],
)
def test_bad_value_is_refused_on_construction(section, name, bad):
    prefix = "" if section is Config else section.__name__.removesuffix("Config").lower() + "."
    with pytest.raises(ValueError, match=f"^--{prefix}{name.replace('_', '-')} .*: must be"):
        section(**{name: bad})


def test_section_of_another_type_is_refused():
    with pytest.raises(ValueError, match="train"):
        Config(train={"steps": 5})


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.steps = 5
