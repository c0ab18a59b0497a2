"""What ranks compare of a job's options, and what they do not."""

import pytest

from mntrain.bench.bench_options import BenchOptions
from mntrain.cli import named_options, parse
from mntrain.config import MAY_DIFFER, Config
from mntrain.run.comparison import describe_options


def test_every_option_is_compared_by_its_flag_but_for_those_that_may_differ():
    flags = {"--" + name.replace("_", "-") for name in named_options(Config()).keys() - MAY_DIFFER}
    assert describe_options(Config()).keys() == flags
    assert {"--optim.lr", "--train.batch-size", "--run.seed", "--comm.bucket-mb"} <= flags
    assert describe_options(BenchOptions()).keys() > {"--sizes"}


def test_the_options_that_may_differ_exist():
    assert MAY_DIFFER.keys() <= named_options(Config()).keys()


@pytest.mark.parametrize("words", [["--data.path", "x"], ["--run.dir", "y"], ["--data.workers=3"]])
def test_what_may_differ_is_not_described(words):
    assert describe_options(parse(words)) == describe_options(Config())


def test_values_are_those_of_the_command_line_and_equal_however_they_are_written():
    one, other = (describe_options(parse(["--optim.lr", text])) for text in ("1e-2", "0.01"))
    assert one == other
    assert str(one["--optim.lr"]) == "0.01"
    assert str(
        describe_options(parse(["--optim.max-grad-norm=none"]))["--optim.max-grad-norm"]
    ) == ("none")


def test_an_option_from_a_file_names_it_and_the_command_line_does_not(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[optim]\nlr = 1\nname = "SGD"\n[checkpoint]\nevery = 5\n')
    told = describe_options(parse(["--config", str(path), "--optim.name", "Adam"]))
    for flag, value in [("--optim.lr", "1.0"), ("--checkpoint.every", "5")]:
        assert str(told[flag]).startswith(f"{value} (from {path} on ")
    assert str(told["--optim.name"]) == "Adam"
    assert str(told["--run.seed"]) == "0"
    same = parse(["--optim.lr", "1", "--optim.name", "Adam", "--checkpoint.every", "5"])
    assert told == describe_options(same)  # where a value is from is no difference
