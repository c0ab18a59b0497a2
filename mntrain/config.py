"""The options of a job: frozen dataclasses, filled from a TOML file and the command line.

An option is declared once, by a field and the `Option` in its annotation. Its help, its check and
its spelling in the file and on the command line follow from that.
"""

import json
import math
import shlex
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tomli_w
import tyro

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


@dataclass(frozen=True)
class Option:
    """What an option is, and which values of its type it takes."""

    help: str
    """For --help. The first sentence completes "give the ..." in errors."""
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    choices: tuple[int, ...] = ()

    def takes(self, number: float) -> bool:
        """Return whether a number is within the bounds and among the choices."""
        inside = self.least <= number <= self.most and self.above < number < self.below
        return inside and (not self.choices or number in self.choices)

    def bounds(self) -> str:
        """Return in words what `takes` asks for."""
        if self.choices:
            return " or ".join(map(str, self.choices))
        words = {"at least": self.least, "at most": self.most}
        words |= {"above": self.above, "below": self.below}
        return " and ".join(f"{word} {at}" for word, at in words.items() if math.isfinite(at))


class _Checked:
    """Raises ValueError on construction when an option does not take its value."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        for name, annotation in _annotations(type(self)).items():
            value = getattr(self, name)
            if why := _refusal(annotation, value):
                flag = _flag(f"{section}.{name}".lstrip("."))
                raise ValueError(f"{shlex.join([flag, *_words(value)])}: {why}")


@dataclass(frozen=True)
class DataConfig(_Checked):
    """What to train on; the built-in task reads text or token ids."""

    path: Annotated[
        Path | None,
        Option("text file, folder, .npy or .bin of uint16 tokens. none: Python's own library."),
    ] = None
    glob: Annotated[str, Option("pattern of the files to read in a folder.")] = "**/*"
    valid_fraction: Annotated[
        float, Option("fraction of the data kept for validation.", above=0, below=1)
    ] = 0.05
    workers: Annotated[
        int, Option("number of data-loader processes a rank. 0: the rank itself loads.", least=0)
    ] = 0
    worker_start: Annotated[
        Literal["spawn", "forkserver", "fork"],
        Option("way data-loader processes start. fork: unsafe with most MPI libraries and CUDA."),
    ] = "spawn"


@dataclass(frozen=True)
class ModelConfig(_Checked):
    """The built-in transformer."""

    layers: Annotated[int, Option("number of transformer blocks.", least=1)] = 4
    heads: Annotated[int, Option("number of attention heads.", least=1)] = 4
    width: Annotated[int, Option("number of features of a token.", least=2)] = 128
    context: Annotated[int, Option("number of tokens in a sequence.", least=1)] = 128
    vocab: Annotated[int, Option("number of token ids. 0: as in the data.", least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--model.heads {self.heads}: must divide --model.width {self.width} into even "
                "parts, since rotary positions turn pairs of features; "
                f"give a width that is a multiple of {2 * self.heads}, or other heads"
            )


@dataclass(frozen=True)
class OptimConfig(_Checked):
    """The optimizer, and its learning rate: a linear warm-up, then a cosine."""

    name: Annotated[str, Option("name of a class of torch.optim.")] = "AdamW"
    lr: Annotated[float, Option("highest learning rate.", above=0)] = 3e-3
    weight_decay: Annotated[float, Option("optimizer's weight decay.", least=0)] = 0.1
    max_grad_norm: Annotated[
        float | None, Option("norm that gradients are clipped to. none: no clipping.", above=0)
    ] = 1.0
    warmup_steps: Annotated[int, Option("number of steps of the warm-up.", least=0)] = 20
    min_lr_fraction: Annotated[
        float, Option("fraction of lr at the end of the cosine.", least=0, most=1)
    ] = 0.1


@dataclass(frozen=True)
class TrainConfig(_Checked):
    """Steps, batches and precision."""

    steps: Annotated[int, Option("number of optimizer steps.", least=1)] = 200
    batch_size: Annotated[
        int, Option("number of sequences of a whole step, over all ranks.", least=1)
    ] = 32
    micro_batch_size: Annotated[
        int, Option("largest number of sequences in one forward of a rank.", least=1)
    ] = 8
    eval_every: Annotated[
        int, Option("number of steps between validations. 0: only at the end.", least=0)
    ] = 50
    precision: Annotated[Literal["fp32", "bf16"], Option("dtype the model computes in.")] = "fp32"
    compile: Annotated[bool, Option("choice to compile the model with torch.compile.")] = False
    check_every: Annotated[
        int, Option("number of steps between checks that all ranks agree. 0: never.", least=0)
    ] = 0


@dataclass(frozen=True)
class CommConfig(_Checked):
    """How gradients travel."""

    algorithm: Annotated[
        Literal["auto", "lanes", "leader", "flat", "naive"],
        Option("all-reduce algorithm. auto: chosen for the machine."),
    ] = "auto"
    bucket_mb: Annotated[float, Option("size of a gradient bucket in MiB.", above=0)] = 25.0
    ranks_per_node: Annotated[
        int | None, Option("number of ranks of a virtual node. none: nodes as they are.", least=1)
    ] = None


@dataclass(frozen=True)
class ZeroConfig(_Checked):
    """What is sharded over the ranks."""

    stage: Annotated[
        int, Option("stage of ZeRO that this version has (0: nothing is sharded).", choices=(0,))
    ] = 0


@dataclass(frozen=True)
class RunConfig(_Checked):
    """Where results go, and chance."""

    dir: Annotated[
        Path | None, Option("folder for the run's files. none: by the date, under runs/.")
    ] = None
    seed: Annotated[int, Option("seed of all random choices.", least=0, most=2**32 - 1)] = 0


@dataclass(frozen=True)
class Config(_Checked):
    """All options of a job, the same on all ranks."""

    task: Annotated[str, Option('task, "lm" or "package.module:Class" for your own.')] = "lm"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Option("device of each rank. auto: cuda if there is one.")
    ] = "auto"
    config: Annotated[Path | None, Option("TOML file of options. The command line wins.")] = None
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    run: RunConfig = field(default_factory=RunConfig)


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
        for name, annotation in _annotations(Config).items():
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
            why = _refusal(options[name], values[name])
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
    flags = [_flag(name) for name in _options()]
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
            str_from_instance=_words,
        )
        about = tyro.conf.arg(help=option.help)
        typed = Annotated[bool, about] if kind is bool else Annotated[kind, about, words]
        section, _, key = name.rpartition(".")
        entries.setdefault(section, []).append((key, typed, values[name]))
    form = entries.pop("")
    for section, inner in entries.items():
        doc = _annotations(Config)[section].__doc__
        made = make_dataclass(section, inner, namespace={"__doc__": doc})
        form.append((section, made, field(default_factory=made)))
    return make_dataclass("Form", form)


def _annotations(cls: type) -> dict[str, Any]:
    """Return the annotation of each field: a section's class, or Annotated[type, Option]."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _options() -> dict[str, Any]:
    """Return the annotation of each option, by its name in a file: task, train.batch_size."""
    annotations = _annotations(Config).items()
    return _flat({k: _annotations(v) if isinstance(v, type) else v for k, v in annotations})


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


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives in an option's type: (float, NoneType) for float | None."""
    kind = get_args(annotation)[0]
    return get_args(kind) if NoneType in get_args(kind) else (kind,)


