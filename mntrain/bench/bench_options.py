"""The options of `python -m mntrain bench`. --help needs neither torch nor MPI."""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from mntrain.comm import algorithms
from mntrain.config import CommConfig, Config, Option, annotations_of, flag_of, refusal

_PROGRAM = "python -m mntrain bench"
_DESCRIPTION = f"""Measure the collectives of this cluster, beside the MPI library's own, and what
share they reach of what the link between nodes (on one node: its memory) allows. For example:
  mpirun -n 4 {_PROGRAM}
      all verbs, by all algorithms, at five sizes: about a minute
  mpirun -n 4 {_PROGRAM} --comm.ranks-per-node 2
      the same on one machine, as if it were two nodes
  mpirun -n 16 {_PROGRAM} --sizes 1M 256M --verbs all_reduce --json bench.json --plot bench.png
      two sizes of one verb, kept as figures and as a picture"""

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
ALGORITHMS = algorithms.names()
GRAIN = 8  # bytes of fp64, the widest element: a size is a whole number of any


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and where to put it. The same on all ranks."""

    sizes: Annotated[
        tuple[int, ...],
        Option("sizes of the tensor in bytes, such as 64K or 1M. K, M, G: powers of 1024."),
    ] = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
    verbs: Annotated[tuple[str, ...], Option("verbs to measure.")] = VERBS
    algorithms: Annotated[
        tuple[str, ...],
        Option(f"algorithms to measure, of {', '.join(ALGORITHMS)}."),
    ] = ("lanes", "leader", "flat")
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"],
        Option("dtype of the tensor. The MPI library's own verbs: fp32, as many bytes."),
    ] = "fp32"
    repeats: Annotated[
        int, Option("number of times that each is measured. Short ones: more often.", least=1)
    ] = 5
    seconds: Annotated[
        float, Option("seconds for the whole. What would take too long is left out.", above=0)
    ] = 60.0
    json: Annotated[Path | None, Option("file for all figures. none: no file.")] = None
    plot: Annotated[
        Path | None, Option("PNG file for a picture. none: no picture. Needs mntrain[plot].")
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], get_args(annotations_of(Config)["device"])[1]
    ] = "auto"
    ranks_per_node: Annotated[
        int | None, get_args(annotations_of(CommConfig)["ranks_per_node"])[1]
    ] = None


def parse(argv: Sequence[str], *, print_errors: bool = True) -> BenchOptions:
    """Return the options of a command line.

    Local: every rank parses for itself, and `print_errors` picks the one that talks. Raises
    SystemExit: with 2 for what the user gave wrong, told on stderr, or with 0 after --help.
    """
    try:
        return _options(argv, print_errors)
    except ValueError as error:
        if print_errors:
            print("mntrain:", str(error).replace("\n", "\nmntrain: "), file=sys.stderr)
        raise SystemExit(2) from None


def size_label(nbytes: int) -> str:
    """A size as it is typed: 64K, 1M, 1536."""
    for unit, power in (("G", 30), ("M", 20), ("K", 10)):
        if nbytes >= 1 << power and nbytes % (1 << power) == 0:
            return f"{nbytes >> power}{unit}"
    return str(nbytes)


def _options(argv: Sequence[str], print_help: bool) -> BenchOptions:
    form, unknown = tyro.cli(
        _form(),
        prog=_PROGRAM,
        description=_DESCRIPTION,
        args=argv,
        return_unknown_args=True,
        console_outputs=print_help,
    )
    if wrong := [word.partition("=")[0] for word in unknown if word.startswith("-")]:
        raise ValueError("\n".join(f"{flag}: {_unknown(flag)}" for flag in wrong))
    if unknown:
        raise ValueError(
            f"{shlex.join(unknown)}: belongs to no option; {_PROGRAM} --help lists all"
        )
    given = {**vars(form), **vars(form.comm)}
    return BenchOptions(**{name: _value(name, given[name]) for name in _annotations()})


def _annotations() -> dict[str, Any]:
    return get_type_hints(BenchOptions, include_extras=True)


def _flag(name: str) -> str:
    return flag_of("comm.ranks_per_node" if name == "ranks_per_node" else name)


def _form() -> Any:
    """Return a dataclass for tyro to fill in: every option as the words that were typed.

    An option takes any number of words here, so that its own check refuses too many and too few.
    """
    fields, defaults = [], BenchOptions()
    for name, annotation in _annotations().items():
        kind, option = get_args(annotation)
        about = tyro.conf.arg(help=option.help, metavar=_metavar(name, kind))
        words = _words(name, getattr(defaults, name))
        fields.append((name, Annotated[tuple[str, ...], about], words))
    comm = make_dataclass("comm", [fields.pop()], namespace={"__doc__": CommConfig.__doc__})
    return make_dataclass("Form", [*fields, ("comm", comm, field(default_factory=comm))])


def _metavar(name: str, kind: Any) -> str:
    """Return how --help shows what an option takes."""
    lists = {"sizes": "SIZE ...", "verbs": "VERB ...", "algorithms": "ALGORITHM ..."}
    scalars = {int: "INT", float: "FLOAT", Path | None: "PATH|none", int | None: "INT|none"}
    return lists.get(name) or scalars.get(kind) or "{" + ",".join(get_args(kind)) + "}"


def _words(name: str, value: Any) -> tuple[str, ...]:
    if name == "sizes":
        return tuple(map(size_label, value))
    return value if isinstance(value, tuple) else ("none" if value is None else str(value),)


def _value(name: str, words: tuple[str, ...]) -> Any:
    """Return an option's value. ValueError for words that make none, with the option's name."""
    annotation = _annotations()[name]
    typed = shlex.join([_flag(name), *words])
    readers = {"sizes": _size, "verbs": _one_of(VERBS), "algorithms": _one_of(ALGORITHMS)}
    if name in readers:
        try:
            values = tuple(dict.fromkeys(map(readers[name], words)))
            if not values:
                raise ValueError("must be at least one")
        except ValueError as error:
            sought = get_args(annotation)[1].help.partition(". ")[0].rstrip(".")
            raise ValueError(f"{typed}: {error}; give the {sought}") from None
        return tuple(sorted(values)) if name == "sizes" else values
    value = _scalar(get_args(annotation)[0], words)
    if why := refusal(annotation, value):
        raise ValueError(f"{typed}: {why}")
    if name == "plot" and value is not None and value.suffix.lower() != ".png":
        raise ValueError(f"{typed}: must end in .png; give the PNG file for a picture")
    return value


def _scalar(kind: Any, words: tuple[str, ...]) -> Any:
    """Return a value of a type, or the words where they make none, for the check to refuse."""
    if len(words) != 1:
        return words
    wanted, optional = (get_args(kind)[0], True) if type(None) in get_args(kind) else (kind, False)
    if optional and words[0] == "none":
        return None
    try:
        return wanted(words[0]) if wanted in (int, float, Path) and words[0] else words[0]
    except ValueError:
        return words[0]


def _size(word: str) -> int:
    found = re.fullmatch(r"(\d+)([kmg]?)", word.lower())
    nbytes = int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]] if found else 0
    if nbytes < GRAIN or nbytes % GRAIN:
        raise ValueError(f"{word!r} must be a whole number above 0, a multiple of {GRAIN} bytes")
    return nbytes


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word not in allowed:
            raise ValueError(f"{word!r} must be one of {', '.join(allowed)}")
        return word

    return read


def _unknown(flag: str) -> str:
    """Return a clause that refuses a flag and offers those that it may mean."""
    near = get_close_matches(flag, map(_flag, _annotations()), n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{_PROGRAM} --help lists all"
    return f"no such option; {hint}"
