"""Options read from the command line and from a TOML file, and written to one.

The names, types, help and checks are those that `config` declares.
"""

import json
import shlex
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, field, make_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
import tyro

from mntrain.config import Config, annotations_of, flag_of, kinds_of, refusal, words_of

_PROGRAM = "python -m mntrain"
_DESCRIPTION = f"""Train a PyTorch model over the ranks of mpirun or srun. For example:
  {_PROGRAM}
      a small language model on one rank
  mpirun -n 4 {_PROGRAM} --train.steps 1000
      the same over four ranks
  mpirun -n 4 {_PROGRAM} --config run.toml --optim.lr 1e-3
      options from a file, in tables such as [optim]; the command line wins over it
  mpirun -n 4 {_PROGRAM} --task my_package.my_module:MyTask
      a model and data of your own"""


def parse(argv: Sequence[str], *, print_errors: bool = True) -> Config:
    """Return the configuration of a command line and of the file that its --config names.

    Local: every rank parses for itself, and `print_errors` picks the one that talks. Raises
    SystemExit: with 2 for what the user gave wrong, told on stderr, or with 0 after --help.
    """
    try:
        values = _read_command_line(argv, _flat(asdict(Config())), print_errors)
        if isinstance(values["config"], Path):
            values = _read_command_line(argv, _read_file(values["config"]), print_errors)
        nested = _nested(values)
        for name, annotation in annotations_of(Config).items():
            if isinstance(annotation, type):
                nested[name] = annotation(**nested[name])
        return Config(**nested)
    except ValueError as error:
        if print_errors:
            print("mntrain:", str(error).replace("\n", "\nmntrain: "), file=sys.stderr)
        raise SystemExit(2) from None


def to_toml(config: Config) -> str:
    """Return a TOML file that gives `config` again, all but its option `config`.

    None is left out where it is the default, and written "none" elsewhere.
    """
    values, defaults = _flat(asdict(config)), _flat(asdict(Config()))
    del values["config"]
    given = {k: v for k, v in values.items() if v is not None or defaults[k] is not None}
    return tomli_w.dumps(_nested({name: _to_toml(value) for name, value in given.items()}))


def _read_file(path: Path) -> dict[str, Any]:
    """Return all options by name: those of the file, and the defaults of the others."""
    try:
        with path.open("rb") as file:
            given = _flat(tomllib.load(file))
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--config {path}: is not TOML: {error}") from error
    values, options, problems = _flat(asdict(Config())), _options(), []
    del options["config"]  # a file names no other file
    for name, value in given.items():
        if name in options:
            values[name] = _from_toml(options[name], value)
            why = refusal(options[name], values[name])
        elif name in _nested(options):
            why = f"must be a table, [{name}]"
        else:
            why = _unknown(name, options)
        if why:
            shown = json.dumps(value, default=str, ensure_ascii=False)
            problems.append(f"{path}: {name} = {shown}: {why}")
    if problems:
        raise ValueError("\n".join(problems))
    return values


def _read_command_line(
    argv: Sequence[str], values: dict[str, Any], print_help: bool
) -> dict[str, Any]:
    """Return all options by name: those typed, and `values` for the others.

    Words that make no value of an option's type stay words, for the option's check to refuse.
    """
    typed, unknown = tyro.cli(
        _form(values),
        prog=_PROGRAM,
        description=_DESCRIPTION,
        args=argv,
        return_unknown_args=True,
        console_outputs=print_help,
    )
    flags = [flag_of(name) for name in _options()]
    if wrong := [word.partition("=")[0] for word in unknown if word.startswith("-")]:
        raise ValueError("\n".join(f"{flag}: {_unknown(flag, flags)}" for flag in wrong))
    if unknown:
        raise ValueError(
            f"{shlex.join(unknown)}: belongs to no option; options are typed --train.steps 100, "
            "flags --train.compile or --train.no-compile"
        )
    return _flat(asdict(typed))


def _form(values: dict[str, Any]) -> Any:
    """Return a dataclass for tyro to fill in: all options, with `values` and without checks.

    An option takes any number of words here, so that its own check refuses too many and too few.
    """
    entries: dict[str, list[Any]] = {}
    for name, annotation in _options().items():
        kind, option = get_args(annotation)
        words = tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar=_metavar(annotation),
            instance_from_str=partial(_from_words, annotation),
            is_instance=lambda _: True,
            str_from_instance=words_of,
        )
        about = tyro.conf.arg(help=option.help)
        typed = Annotated[bool, about] if kind is bool else Annotated[kind, about, words]
        section, _, key = name.rpartition(".")
        entries.setdefault(section, []).append((key, typed, values[name]))
    form = entries.pop("")
    for section, inner in entries.items():
        doc = annotations_of(Config)[section].__doc__
        made = make_dataclass(section, inner, namespace={"__doc__": doc})
        form.append((section, made, field(default_factory=made)))
    return make_dataclass("Form", form)


def _options() -> dict[str, Any]:
    """Return the annotation of each option, by its name in a file: task, train.batch_size."""
    annotations = annotations_of(Config).items()
    return _flat({k: annotations_of(v) if isinstance(v, type) else v for k, v in annotations})


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    """Return options by name: {"train": {"steps": 5}} becomes {"train.steps": 5}."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return options by section: {"train.steps": 5} becomes {"train": {"steps": 5}}."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    return nested


def _from_toml(annotation: Any, value: Any) -> Any:
    """Return the value of an option from a TOML value, which stays as it is if it makes none."""
    kinds = kinds_of(annotation)
    if value == "none" and NoneType in kinds:
        return None
    if type(value) is int and get_args(annotation)[1].pattern:
        return str(value)
    return Path(value) if Path in kinds and isinstance(value, str) and value else value


def _to_toml(value: Any) -> Any:
    """Return the TOML value of an option's value; a path called none is written ./none."""
    if isinstance(value, Path):
        return "./none" if value == Path("none") else str(value)
    return "none" if value is None else value


def _from_words(annotation: Any, words: list[str]) -> Any:
    """Return the value of an option from the words typed, which stay words if they make none."""
    if len(words) != 1:
        return tuple(words)
    kind = kinds_of(annotation)[0]
    try:
        return _from_toml(annotation, kind(words[0]) if kind in (int, float) else words[0])
    except ValueError:
        return _from_toml(annotation, words[0])


def _metavar(annotation: Any) -> str:
    """Return how --help shows an option's value: FLOAT|none, {fp32,bf16}."""
    kind, option = get_args(annotation)
    if choices := option.choices or (get_args(kind) if get_origin(kind) is Literal else ()):
        return "{" + ",".join(map(str, choices)) + "}"
    names = (kind.__name__.upper() for kind in kinds_of(annotation))
    return "|".join(names).replace("NONETYPE", "none")


def _unknown(name: str, allowed: Iterable[str]) -> str:
    """Return a clause that refuses `name` and offers the allowed names that it may mean."""
    allowed, last = list(allowed), name.lstrip("-").rpartition(".")[2]
    near = [other for other in allowed if other.lstrip("-").rpartition(".")[2] == last]
    near = near or get_close_matches(name, allowed, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{_PROGRAM} --help lists all"
    return f"no such option; {hint}"
