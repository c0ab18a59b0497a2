"""Options as they are typed."""

import dataclasses
from pathlib import Path

import pytest
from refusals import refused

from mntrain.cli import parse
from mntrain.config import (
    CommConfig,
    Config,
    DataConfig,
    OptimConfig,
    TrainConfig,
    ZeroConfig,
    flag_of,
)
from mntrain.config_types import option_name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--task my.module:Task", {"task": "my.module:Task"}),
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
        ("--train.steps 5 --train.steps 6", {"train": TrainConfig(steps=6)}),
        ("--train.steps none", {"train": TrainConfig(steps=200)}),
        ("--train.epochs 3", {"train": TrainConfig(epochs=3)}),
        ("--train.steps 5 --train.epochs 3 --train.steps none", {"train": TrainConfig(epochs=3)}),
        ("--zero.stage 1 --zero.shard-by memory", {"zero": ZeroConfig(stage=1, shard_by="memory")}),
        ("--optim.lr 1e-5", {"optim": OptimConfig(lr=1e-5)}),
        ("--optim.max-grad-norm none", {"optim": OptimConfig(max_grad_norm=None)}),
        ("--comm.ranks-per-node 2", {"comm": CommConfig(ranks_per_node=2)}),
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
            "--train.precision fp8",
            "--train.precision: Input should be 'fp32', 'bf16', 'bf16-pure' or 'fp16', not 'fp8'",
        ),
        (
            "--zero.shard-by memory",
            "--zero.shard-by memory: has no effect at --zero.stage 0; give --zero.stage 1 or 2, "
            "or leave it out",
        ),
        ("--train.steps 1e3", "--train.steps: Input should be a valid integer, not '1e3'"),
        (
            "--train.steps 200 --train.epochs 3",
            "--train.epochs 3 and --train.steps 200 both say when the run ends: give one of the "
            "two (none takes back the one of a file)",
        ),
        ("--train.steps", "argument --train.steps: expected one argument"),
        ("--train.steps --zero.stage 1", "argument --train.steps: expected one argument"),
        ("--train.steps 5 6", "6: no option takes it; see python -m mntrain --help"),
        ("--train.compile yes", "yes: no option takes it; see python -m mntrain --help"),
        ("yes", "yes: no option takes it; see python -m mntrain --help"),
        ("--train.compile=no", "argument --train.compile: ignored explicit argument 'no'"),
        ("--trian.steps 5", "--trian.steps: no such option; did you mean --train.steps?"),
        ("--lr 0.1", "--lr: no such option; did you mean --optim.lr?"),
        ("--every 5", "--every: no such option; did you mean --sync.every or --checkpoint.every?"),
        ("--quux", "--quux: no such option; python -m mntrain --help lists all"),
        ("-n 4", "-n: no such option; python -m mntrain --help lists all"),
        (
            "--data.valid-path a b",
            "--data.valid-path: must be one path, or several as NAME=PATH, such as news=news.txt "
            "code=code/, not ('a', 'b')",
        ),
        (
            "--data.valid-path a=x a=y",
            "--data.valid-path: must have each name once, not ('a=x', 'a=y')",
        ),
        (
            "--data.valid-path =x",
            "--data.valid-path: must have names of letters, digits, '_', '.' and '-', since "
            "metrics have them ('' is none), not ('=x',)",
        ),
        (
            "--data.valid-path a=",
            "--data.valid-path: must be names and paths (the path of 'a' is missing), not ('a=',)",
        ),
        ("--data.valid-path=", "--data.valid-path: must be a path or none, not ('',)"),
        (
            "--data.valid-path a --data.valid-fraction 0.1",
            "--data.valid-fraction 0.1: --data.valid-path gives other validation data, so that all "
            "of --data.path trains: leave one of both out",
        ),
        ("--optim.lr nan", "--optim.lr: Input should be a finite number, not nan"),
        ("--optim.lr=-1e-3", "--optim.lr: Input should be greater than 0, not -0.001"),
        ("--data.glob=", "--data.glob: String should have at least 1 character, not ''"),
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


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["--a", "1", "--train.steps", "2", "--b"], ["--a", "--b"]),
        (
            ["--train.steps", "0", "--optim.lr", "x", "--task="],
            ["--optim.lr", "--train.steps", "--task"],
        ),
    ],
)
def test_all_problems_are_reported_at_once(argv, options):
    assert [line.split(": ")[1] for line in refused(*argv)] == options


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
