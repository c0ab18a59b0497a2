"""Options from the command line and from a TOML file, for those of `mntrain.options.config`.

argparse splits the command line; the dataclasses validate the values.
"""

import sys
import tomllib
from argparse import SUPPRESS, ArgumentError, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial, reduce
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import tomli_w
from pydantic.fields import FieldInfo

from mntrain.options.arguments import unknown_option, unknown_word
from mntrain.options.config import Config, flag_of
from mntrain.options.types import as_mapping, construct, option_name, words_of

T = TypeVar("T")

_PROGRAM = "python -m mntrain"
_DESCRIPTION = f"""Train a PyTorch model over the ranks of mpirun or srun. For example:
  {_PROGRAM}
      a small language model on one rank
  mpirun -n 4 {_PROGRAM} --train.steps 1000
      the same over four ranks
  mpirun -n 4 {_PROGRAM} --config run.toml --optim.lr 1e-3
      options from a file, in tables such as [optim]; the command line overrides it
  mpirun -n 4 {_PROGRAM} --task my_package.my_module:MyTask
      your own model and data

other commands, each with its own --help:
  {_PROGRAM} verify
      compare the first steps of a job on all ranks with those of one process
  {_PROGRAM} bench
      measure the collectives of this cluster
  {_PROGRAM} plan --config run.toml --ranks 8 16 32 --memory 40G
      say what a job will take, at every stage, before it runs
  {_PROGRAM} doctor
      check that this cluster is fit to train
  {_PROGRAM} launch -- mpirun -n 4 {_PROGRAM} ...
      start a job, and start it again on the hosts that are left when one is lost
  {_PROGRAM} ckpt list|show|verify|diff|export
      inspect and compare checkpoints, and export the model of one
  {_PROGRAM} autopsy RUN_DIR
      say which rank of a job stopped first, who waited for it, and why
  {_PROGRAM} report RUN_DIR [RUN_DIR ...]
      write a page about one or several runs"""


class RefusedOptionsError(SystemExit):
    """An exit with code 2, for options that are wrong; `text` has a line for each problem."""

    def __init__(self, text: str) -> None:
        super().__init__(2)
        self.text = text


def print_problems(text: str) -> None:
    """Print what is wrong with the options on stderr."""
    print("mntrain:", text.replace("\n", "\nmntrain: "), file=sys.stderr)


def parse_options(
    model: type[T], argv: Sequence[str], *, prog: str, description: str, print_errors: bool = True
) -> T:
    """Return `model` with the values of a command line and of the file that its --config names.

    `model` is a frozen pydantic dataclass of options and of sections, which are such dataclasses
    themselves. Local: every rank parses for itself, and `print_errors` selects the one that
    prints. Raises RefusedOptionsError (code 2), with a line for each problem on stderr, and
    SystemExit with code 0 after --help.
    """
    parser = _parser(model, prog, description)
    if {"-h", "--help"} & set(argv):
        if print_errors:
            parser.print_help()
        raise SystemExit(0)
    options = _options(model)
    try:
        typed = _read_command_line(parser, argv, options)
        file = typed["config"] if "config" in options and "config" in typed else "none"
        read = _read_file(file, options, prog) if file not in ("", "none") else {}
        sources = {name: f"{file}: {name}" for name in read} | {n: flag_of(n) for n in typed}
        return cast(T, construct(model, read | typed, sources))
    except (ValueError, ArgumentError) as error:
        if print_errors:
            print_problems(str(error))
        raise RefusedOptionsError(str(error)) from None


# Of a training job.
parse = partial(parse_options, Config, prog=_PROGRAM, description=_DESCRIPTION)


def from_mapping(options: Mapping[str, Any]) -> Config:
    """Return the configuration of a training job from nested options, as in a TOML file.

    Names may also be dotted. Raises ValueError with a line for each problem.
    """
    given = _given(options, _options(Config), "options: ", _PROGRAM)
    return cast(Config, construct(Config, given, {name: name for name in given}))


def named_options(options: Any) -> dict[str, Any]:
    """Return the value of each option by its name in a file: task, train.batch_size.

    `options` is of a class that `parse_options` constructs.
    """
    values = as_mapping(options)
    return {
        name: reduce(lambda value, part: value[part], name.split("."), values)
        for name in _options(type(options))
    }


def to_toml(config: Config) -> str:
    """Return a TOML file that reproduces `config`, except for its option `config`."""
    values = as_mapping(config)
    del values["config"]
    return toml_text(values)


def toml_text(values: Mapping[str, Any]) -> str:
    """Return a TOML file of nested values; what TOML lacks is written as text."""
    return tomli_w.dumps(_to_toml(values))


