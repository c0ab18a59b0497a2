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
            "--train.batch-size 0: must be an integer >= 1 (sequences per step, over all ranks)",
        ),
        (
            "--train.precision fp8",
            "--train.precision fp8: must be fp32, bf16, bf16-pure or fp16 "
            "(dtype of the computation)",
        ),
        (
            "--train.steps 1e3",
            "--train.steps 1e3: must be an integer >= 1 (number of optimizer steps)",
        ),
        ("--train.steps", "--train.steps: must be an integer >= 1 (number of optimizer steps)"),
        (
            "--train.steps --zero.stage 1",
            "--train.steps: must be an integer >= 1 (number of optimizer steps)",
        ),
        (
            "--data.path",
            "--data.path: must be a path or none "
            "(text file, folder, .npy or .bin of uint16 tokens)",
        ),
        ("--train.steps 5 6", "6: no option takes it; see python -m mntrain --help"),
        (
            "--data.valid-fraction 1",
            "--data.valid-fraction 1: must be a finite number > 0 and < 1 "
            "(fraction of the data kept for validation)",
        ),
        (
            "--optim.max-grad-norm 0",
            "--optim.max-grad-norm 0: must be a finite number > 0, or none "
            "(norm to clip gradients to)",
        ),
        ("--optim.lr nan", "--optim.lr nan: must be a finite number > 0 (peak learning rate)"),
        ("--optim.lr -1e-3", "--optim.lr -1e-3: must be a finite number > 0 (peak learning rate)"),
        ("--optim.lr -inf", "--optim.lr -inf: must be a finite number > 0 (peak learning rate)"),
        (
            "--data.glob=",
            "--data.glob '': must be text, not empty (pattern of the files to read in a folder)",
        ),
        (
            "--optim.max-grad-norm inf",
            "--optim.max-grad-norm inf: must be a finite number > 0, or none "
            "(norm to clip gradients to)",
        ),
        ("--zero.stage 3", "--zero.stage 3: must be 0, 1 or 2 (ZeRO stage)"),
        (
            "--zero.partition layer",
            "--zero.partition layer: must be element or parameter (unit of sharding)",
        ),
        (
            "--optim.non-finite ignore",
            "--optim.non-finite ignore: must be stop or skip "
            "(action on an infinite or NaN gradient)",
        ),
        ("--run.dir=", "--run.dir '': must be a path or none (folder for the run's files)"),
        (
            "--checkpoint.every 0min",
            "--checkpoint.every 0min: must be a number of steps, minutes such as 10min, or auto "
            "(interval between checkpoints)",
        ),
        (
            "--model.heads 3",
            "--model.heads 3: must divide --model.width 128 into even parts, since rotary "
            "embeddings rotate pairs of features; "
            "set a width that is a multiple of 6, or other heads",
        ),
        (
            "--model.heads 128",
            "--model.heads 128: must divide --model.width 128 into even parts, since rotary "
            "embeddings rotate pairs of features; "
            "set a width that is a multiple of 256, or other heads",
        ),
    ],
)
def test_error_states_the_value_and_what_is_allowed(argv, message):
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
def test_unknown_option_is_refused_with_similar_ones(argv, hint):
    words = argv.split(" ")
    option = words[0].partition("=")[0]
    assert refused(*words) == [f"mntrain: {option}: no such option; {hint}"]


def test_all_unknown_options_are_reported_at_once():
    assert [line.split(": ")[1] for line in refused("--a", "1", "--train.steps", "2", "--b")] == [
        "--a",
        "--b",
    ]


@pytest.mark.parametrize("argv", [["--train.compile", "yes"], ["yes"]])
def test_word_without_an_option_is_refused(argv):
    assert refused(*argv) == ["mntrain: yes: no option takes it; see python -m mntrain --help"]


@pytest.mark.parametrize("flag", ["--comm.tune", "--comm.no-tune"])
def test_switch_refuses_a_value(flag):
    assert refused(f"{flag}=no") == [
        f"mntrain: {flag}: takes no value; write --comm.tune or --comm.no-tune"
    ]


def test_all_bad_values_are_reported_at_once():
    lines = refused("--train.steps", "0", "--optim.lr", "x", "--task", "")
    assert [line.split(" ")[1] for line in lines] == ["--optim.lr", "--train.steps", "--task"]


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
