"""Options as they are typed."""

import dataclasses
from pathlib import Path

import pytest
from refusals import refused

from mntrain.cli import parse
from mntrain.config import CommConfig, Config, DataConfig, OptimConfig, TrainConfig, ZeroConfig


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
        (["--train.precision", "bf16-pure"], Config(train=TrainConfig(precision="bf16-pure"))),
        (["--optim.non-finite", "skip"], Config(optim=OptimConfig(non_finite="skip"))),
        (["--zero.stage", "2"], Config(zero=ZeroConfig(stage=2))),
        (["--zero.partition", "parameter"], Config(zero=ZeroConfig(partition="parameter"))),
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
            "--train.precision fp8: must be one of fp32, bf16, bf16-pure, fp16; "
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
            "--zero.stage 3",
            "--zero.stage 3: must be 0 or 1 or 2; give the stage of ZeRO",
        ),
        (
            "--zero.partition layer",
            "--zero.partition layer: must be one of element, parameter; "
            "give the way shards are cut",
        ),
        (
            "--optim.non-finite ignore",
            "--optim.non-finite ignore: must be one of stop, skip; "
            "give the answer to a gradient with an infinity or a NaN",
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
def test_refused_value_is_told_with_what_is_allowed(argv, message):
    assert refused(*argv.split(" ")) == [f"mntrain: {message}"]


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
def test_unknown_option_is_refused_with_the_nearest(argv, hint):
    words = argv.split(" ")
    option = words[0].partition("=")[0]
    assert refused(*words) == [f"mntrain: {option}: no such option; {hint}"]


def test_all_unknown_options_are_told_at_once():
    assert [line.split(": ")[1] for line in refused("--a", "1", "--train.steps", "2", "--b")] == [
        "--a",
        "--b",
    ]


@pytest.mark.parametrize("argv", [["--train.compile=yes"], ["--train.compile", "yes"], ["yes"]])
def test_word_that_belongs_to_no_option(argv):
    assert refused(*argv) == [
        "mntrain: yes: belongs to no option; options are typed --train.steps 100, "
        "flags --train.compile or --train.no-compile"
    ]


def test_quiet_ranks_print_nothing(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("a = 1")
    for argv in (["--train.steps", "0"], ["--quux"], ["--config", str(path)]):
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
    assert "1: the optimizer's state. 2: gradients too." in " ".join(out.replace("│", " ").split())
    assert "(default: 200)" in out
