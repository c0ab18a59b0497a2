"""The options of a job: frozen dataclasses that check what they are given.

An option is declared once, by a field and the `Option` in its annotation. Its help, its check and
its spelling in a file and on the command line (`options`) follow from that.
"""

import math
import re
import shlex
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from mntrain.comm import algorithms


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
    pattern: str = ""
    """A regular expression of the texts that it takes; a file may have whole numbers for them."""
    allowed: str = "a text"
    """In words, what the pattern takes."""

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
        for name, annotation in annotations_of(type(self)).items():
            value = getattr(self, name)
            if why := refusal(annotation, value):
                flag = flag_of(f"{section}.{name}".lstrip("."))
                raise ValueError(f"{shlex.join([flag, *words_of(value)])}: {why}")


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
    non_finite: Annotated[
        Literal["stop", "skip"],
        Option("answer to a gradient with an infinity or a NaN. skip: go on without that step."),
    ] = "stop"
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
    eval_samples: Annotated[
        int,
        Option(
            "most validation samples in one evaluation, evenly spread over them. 0: all.", least=0
        ),
    ] = 256
    precision: Annotated[
        Literal["fp32", "bf16", "bf16-pure", "fp16"],
        Option(
            "dtype the model computes in. bf16: autocast over fp32 parameters. bf16-pure, fp16: "
            "parameters and gradients are of 16 bits too, with fp32 copies in the optimizer; "
            "fp16 scales the loss."
        ),
    ] = "fp32"
    compile: Annotated[bool, Option("choice to compile the model with torch.compile.")] = False
    check_every: Annotated[
        int, Option("number of steps between checks that all ranks agree. 0: never.", least=0)
    ] = 0


@dataclass(frozen=True)
class CommConfig(_Checked):
    """How gradients travel."""

    algorithm: Annotated[
        Literal[("auto", *algorithms.names())],  # type: ignore[valid-type]
        Option("all-reduce algorithm. auto: chosen for the machine."),
    ] = "auto"
    tune: Annotated[
        bool,
        Option(
            "choice to time the algorithms at the start, for auto. It takes up to about 2 s, and "
            "what is found is kept in a cache. no-tune: auto is lanes."
        ),
    ] = True
    wire_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Option(
            "dtype in which gradients travel between nodes. Sums accumulate in fp32; 16 bits halve "
            "the bytes; parameters travel as they are."
        ),
    ] = "fp32"
    transport: Annotated[
        Literal["auto", "cuda-aware", "host", "nccl"],
        Option(
            "way of tensors on GPUs. host: through pinned memory, with any MPI. cuda-aware: MPI "
            "takes them. nccl: NCCL within nodes, host between. auto: the fastest that works."
        ),
    ] = "auto"
    bucket_mb: Annotated[float, Option("size of a gradient bucket in MiB.", above=0)] = 25.0
    ranks_per_node: Annotated[
        int | None, Option("number of ranks of a virtual node. none: nodes as they are.", least=1)
    ] = None


@dataclass(frozen=True)
class ZeroConfig(_Checked):
    """What is sharded over the ranks."""

    stage: Annotated[
        int,
        Option(
            "stage of ZeRO. 0: nothing is sharded. 1: the optimizer's state. 2: gradients too.",
            choices=(0, 1, 2),
        ),
    ] = 0
    partition: Annotated[
        Literal["element", "parameter"],
        Option(
            "way shards are cut. element: all equal. parameter: parameters stay whole, which some "
            "optimizers need."
        ),
    ] = "element"


@dataclass(frozen=True)
class RunConfig(_Checked):
    """Where results go, how a run goes on in several jobs, and chance."""

    dir: Annotated[
        Path | None, Option("folder for the run's files. none: by the date, under runs/.")
    ] = None
    seed: Annotated[int, Option("seed of all random choices.", least=0, most=2**32 - 1)] = 0
    resume: Annotated[
        str,
        Option(
            "way to go on: auto, never, or the path of a checkpoint or run. auto: from the newest "
            "sound checkpoint in --run.dir, if it has one."
        ),
    ] = "auto"
    stop_after: Annotated[
        int | None,
        Option(
            "number of steps after which this job saves and ends, though the run does not. none: "
            "the run's last.",
            least=1,
        ),
    ] = None
    max_minutes: Annotated[
        float | None,
        Option(
            "minutes that this job may take, from its start: it saves and ends before, though the "
            "run does not. none: until the end of its Slurm allocation, if it is in one.",
            above=0,
        ),
    ] = None


@dataclass(frozen=True)
class CheckpointConfig(_Checked):
    """What is kept of a run, to go on from."""

    every: Annotated[
        str,
        Option(
            "steps between checkpoints, or minutes, as in 10min, or auto. 0: none. auto: the least "
            "loss of time, from what a save costs and --checkpoint.mtbf-hours.",
            pattern=r"auto|\d+|(?=.*[1-9])\d+(\.\d+)?min",
            allowed="a number of steps, minutes such as 10min, or auto",
        ),
    ] = "0"
    keep: Annotated[
        int,
        Option("number of checkpoints to keep: the newest, and that of the best loss.", least=1),
    ] = 3
    mtbf_hours: Annotated[
        float, Option("mean hours between failures of a job of this size, for auto.", above=0)
    ] = 24.0


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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def annotations_of(cls: type) -> dict[str, Any]:
    """Return the annotation of each field: a section's class, or Annotated[type, Option]."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives in an option's type: (float, NoneType) for float | None."""
    kind = get_args(annotation)[0]
    return get_args(kind) if NoneType in get_args(kind) else (kind,)


def refusal(annotation: Any, value: Any) -> str:
    """Return what a field takes in place of `value`, or "" if it takes it."""
    if isinstance(annotation, type):
        return "" if isinstance(value, annotation) else f"must be a {annotation.__name__}"
    kinds, option = kinds_of(annotation), get_args(annotation)[1]
    words = {bool: "true or false", int: "a whole number", float: "a finite number"}
    words |= {str: option.allowed, Path: "a path", NoneType: "none"}
    if not any(_is_a(value, kind) for kind in kinds):
        allowed = [words.get(kind) or f"one of {', '.join(get_args(kind))}" for kind in kinds]
    elif isinstance(value, int | float) and not option.takes(value):
        allowed = [option.bounds(), *(words[kind] for kind in kinds[1:])]
    elif isinstance(value, str) and option.pattern and not re.fullmatch(option.pattern, value):
        allowed = [option.allowed]
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


def flag_of(name: str) -> str:
    """Return an option's name as typed: --train.batch-size."""
    return "--" + name.replace("_", "-")


def words_of(value: Any) -> list[str]:
    """Return a value in the words in which it is typed."""
    return list(value) if isinstance(value, tuple) else ["none" if value is None else str(value)]
