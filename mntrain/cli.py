"""Options from the command line and from a TOML file, for the dataclasses of `mntrain.config`.

argparse splits the command line; the dataclasses validate the values.
"""

import json
import re
import shlex
import sys
import tomllib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mntrain.config import Config, flag_of, words_of

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
      your own model and data"""


def parse(argv: Sequence[str], *, print_errors: bool = True) -> Config:
    """Return the configuration of a training job; arguments and errors as in `parse_options`."""
    return parse_options(
        Config, argv, prog=_PROGRAM, description=_DESCRIPTION, print_errors=print_errors
    )


def parse_options(
    model: type[T], argv: Sequence[str], *, prog: str, description: str, print_errors: bool = True
) -> T:
    """Return `model` with the values of a command line and of the file that its --config names.

    `model` is a frozen pydantic dataclass of options and of sections, which are such dataclasses
    themselves. Local: every rank parses for itself, and `print_errors` selects the one that
    prints. Raises SystemExit: with 2 and one line per problem on stderr, or with 0 after --help.
    """
    options = _options(model)
    if {"-h", "--help"} & set(argv):
        if print_errors:
            _parser(model, prog, description).print_help()
        raise SystemExit(0)
    try:
        given = _read_command_line(_parser(model, prog, description), argv, options)
        file = given["config"].value if "config" in options and "config" in given else "none"
        if file and file != "none":  # an empty one is refused below
            given = _read_file(file, options, prog) | given
        return cast(T, _construct(model, given))
    except ValueError as error:
        if print_errors:
            print("mntrain:", str(error).replace("\n", "\nmntrain: "), file=sys.stderr)
        raise SystemExit(2) from None


def to_toml(config: Config) -> str:
    """Return a TOML file that reproduces `config`, except for its option `config`.

    None is left out where it is the default, and written "none" elsewhere.
    """
    values, defaults = _flat(asdict(config)), _flat(asdict(Config()))
    del values["config"]
    given = {k: v for k, v in values.items() if v is not None or defaults[k] is not None}
    return tomli_w.dumps(_nested({name: _to_toml(value) for name, value in given.items()}))


class _Given(NamedTuple):
    """A value and its source in the user's words, such as "--train.steps 5"."""

    value: Any
    source: str


def _options(model: Any, prefix: str = "") -> dict[str, FieldInfo]:
    """Return the field of each option by its name in a file: task, train.batch_size."""
    options: dict[str, FieldInfo] = {}
    for name, info in model.__pydantic_fields__.items():
        if is_dataclass(info.annotation):
            options |= _options(info.annotation, f"{prefix}{name}.")
        else:
            options[prefix + name] = info
    return options


class _Parser(ArgumentParser):
    """An argument parser that raises ValueError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError. argparse itself refuses nothing but a value for a switch."""
        flag = message.removeprefix("argument ").partition(":")[0]
        switch = re.sub(r"(^--|\.)no-", r"\1", flag)
        negated = re.sub(r"([^.-][^.]*)$", r"no-\1", switch)
        raise ValueError(f"{flag}: takes no value; write {switch} or {negated}")


def _parser(model: Any, prog: str, description: str) -> ArgumentParser:
    """Return a parser of all options, in one group per section."""
    parser = _Parser(
        prog,
        usage=f"{prog} [options]",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=SUPPRESS,
    )
    groups: dict[str, Any] = {"": parser}
    for name, info in _options(model).items():
        section, _, key = name.rpartition(".")
        if section not in groups:
            doc = model.__pydantic_fields__[section].annotation.__doc__
            groups[section] = parser.add_argument_group(f"{section} options", doc)
        default = " ".join(words_of(info.default))
        about = f"{info.description} (default: {default})".replace("%", "%%")
        add = groups[section].add_argument
        if info.annotation is bool:
            add(flag_of(name), dest=name, action="store_true", help=about)
            negated = f"{section}.no_{key}".lstrip(".")
            add(
                flag_of(negated), dest=name, action="store_false", help=f"turn {flag_of(name)} off."
            )
        else:
            several = get_origin(info.annotation) is tuple
            metavar = key.removesuffix("s").upper() if several else _metavar(info.annotation)
            # A missing value becomes an empty tuple, which no option accepts.
            number: Any = {"nargs": "*"} if several else {"nargs": "?", "const": ()}
            add(flag_of(name), dest=name, metavar=metavar, help=about, **number)
    return parser


def _read_command_line(
    parser: ArgumentParser, argv: Sequence[str], options: Mapping[str, FieldInfo]
) -> dict[str, _Given]:
    words: list[str] = []
    for word in argv:
        follows_flag = bool(words) and re.fullmatch("--[^=]+", words[-1])
        if follows_flag and re.match(r"-(\d|\.\d|inf|nan)", word):
            words[-1] += f"={word}"  # argparse takes -1e-3 for an option
        else:
            words.append(re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word))
    typed, unknown = parser.parse_known_args(words)
    if wrong := [word.partition("=")[0] for word in unknown if word.startswith("-")]:
        flags = [flag_of(name) for name in options]
        raise ValueError("\n".join(f"{f}: {_unknown(f, flags, parser.prog)}" for f in wrong))
    if unknown:
        raise ValueError(f"{shlex.join(unknown)}: no option takes it; see {parser.prog} --help")
    return {
        name: _Given(_from_words(options[name].annotation, value), _typed(name, value))
        for name, value in vars(typed).items()
    }


