"""`python -m mntrain sample`: generate with the model of a run. One process, without MPI."""

# Modules that import torch are imported inside functions: --help needs none of them.
# ruff: noqa: PLC0415

import argparse
import inspect
import math
import sys
from collections.abc import Sequence
from pathlib import Path


def run(words: Sequence[str]) -> int:
    """Run a command line and return exit code 0.

    Raises ValueError and OSError for bad input, and SystemExit, with 2 for a malformed command line
    and 0 after --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mntrain sample",
        description="Generate a text with the model of a run, by the task of its configuration.",
    )
    parser.add_argument(
        "path",
        metavar="RUN_DIR",
        type=Path,
        help="a run, which stands for its newest checkpoint, or a checkpoint",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue")
    parser.add_argument("--tokens", type=int, metavar="N", help="most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest tokens")
    parser.add_argument("--seed", type=int, metavar="S", help="default: that of the run")
    sample = _sample(parser.parse_args(words))
    from mntrain.metrics.report import plain

    # Control characters could change the terminal.
    print(plain(sample, sys.stdout.encoding or "utf-8").plain)
    return 0


def _sample(options: argparse.Namespace) -> str:
    import torch

    from mntrain import cli, tasks
    from mntrain.checkpoint.format import MODEL, open_tensors
    from mntrain.checkpoint.reader import find_sound, load_model
    from mntrain.metrics.files import CONFIG_FILE
    from mntrain.train.compiling import PRECISIONS

    if options.tokens is not None and options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens}: must be at least 1")
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        raise ValueError(f"--temperature {options.temperature}: must be 0 or a positive number")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed {options.seed}: must be between 0 and 2^63 - 1")
    path, _ = find_sound(options.path, (MODEL,))
    run_dir = path.absolute().parents[1]
    try:
        config = cli.parse(["--config", str(run_dir / CONFIG_FILE)], print_errors=False)
    except cli.RefusedOptionsError as refused:
        raise ValueError(
            f"{run_dir} is no run of `python -m mntrain`, whose {CONFIG_FILE} names the task: "
            f"{refused.text.splitlines()[0]}"
        ) from None
    task = tasks.load(config.task, config)
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    torch.manual_seed(config.run.seed)  # as in training, for what the model draws when it is made
    model = tasks.make_model(task).to(device, PRECISIONS[config.train.precision].parameters)
    with open_tensors(path / MODEL) as file:
        load_model(file, model)
    given = {name: value for name, value in vars(options).items() if value is not None}
    del given["path"]
    parameters = inspect.signature(task.sample).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in () if open_ended else given.keys() - parameters.keys():
        raise ValueError(
            f"--{name}: sample() of --task {config.task} has no argument {name!r}; leave the option"
            " out"
        )
    sample = task.sample(model.eval(), **given)
    if sample is None:
        raise ValueError(
            f"--task {config.task} has no sample: its sample() returns None, as that of the "
            "language model does for token ids without a tokenizer (--data.tokenizer)"
        )
    return sample
