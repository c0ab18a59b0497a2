"""Types of options, and how their values are written on the command line and in a file."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, str_min_length=1)

T = TypeVar("T")


def unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return each value once, in order. Raises ValueError if there is none."""
    if not values:
        raise ValueError("must have at least one value")
    return tuple(dict.fromkeys(values))


def _parse_none(value: Any) -> Any:
    return None if value == "none" else value


def _parse_path(value: Any) -> Any:
    if value == "":
        raise ValueError("must be a path or none")
    return Path(value) if isinstance(value, str) and value != "none" else _parse_none(value)


def _parse_interval(pattern: str, described: str, value: Any) -> Any:
    text = str(value) if type(value) is int else value  # a file may hold a number of steps
    if not isinstance(text, str) or not re.fullmatch(pattern, text):
        raise ValueError(f"must be {described}, or auto")
    return text


def _check_ports(value: str) -> str:
    first, dash, last = value.partition("-")
    numbers = dash and first.isdecimal() and last.isdecimal()
    if not (numbers and 1024 <= int(first) < int(last) <= 65535):
        raise ValueError("must be two ports from 1024 to 65535, such as 41000-41100")
    return value


def port_numbers(value: str | None) -> Sequence[int]:
    """Return the ports of a range such as "41000-41100", or 0 for any. Pure."""
    if value is None:
        return (0,)
    first, _, last = value.partition("-")
    return range(int(first), int(last) + 1)


def _check_steps(value: str) -> str:
    first, colon, last = value.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ValueError("must be the first and the last step, such as 20:22")
    return value


def _parse_table(value: Any) -> Any:
    """Return the items of an inline TOML table, whose braces may be left out."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise ValueError("must be a table")
    text = value.strip()
    inner = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    try:
        return {} if inner == "none" else tomllib.loads(f"table = {{{inner}}}")["table"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"must be names and values such as 'betas = [0.9, 0.95], amsgrad = true' ({error})"
        ) from error


def parse_names(value: Any) -> Any:
    """Return the tuple of a list of names; "none" is an empty one."""
    names = tuple(value) if isinstance(value, list | tuple) else value
    return () if names in ("none", ("none",)) else names


def _parse_named_paths(value: Any) -> Any:
    """Return a path, a mapping of names to paths, or None, of one of these or of words.

    A word is NAME=PATH if the part before its first "=" has no slash, and a path otherwise.
    """
    if isinstance(value, list | tuple):
        parts = [str(word).partition("=") for word in value]
        paths = [
            word
            for word, (name, equals, _) in zip(value, parts, strict=True)
            if "/" in name or not equals
        ]
        if paths and len(value) == 1:
            return _parse_path(value[0])
        if paths:
            raise ValueError(
                "must be one path, or several as NAME=PATH, such as news=news.txt code=code/"
            )
        value = {name: path for name, _, path in parts}
        if len(value) < len(parts):
            raise ValueError("must have each name once")
    if not isinstance(value, Mapping):
        return _parse_path(value)
    for name, path in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ValueError(
                "must have names of letters, digits, '_', '.' and '-', since metrics have them "
                f"({name!r} is none)"
            )
        if not isinstance(path, str | Path) or path in ("", "none"):
            raise ValueError(f"must be names and paths (the path of {name!r} is missing)")
    # Sorted, so that all ranks evaluate the sets in one order.
    return {name: Path(path) for name, path in sorted(value.items())} or None


OrNone = Annotated[T | None, BeforeValidator(_parse_none)]  # written "none"
OptionalPath = Annotated[Path | None, BeforeValidator(_parse_path)]
_INTERVAL = r"auto|\d+|(?=.*[1-9])\d+(\.\d+)?min", "a number of steps, minutes such as 10min"
Interval = Annotated[str, BeforeValidator(partial(_parse_interval, *_INTERVAL))]
_STEPS = r"auto|0*[1-9]\d*", "a number of steps"
LocalInterval = Annotated[str, BeforeValidator(partial(_parse_interval, *_STEPS))]
PortRange = Annotated[str, AfterValidator(_check_ports)]  # "41000-41100"
StepRange = Annotated[str, AfterValidator(_check_steps)]  # "20:22"
Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]  # written "none" if there is none
NamedPaths = Annotated[Path | dict[str, Path] | None, BeforeValidator(_parse_named_paths)]
Table = Annotated[dict[str, Any], BeforeValidator(_parse_table)]  # written as in TOML


def option_name(field: str) -> str:
    """Return the name of a field's option: `from` is a keyword, so its field is called `from_`."""
    return field.rstrip("_")


def as_mapping(options: Any) -> dict[str, Any]:
    """Return the values of a dataclass of options by their names and sections."""
    return {
        option_name(name): as_mapping(value) if is_dataclass(value) else value
        for name, value in vars(options).items()
        if not name.startswith("__")
    }


def words_of(value: Any) -> list[str]:
    """Return the command-line words of an option's value."""
    if isinstance(value, tuple | list):
        return list(map(str, value)) or ["none"]
    if isinstance(value, Mapping):
        if value and all(isinstance(item, Path) for item in value.values()):
            return [f"{name}={path}" for name, path in value.items()]
        return [", ".join(f"{n} = {json.dumps(item)}" for n, item in value.items()) or "none"]
    return ["none" if value is None else str(value)]


def construct(model: Any, values: Mapping[str, Any], sources: Mapping[str, str]) -> Any:
    """Return `model` with the given values. Raises ValueError with one line per problem.

    `sources` has the place of each value in the user's words, such as --train.steps.
    """
    problems: list[str] = []

    def make(kind: Any, prefix: str) -> Any:
        fields = kind.__pydantic_fields__
        sections = {
            name: make(info.annotation, f"{name}.")
            for name, info in fields.items()
            if is_dataclass(info.annotation)
        }
        named = {name: prefix + option_name(name) for name in fields}
        given = {name: values[option] for name, option in named.items() if option in values}
        try:
            return kind(**given, **sections)
        except ValidationError as error:
            for details in error.errors():
                message = details["msg"].removeprefix("Value error, ")
                if details["loc"]:  # else it concerns several options, which it names
                    name = named[str(details["loc"][0])]
                    message = f"{sources[name]}: {message}, not {details['input']!r}"
                problems.append(message)
            return kind()

    made = make(model, "")
    if problems:
        raise ValueError("\n".join(problems))
    return made