def _typed(name: str, value: Any) -> str:
    return shlex.join([flag_of(name), *([] if isinstance(value, bool) else words_of(value))])


def _from_words(kind: Any, words: Any) -> Any:
    """Return a typed number as a number, and all else as it is, for validation to accept or not."""
    kinds = {kind, *get_args(kind), *map(type, get_args(kind))}
    for number in (int, float):
        if number in kinds and isinstance(words, str):
            try:
                return number(words)
            except ValueError:
                return words
    return tuple(words) if isinstance(words, list) else words


def _read_file(path: str, options: Mapping[str, FieldInfo], prog: str) -> dict[str, _Given]:
    """Return the options in a TOML file. Raises ValueError for names that are no options."""
    try:
        with Path(path).open("rb") as file:
            values = _flat(tomllib.load(file))
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--config {path}: is not TOML: {error}") from error
    names = [name for name in options if name != "config"]  # a file cannot include another one
    sections = {name.rpartition(".")[0] for name in names}
    given, problems = {}, []
    for name, value in values.items():
        source = f"{path}: {name} = {json.dumps(value, default=str, ensure_ascii=False)}"
        if name in sections:
            problems.append(f"{source}: must be a table, [{name}]")
        elif name not in names:
            problems.append(f"{source}: {_unknown(name, names, prog)}")
        given[name] = _Given(value, source)
    if problems:
        raise ValueError("\n".join(problems))
    return given


def _construct(model: Any, given: Mapping[str, _Given]) -> Any:
    """Return `model` with the given values. Raises ValueError with one line per problem."""
    problems: list[str] = []
    sections = {
        name: _validated(info.annotation, f"{name}.", given, problems)
        for name, info in model.__pydantic_fields__.items()
        if is_dataclass(info.annotation)
    }
    made = _validated(model, "", given, problems, **sections)
    if problems:
        raise ValueError("\n".join(problems))
    return made


def _validated(
    cls: Any, prefix: str, given: Mapping[str, _Given], problems: list[str], **sections: Any
) -> Any:
    """Return a dataclass with the given values under `prefix`, or add to `problems`."""
    options = cls.__pydantic_fields__
    values = {name: given[prefix + name].value for name in options if prefix + name in given}
    try:
        return cls(**values, **sections)
    except ValidationError as error:
        for details in error.errors():
            if not details["loc"]:  # of several options together
                problems.append(str(details["ctx"]["error"]))
                continue
            name = str(details["loc"][0])
            own = details["type"] == "value_error"  # raised by this package, not by pydantic
            message = str(details["ctx"]["error"]) if own else f"must be {_allowed(options[name])}"
            about = options[name].description.partition(". ")[0].rstrip(".")
            problems.append(f"{given[prefix + name].source}: {message} ({about})")
        return cls()


def _allowed(option: FieldInfo) -> str:
    """Return the values that an option accepts, in words: an integer >= 1, or none."""
    kinds = [*get_args(option.annotation)] or [option.annotation]
    if get_origin(option.annotation) is tuple:
        kinds = [*get_args(kinds[0])]
    nouns = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}
    words = [nouns.get(kind, str(kind)) for kind in kinds if kind not in (NoneType, Ellipsis)]
    text = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    bounds = [
        f"{sign} {getattr(constraint, key)}"
        for constraint in option.metadata
        for key, sign in {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items()
        if hasattr(constraint, key)
    ]
    text += f" {' and '.join(bounds)}" if bounds else ", not empty" if words == ["text"] else ""
    return text + (", or none" if NoneType in kinds else "")


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by name: {"train": {"steps": 5}} becomes {"train.steps": 5}."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by section: {"train.steps": 5} becomes {"train": {"steps": 5}}."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    return nested


def _to_toml(value: Any) -> Any:
    """Return the TOML value of an option's value; a path called none is written ./none."""
    if isinstance(value, Path):
        return "./none" if value == Path("none") else str(value)
    return "none" if value is None else value


def _metavar(kind: Any) -> str:
    """Return the placeholder of an option's value in --help: FLOAT|none, {fp32,bf16}."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    names = {NoneType: "none", str: "TEXT"}
    kinds = [k for k in get_args(kind) if k is not Ellipsis] or [kind]
    return "|".join(names.get(k) or k.__name__.upper() for k in kinds)


def _unknown(name: str, allowed: Iterable[str], prog: str) -> str:
    """Return a clause that refuses `name` and suggests similar names among the allowed ones."""
    allowed, last = list(allowed), name.lstrip("-").rpartition(".")[2]
    near = [other for other in allowed if other.lstrip("-").rpartition(".")[2] == last]
    near = near or get_close_matches(name, allowed, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{prog} --help lists all"
    return f"no such option; {hint}"