def _refusal(annotation: Any, value: Any) -> str:
    """Return what a field takes in place of `value`, or "" if it takes it."""
    if isinstance(annotation, type):
        return "" if isinstance(value, annotation) else f"must be a {annotation.__name__}"
    kinds, option = _kinds(annotation), get_args(annotation)[1]
    words = {bool: "true or false", int: "a whole number", float: "a finite number"}
    words |= {str: "a text", Path: "a path", NoneType: "none"}
    if not any(_is_a(value, kind) for kind in kinds):
        allowed = [words.get(kind) or f"one of {', '.join(get_args(kind))}" for kind in kinds]
    elif isinstance(value, int | float) and not option.takes(value):
        allowed = [option.bounds(), *(words[kind] for kind in kinds[1:])]
    else:
        return ""
    return f"must be {' or '.join(allowed)}; give the {option.help.partition('. ')[0].rstrip('.')}"


def _is_a(value: Any, kind: Any) -> bool:
    """Return whether a value is of an option's type; an empty text is of none."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is int if kind is int else isinstance(value, kind) and value != ""


def _from_toml(annotation: Any, value: Any) -> Any:
    """Return the value of an option from a TOML value, which stays as it is if it makes none."""
    kinds = _kinds(annotation)
    if value == "none" and NoneType in kinds:
        return None
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
    kind = _kinds(annotation)[0]
    try:
        return _from_toml(annotation, kind(words[0]) if kind in (int, float) else words[0])
    except ValueError:
        return _from_toml(annotation, words[0])


def _words(value: Any) -> list[str]:
    """Return a value in the words in which it is typed."""
    return list(value) if isinstance(value, tuple) else ["none" if value is None else str(value)]


def _flag(name: str) -> str:
    """Return an option's name as typed: --train.batch-size."""
    return "--" + name.replace("_", "-")


def _metavar(annotation: Any) -> str:
    """Return how --help shows an option's value: FLOAT|none, {fp32,bf16}."""
    kind, option = get_args(annotation)
    if choices := option.choices or (get_args(kind) if get_origin(kind) is Literal else ()):
        return "{" + ",".join(map(str, choices)) + "}"
    names = (kind.__name__.upper() for kind in _kinds(annotation))
    return "|".join(names).replace("NONETYPE", "none")


def _unknown(name: str, allowed: Iterable[str]) -> str:
    """Return a clause that refuses `name` and offers the allowed names that it may mean."""
    allowed, last = list(allowed), name.lstrip("-").rpartition(".")[2]
    near = [other for other in allowed if other.lstrip("-").rpartition(".")[2] == last]
    near = near or get_close_matches(name, allowed, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{_PROGRAM} --help lists all"
    return f"no such option; {hint}"
