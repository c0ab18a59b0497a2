"""Options of Hugging Face models, and access to the transformers library."""

from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from mntrain.options.types import STRICT, OptionalPath

CONFIG_FILE = "config.json"
RUN_FOLDER = "hf"  # in a run directory: the files of an exported folder besides the weights


@dataclass(frozen=True, config=STRICT)
class HuggingFaceConfig:
    """A model of Hugging Face, for --task hf. Its text is that of the data options."""

    model: OptionalPath = Field(
        default=None,
        description="local folder with config.json and, unless weights are to be random, weights; "
        "or a config.json alone, for random weights. Nothing is downloaded.",
    )
    head: Literal["causal-lm", "classification"] = Field(
        default="causal-lm",
        description="objective. classification: of the records of a saved dataset.",
    )
    label_field: str = Field(
        default="label", description="field of the label, an integer or a text, for classification."
    )
    max_length: int = Field(
        default=0, ge=0, description="most tokens of a sample. 0: as many as the model takes."
    )


def transformers_library() -> Any:
    """Return the transformers library, which shows no messages and progress bars from then on.

    Raises ValueError if it is not installed.
    """
    if find_spec("transformers") is None:
        raise ValueError(
            "models of Hugging Face need the transformers library: pip install transformers"
        )
    import transformers  # noqa: PLC0415 - optional

    log: Any = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    return transformers
