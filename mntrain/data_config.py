"""Options of the data of the built-in tasks."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain.config_types import STRICT, NamedPaths, OptionalPath

_VALID_FRACTION = 0.05


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Data of the built-in tasks: text or token ids."""

    path: OptionalPath = Field(
        default=None,
        description="text file, .jsonl or .parquet, folder of these, folder of the datasets "
        "library's save_to_disk, .npy or .bin of uint16 tokens, or the output of `tokenize`. none: "
        "Python's own library.",
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
        default="text", description="field of records: of .jsonl, .parquet and .arrow files."
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
