"""Options of a training job, as frozen dataclasses that validate their values.

An option is declared once. Its name in a file, its command-line flag, its help and its check
(`options.command_line`) follow from the field. Constructors raise pydantic's
ValidationError, a ValueError.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain import compression
from mntrain.comm import algorithms
from mntrain.comm.link import Link
from mntrain.options.balance import BalanceConfig
from mntrain.options.huggingface import HuggingFaceConfig
from mntrain.options.types import (
    STRICT,
    Interval,
    LocalInterval,
    NamedPaths,
    Names,
    OptionalPath,
    OrNone,
    PortRange,
    StepRange,
    Table,
    parse_names,
)
from mntrain.sync import SyncConfig

# Options that may differ between ranks, by name, with the reason. The ranks compare all others.
MAY_DIFFER = {
    "config": "the path of a file; the options in it are compared",
    "data.path": "data on local disks; sizes of files and some samples are compared",
    "data.tokenizer": "a file on local disks; its content is compared",
    "data.valid_path": "data on local disks; names, sizes and some samples are compared",
    "data.worker_start": "results do not depend on it",
    "data.workers": "results do not depend on it, and nodes may have different numbers of cores",
    "device": "each rank has its own",
    "hf.model": "a folder on local disks; config.json and sizes of files are compared",
    "init.from": "rank 0 alone reads it",
    "run.dir": "the path of rank 0 is used on all ranks",
    "run.recorder": "local disks may be mounted elsewhere",
}
# Options of own loops that are not compared either: by their names, they are of one rank or node.
RANK_OPTIONS = {"rank", "global_rank", "local_rank", "node_rank", "host", "hostname", "gpu"}


def _check_metric(value: str) -> str:
    name, colon, mode = value.partition(":")
    if not name or (colon and mode not in ("min", "max")):
        raise ValueError("must be a metric, such as eval_loss or accuracy:max")
    return value


def _check_link(value: str) -> str:
    Link.of(value)
    return value


LinkWords = Annotated[str, AfterValidator(_check_link)]
Device = Literal["auto", "cpu", "cuda"]
Change = Literal["batch-size", "drop-last", "seed", "data"]
_VALID_FRACTION = 0.05


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Data of the built-in tasks: text or token ids."""

    path: OptionalPath = Field(
        default=None,
        description="text file, folder of text files, folder of the datasets library's "
        "save_to_disk, or .npy or .bin of uint16 token ids. none: Python's own library.",
    )
    valid_path: NamedPaths = Field(
        default=None,
        description="validation data, of the same kinds as --data.path: a path, or several sets as "
        "NAME=PATH, evaluated each under its name; in a file, a table. none: a fraction of "
        "--data.path.",
    )
    glob: str = Field(default="**/*", description="pattern of the files to read in a folder.")
    tokenizer: str = Field(
        default="auto",
        description="tokenizer of text. bytes, bpe:FILE (a tokenizer.json), hf:PATH (of Hugging "
        "Face), or auto: that of --hf.model for --task hf, else bytes.",
    )
    text_field: str = Field(
        default="text", description="field of the text in a dataset that was saved."
    )
    valid_fraction: float = Field(
        default=_VALID_FRACTION,
        ge=0,
        lt=1,
        description="fraction of --data.path kept for validation, unless --data.valid-path is "
        "given. 0: none.",
    )
    drop_last: bool = Field(
        default=False,
        description="leave out the last batch of an epoch, which may be smaller than the others.",
    )
    workers: int = Field(
        default=0, ge=0, description="data-loader processes per rank. 0: load in the rank itself."
    )
    worker_start: Literal["spawn", "forkserver", "fork"] = Field(
        default="spawn",
        description="start method of data-loader processes. fork: unsafe with most MPI libraries "
        "and with CUDA.",
    )

    @model_validator(mode="after")
    def _check_fraction(self) -> "DataConfig":
        # The default may also be given explicitly; a file that a run has saved gives it always.
        if self.valid_path is not None and self.valid_fraction not in (0, _VALID_FRACTION):
            raise ValueError(
                f"--data.valid-fraction {self.valid_fraction}: --data.valid-path gives other "
                "validation data, so that all of --data.path trains: leave one of both out"
            )
        return self

    @property
    def validation_paths(self) -> dict[str, Path]:
        """The paths of --data.valid-path by the names of the sets; of an only one it is empty."""
        if isinstance(self.valid_path, dict):
            return self.valid_path
        return {} if self.valid_path is None else {"": self.valid_path}


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The built-in transformer."""

    layers: int = Field(default=4, ge=1, description="number of transformer blocks.")
    heads: int = Field(default=4, ge=1, description="number of attention heads.")
    width: int = Field(default=128, ge=2, description="features per token.")
    context: int = Field(default=128, ge=1, description="tokens per sequence.")
    vocab: int = Field(default=0, ge=0, description="number of token ids. 0: taken from the data.")

    @model_validator(mode="after")
    def _check_heads(self) -> "ModelConfig":
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--model.heads {self.heads}: must divide --model.width {self.width} into even "
                "parts, since rotary embeddings rotate pairs of features; "
                f"set a width that is a multiple of {2 * self.heads}, or other heads"
            )
        return self


@dataclass(frozen=True, config=STRICT)
class OptimConfig:
    """The optimizer and its learning-rate schedule, unless the task brings its own."""

    name: str = Field(
        default="AdamW",
        description="a class of torch.optim, Muon (matrices of layers; others by AdamW), or "
        '"package.module:Class" for another.',
    )
    options: Table = Field(
        default={}, description="further arguments of the class, such as 'betas = [0.9, 0.95]'."
    )
    lr: float = Field(default=3e-3, gt=0, description="peak learning rate.")
    weight_decay: float = Field(default=0.1, ge=0, description="weight decay of the optimizer.")
    max_grad_norm: OrNone[float] = Field(
        default=1.0, gt=0, description="norm to clip gradients to. none: no clipping."
    )
    non_finite: Literal["stop", "skip"] = Field(
        default="stop",
        description="action on an infinite or NaN gradient. skip: continue without the step.",
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="learning rate after a linear warm-up. wsd: constant, then a linear decay over "
        "--optim.decay-fraction of the run.",
    )
    warmup_steps: int = Field(default=20, ge=0, description="number of warm-up steps.")
    decay_fraction: float = Field(
        default=0.2, gt=0, le=1, description="part of the run's steps that wsd decays over."
    )
    min_lr_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="final learning rate as a fraction of lr, except for constant.",
    )


_STEPS = 200


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """Steps, batches and precision."""

    steps: OrNone[int] = Field(
        default=None,
        ge=1,
        description=f"number of optimizer steps. none: {_STEPS}, unless --train.epochs is given.",
    )
    epochs: OrNone[int] = Field(
        default=None,
        ge=1,
        description="number of passes over the training data, in place of --train.steps.",
    )
    batch_size: int = Field(default=32, ge=1, description="sequences per step, over all ranks.")
    micro_batch_size: int = Field(
        default=8, ge=1, description="maximum number of sequences in one forward of a rank."
    )
    eval_every: int = Field(
        default=50, ge=0, description="steps between validations. 0: only at the end."
    )
    eval_samples: int = Field(
        default=256,
        ge=0,
        description="maximum of samples of a validation set, evenly spaced. 0: all.",
    )
    patience: int = Field(
        default=0,
        ge=0,
        description="end the run after so many validations without a better --checkpoint.best. 0: "
        "never.",
    )
    precision: Literal["fp32", "bf16", "bf16-pure", "fp16"] = Field(
        default="fp32",
        description="dtype of the computation. bf16: autocast over fp32 parameters. bf16-pure, "
        "fp16: parameters and gradients are 16-bit too, with fp32 master weights in the "
        "optimizer; fp16 scales the loss.",
    )
    compile: bool = Field(default=False, description="compile the model with torch.compile.")
    recompute: bool = Field(
        default=False,
        description="keep only the input of each layer, and compute its activations again in "
        "backward: less memory, a third more time.",
    )
    check_every: int = Field(
        default=100,
        ge=0,
        description="steps between comparisons of all bits of the weights over ranks, in a message "
        "that a step sends anyway; also after 1, 2, 4, 8 and so on. 0: never.",
    )

    @model_validator(mode="after")
    def _choose_length(self) -> "TrainConfig":
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "steps", _STEPS)
        elif self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"--train.epochs {self.epochs} and --train.steps {self.steps} both say when the "
                "run ends: give one of the two (none takes back the one of a file)"
            )
        return self


@dataclass(frozen=True, config=STRICT, kw_only=True)
class CommConfig:
    """Communication of gradients: the options of `mntrain.init`, too."""

    algorithm: Literal[algorithms.names()] = Field(  # type: ignore[valid-type]
        default="lanes", description="all-reduce algorithm. `bench` compares them."
    )
    wire_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="dtype in which gradients travel between nodes. Sums accumulate in fp32; "
        "parameters keep their dtype.",
    )
    compress: Literal["none", *compression.NAMES] = Field(  # type: ignore[valid-type]
        default="none",
        description="compression of gradients between nodes, for slow links, with error feedback: "
        "see docs/slow-links.md.",
    )
    gather_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="dtype in which updated parameters travel at ZeRO stages 1 and 2. Owners keep "
        "master weights of full precision.",
    )
    transport: Literal["auto", "cuda-aware", "host", "nccl"] = Field(
        default="auto",
        description="transport of tensors on GPUs. host: through pinned memory, with any MPI. "
        "cuda-aware: MPI accesses GPU memory. nccl: NCCL within nodes, host between nodes. auto: "
        "nccl if it works here, else host.",
    )
    bucket_mb: float = Field(default=25.0, gt=0, description="size of a gradient bucket in MiB.")
    ranks_per_node: OrNone[int] = Field(
        default=None, ge=1, description="ranks per virtual node. none: use the real nodes."
    )
    link: OrNone[LinkWords] = Field(
        default=None,
        description="rate and latency between two nodes, such as 100gbit,5us, from which lengths "
        "of messages follow, and no sum. The latency is that of a message from rank to rank, as "
        "`doctor` measures it. none: measured at the start, in some milliseconds.",
    )
    timeout: OrNone[float] = Field(
        default=600.0,
        gt=0,
        description="seconds that a rank may wait for others without progress: then rank 0 reports "
        "who waits for whom and ends the job. none: hangs and lost ranks are only reported.",
    )
    warn_after: float = Field(
        default=60.0, gt=0, description="the same, until rank 0 prints a warning."
    )
    lost_after: float = Field(
        default=20.0,
        gt=0,
        description="seconds for which a node, or the link to it, may be silent until its ranks "
        "count as lost, which ends the job. For links that fail for longer, give twice the time: "
        "see docs/failures.md.",
    )
    port_range: OrNone[PortRange] = Field(
        default=None,
        description="TCP ports, such as 41000-41100, of which ranks 0 and 1 listen on one each for "
        "the messages that name late and lost ranks, where a firewall lets only some pass. none: "
        "any. The ports of the MPI library have variables of their own: docs/administrators.md.",
    )

    @model_validator(mode="after")
    def _check_compress(self) -> "CommConfig":
        if self.compress != "none" and self.wire_dtype != "fp32":
            raise ValueError(
                f"compress {self.compress} and wire_dtype {self.wire_dtype} both say how gradients "
                "cross nodes: give one of the two"
            )
        return self

    @property
    def bucket_bytes(self) -> int:
        """Size of a gradient bucket in bytes."""
        return max(1, int(self.bucket_mb * 2**20))


@dataclass(frozen=True, config=STRICT, kw_only=True)
class WorldConfig(CommConfig):
    """The arguments of `mntrain.init` besides the communicator."""

    device: Device = "auto"
    report: bool = False


@dataclass(frozen=True, config=STRICT)
class ZeroConfig:
    """Sharding over the ranks."""

    stage: int = Field(
        default=0,
        ge=0,
        le=2,
        description="ZeRO stage. 0: no sharding. 1: the optimizer's state. 2: gradients too.",
    )
    partition: Literal["auto", "element", "parameter"] = Field(
        default="auto",
        description="unit of sharding. element: any elements, for optimizers that work element by "
        "element. parameter: whole parameters. auto: by element for those of torch.optim that are "
        "known to work so, else whole parameters.",
    )


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """The run directory, resumption, time limits and the seed."""

    dir: OptionalPath = Field(
        default=None, description="folder for the run's files. none: by the date, under runs/."
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="seed of all random numbers.")
    resume: str = Field(
        default="auto",
        description="auto, never, or the path of a checkpoint or run. auto: continue from the "
        "newest valid checkpoint in --run.dir, if it has one.",
    )
    allow_change: Annotated[tuple[Change, ...], BeforeValidator(parse_names)] = Field(
        default=(),
        description="what a resumed run may change, which is otherwise refused: batch-size, "
        "drop-last, seed (the order of samples), data (another number of samples).",
    )
    stop_after: OrNone[int] = Field(
        default=None,
        ge=1,
        description="step of the run, counted from its beginning also when it is resumed, after "
        "which this job saves and ends. none: the run's last step.",
    )
    max_minutes: OrNone[float] = Field(
        default=None,
        gt=0,
        description="time limit of this job in minutes: it saves and ends in time, even if the "
        "run is not complete. none: the end of its batch job, if it has one.",
    )
    recorder: OptionalPath = Field(
        default=None,
        description="folder on a local disk for the last events of each rank, which `python -m "
        "mntrain autopsy` reads. none: recorder/ in the run's folder.",
    )
    grace: float = Field(
        default=30.0,
        gt=0,
        description="seconds after a signal in which the step must end, so that the job can save. "
        "Then, and at a second signal, it ends at once.",
    )


@dataclass(frozen=True, config=STRICT)
class InitConfig:
    """The weights that a new run begins with. A resumed run has its own."""

    from_: OptionalPath = Field(
        default=None,
        description="weights that a new run begins with, taken by name: a checkpoint, a run, a "
        ".safetensors or .pt file, or a folder of Hugging Face. Only rank 0 reads it.",
    )
    freeze: Names = Field(
        default=(),
        description="patterns of the names of parameters that do not train, such as 'embedding*'.",
    )


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """Checkpoints of a run."""

    every: Interval = Field(
        default="0",
        description="interval between checkpoints. In steps, or minutes (10min), or auto. 0: no "
        "checkpoints. auto: the interval that loses least time, from the measured cost of a save, "
        "if a job fails once a day.",
    )
    keep: int = Field(
        default=3, ge=1, description="checkpoints to keep: the newest, and the best one."
    )
    best: Annotated[str, AfterValidator(_check_metric)] = Field(
        default="eval_loss",
        description="metric whose best checkpoint is kept: eval_loss, or one of the task's, such "
        "as accuracy:max. The lowest value is the best, unless :max follows.",
    )
    local: OptionalPath = Field(
        default=None,
        description="folder on each node, in its memory (/dev/shm/NAME) or on a disk of its own, "
        "for checkpoints that are saved more often: of a node what its ranks have, and a copy on "
        "another node. A restart takes the newest step that is whole. none: no such checkpoints.",
    )
    local_every: LocalInterval = Field(
        default="auto",
        description="steps between those checkpoints, or auto: as often as costs at most 1 % of "
        "the time.",
    )

    @model_validator(mode="after")
    def _check_local(self) -> "CheckpointConfig":
        if self.local is None and self.local_every != "auto":
            raise ValueError(
                f"local_every {self.local_every} is of checkpoints in the nodes' memory: give "
                "their folder, too (--checkpoint.local DIR, or local=DIR)"
            )
        return self

    @property
    def wanted(self) -> bool:
        """True if a run is to be saved at intervals at all."""
        return self.every.strip("0") != "" or self.local is not None


@dataclass(frozen=True, config=STRICT)
class LogConfig:
    """Copies of metrics.jsonl for other tools, and the page at the end of a job."""

    tensorboard: bool = Field(
        default=False, description="write TensorBoard's event files, in tensorboard/ of the run."
    )
    wandb: OrNone[str] = Field(
        default=None, description="project of Weights & Biases to send metrics to. none: do not."
    )
    timeline: OrNone[StepRange] = Field(
        default=None,
        description="steps FROM:TO, such as 20:22, to record in timeline.json.gz, a trace of all "
        "ranks for Perfetto. none: do not.",
    )
    mlflow: OrNone[str] = Field(
        default=None,
        description="experiment of MLflow to send metrics to (MLFLOW_TRACKING_URI says where). "
        "none: do not.",
    )
    prometheus: bool = Field(
        default=False,
        description="write metrics.prom, the last values for Prometheus, as the textfile collector "
        "of node_exporter reads them.",
    )
    per_rank: bool = Field(
        default=False,
        description="add to metrics.jsonl, and thus to its copies, the seconds of the phases of "
        "each rank and its memory.",
    )
    report: bool = Field(
        default=False, description="write report.html, a page about the run, at the end of a job."
    )


@dataclass(frozen=True, config=STRICT)
class Config:
    """All options of a job, the same on all ranks except for those in `MAY_DIFFER`."""

    task: str = Field(
        default="lm", description='task: lm, hf, or "package.module:Class" for your own.'
    )
    device: Device = Field(
        default="auto", description="device of each rank. auto: cuda if there is one."
    )
    config: OptionalPath = Field(
        default=None, description="TOML file of options. The command line overrides it."
    )
    data: DataConfig = Field(default=DataConfig())
    model: ModelConfig = Field(default=ModelConfig())
    hf: HuggingFaceConfig = Field(default=HuggingFaceConfig())
    init: InitConfig = Field(default=InitConfig())
    optim: OptimConfig = Field(default=OptimConfig())
    train: TrainConfig = Field(default=TrainConfig())
    comm: CommConfig = Field(default=CommConfig())
    zero: ZeroConfig = Field(default=ZeroConfig())
    sync: SyncConfig = Field(default=SyncConfig())
    balance: BalanceConfig = Field(default=BalanceConfig())
    run: RunConfig = Field(default=RunConfig())
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig())
    log: LogConfig = Field(default=LogConfig())


def flag_of(name: str) -> str:
    """Return the command-line flag of an option: --train.batch-size for train.batch_size."""
    return "--" + name.replace("_", "-")