def _to_toml(value: Any) -> Any:
    """Return the TOML value of an option's value; a path called none is written ./none."""
    if isinstance(value, Mapping):
        return {str(name): _to_toml(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_toml(item) for item in value]
    if isinstance(value, Path):
        return "./none" if value == Path("none") else str(value)
    if isinstance(value, bool | int | float | str):
        return value
    return "none" if value is None else str(value)


def _options(model: Any, prefix: str = "") -> dict[str, FieldInfo]:
    """Return the field of each option by its name in a file: task, train.batch_size."""
    options: dict[str, FieldInfo] = {}
    for name, info in model.__pydantic_fields__.items():
        if is_dataclass(info.annotation):
            options |= _options(info.annotation, f"{prefix}{name}.")
        else:
            options[prefix + option_name(name)] = info
    return options


def _parser(model: Any, prog: str, description: str) -> ArgumentParser:
    """Return a parser of all options, in one group per section, that leaves values as words."""
    parser = ArgumentParser(
        prog,
        usage=f"{prog} [options]",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=SUPPRESS,
        exit_on_error=False,
    )
    groups: dict[str, Any] = {"": parser}
    for name, info in _options(model).items():
        section, _, key = name.rpartition(".")
        if section not in groups:
            doc = model.__pydantic_fields__[section].annotation.__doc__
            groups[section] = parser.add_argument_group(f"{section} options", doc)
        add = groups[section].add_argument
        default = " ".join(words_of(info.default))
        about = f"{info.description} (default: {default})".replace("%", "%%")
        if info.annotation is bool:
            off = flag_of(f"{section}.no_{key}".lstrip("."))
            add(flag_of(name), dest=name, action="store_true", help=about)
            add(off, dest=name, action="store_false", help=f"turn {flag_of(name)} off.")
        elif get_origin(info.annotation) is tuple:
            word = key.removesuffix("s").upper()
            add(flag_of(name), dest=name, metavar=word, help=about, nargs="+")
        elif dict[str, Path] in get_args(info.annotation):
            add(flag_of(name), dest=name, metavar="[NAME=]PATH", help=about, nargs="+")
        else:
            add(flag_of(name), dest=name, metavar=_metavar(info.annotation), help=about)
    return parser


def _metavar(kind: Any) -> str:
    """Return the placeholder of an option's value in --help: FLOAT|none, {fp32,bf16}."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    names = {NoneType: "none", str: "TEXT"}
    return "|".join(
        _metavar(k) if get_origin(k) is Literal else names.get(k) or k.__name__.upper()
        for k in get_args(kind) or [kind]
    )


def _read_command_line(
    parser: ArgumentParser, argv: Sequence[str], options: Mapping[str, FieldInfo]
) -> dict[str, Any]:
    """Return the given options. Raises ValueError or ArgumentError for unknown words."""
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        words.append((flag.replace("_", "-") if flag[:2] == "--" else flag) + equals + value)
    given, unknown = parser.parse_known_args(words)
    if unknown:
        wrong = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        flags = [flag_of(name) for name in options]
        problems = [unknown_word(word, parser.prog, flags) for word in wrong or unknown[:1]]
        raise ValueError("\n".join(problems))
    return {name: _from_words(options[name].annotation, v) for name, v in vars(given).items()}


def _from_words(kind: Any, words: Any) -> Any:
    """Return words as a number if the option takes one and they are one; else as they are."""
    if isinstance(words, list):
        return tuple(words)
    for number in (int, float):
        if number in (kind, *get_args(kind)):
            with suppress(ValueError):
                return number(words)
    return words


def _read_file(path: str, options: Mapping[str, FieldInfo], prog: str) -> dict[str, Any]:
    """Return the options in a TOML file, whose names may have dashes or underscores.

    Raises ValueError for unknown names, and for an option with both spellings.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--config {path}: is not TOML: {error}") from error
    return _given(tables, options, f"{path}: ", prog)


def _given(
    tables: Mapping[str, Any], options: Mapping[str, FieldInfo], where: str, prog: str
) -> dict[str, Any]:
    """Return the values in tables by the names of their options. Raises ValueError."""
    spelled = [
        (f"{name}.{key}" if key else name, item)
        for name, value in tables.items()
        for key, item in (
            value.items()
            if isinstance(value, Mapping) and name.replace("-", "_") not in options
            else [("", value)]
        )
    ]
    given: dict[str, Any] = {}
    first: dict[str, str] = {}
    for spelling, item in spelled:
        name = spelling.replace("-", "_")
        if name in given:
            raise ValueError(f"{where}{first[name]} and {spelling} are one option: give it once")
        given[name], first[name] = item, spelling
    names = [name for name in options if name != "config"]  # a file cannot include another one
    if wrong := given.keys() - names:
        problems = [unknown_option(first[name], prog, names) for name in given if name in wrong]
        raise ValueError("\n".join(where + problem for problem in problems))
    return given
