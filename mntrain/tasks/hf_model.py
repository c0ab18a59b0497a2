"""A local folder of a Hugging Face model: its configuration, and models made of it."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mntrain.corpus.tokenizer import FileTokenizer, Tokenizer
from mntrain.huggingface import (
    CONFIG_FILE,
    RUN_FOLDER,
    HuggingFaceConfig,
    transformers_library,
)

_AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
}
_WEIGHTS = (  # of which transformers takes the first
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
_GENERATION_FILE = "generation_config.json"


class ModelFolder:
    """The folder or the config.json of --hf.model. Nothing is downloaded.

    Raises ValueError if it is missing, malformed, or has weights that cannot be read.
    """

    def __init__(self, options: HuggingFaceConfig) -> None:
        self._options = options
        self.path, self.config_file = _find(options.model)
        self._auto = _AUTO[options.head]
        with transformers_library() as library:
            try:
                self.config: Any = library.AutoConfig.from_pretrained(
                    str(self.config_file), local_files_only=True, trust_remote_code=False
                )
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"--hf.model: {self.config_file} is not a configuration of the transformers "
                    f"library: {error}"
                ) from error
        self.identity = hashlib.sha256(self.config_file.read_bytes()).hexdigest()
        self.weights = self._find_weights()
        self.vocabulary: int = self.config.get_text_config().vocab_size
        self.new_tensors: list[str] = []  # that the weights lack, after `make`
        self._class_name = ""

    def files(self) -> dict[str, Path]:
        """Return the files that ranks compare, by name."""
        found = sorted(self.path.glob("*.safetensors")) if self.weights else []
        named = {f"--hf.model {path.name}": path for path in [*found, *self.weights]}
        return {f"--hf.model {CONFIG_FILE}": self.config_file, **named}

    def length(self) -> int:
        """Return the most tokens of a sample. Raises ValueError if it is not known or too large."""
        wanted, most = self._options.max_length, self._positions()
        if not wanted and most is None:
            raise ValueError(
                f"{self.config_file} does not say how many tokens the model takes: give "
                "--hf.max-length"
            )
        if most is not None and wanted > most:
            raise ValueError(
                f"--hf.max-length {wanted}: the model of {self.path} takes at most {most} tokens"
            )
        return wanted or int(most or 0)

    def make(self) -> nn.Module:
        """Return a new model in fp32, with the folder's weights, in training mode."""
        with transformers_library() as library:
            auto = getattr(library, self._auto)
            try:
                if not self.weights:
                    model = auto.from_config(self.config, dtype=torch.float32)
                else:
                    model, report = auto.from_pretrained(
                        str(self.path),
                        config=self.config,
                        dtype=torch.float32,
                        local_files_only=True,
                        trust_remote_code=False,
                        output_loading_info=True,
                    )
                    self.new_tensors = sorted(report["missing_keys"])
                    if len(self.new_tensors) == len(model.state_dict()):
                        raise ValueError("no tensor of it has a name of the model")
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                raise ValueError(
                    f"--hf.model {self.path}: {self._auto} cannot make a model of it for --hf.head "
                    f"{self._options.head}: {error}"
                ) from error
        self._class_name = type(model).__name__
        made: nn.Module = model.train()
        return made

    def describe(self) -> str:
        """Return where the weights come from."""
        if not self.weights:
            return f"model: {self.config.model_type} with random weights, of {self.config_file}"
        new = self.new_tensors
        more = f" and {len(new) - 4} more" if len(new) > 4 else ""
        random = f"; random: {', '.join(new[:4])}{more}" if new else ""
        return f"model: {self.config.model_type} with the weights of {self.path}{random}"

    def run_files(self, tokenizer: Tokenizer | None) -> dict[str, bytes]:
        """Return the files of an exported folder but for the weights, by path in the run.

        Call `make` first.
        """
        config = copy.deepcopy(self.config)
        config.architectures = [self._class_name]
        files = {CONFIG_FILE: config.to_json_string(use_diff=False).encode()}
        if isinstance(tokenizer, FileTokenizer):
            files |= tokenizer.exported_files()
        generation = self.path / _GENERATION_FILE
        if generation.is_file():
            files[_GENERATION_FILE] = generation.read_bytes()
        return {f"{RUN_FOLDER}/{name}": content for name, content in files.items()}

    def _find_weights(self) -> list[Path]:
        """Return the file or the index of the weights; nothing for random weights."""
        if self._options.model == self.config_file:
            return []
        found = [path for name in _WEIGHTS if (path := self.path / name).is_file()]
        if found:
            return found[:1]
        if other := [p.name for p in sorted(self.path.iterdir()) if p.suffix in _OTHER_WEIGHTS]:
            raise ValueError(
                f"--hf.model {self.path} has weights of another kind ({', '.join(other[:3])}): "
                f"save them as {_WEIGHTS[0]}, or give {self.config_file} for random weights"
            )
        return []

    def _positions(self) -> int | None:
        """Return how many positions the model has, or None."""
        config = self.config.get_text_config()
        positions: int | None = getattr(config, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions < 1:
            return None
        with transformers_library() as library, torch.device("meta"):
            try:
                model = getattr(library, self._auto).from_config(self.config)
            except ValueError as error:
                raise ValueError(
                    f"--hf.model {self.path}: has no model for --hf.head {self._options.head}: "
                    f"{str(error).partition('.')[0]}"
                ) from error
        for name, module in model.named_modules():  # RoBERTa counts them from behind the padding
            if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
                taken = 0 if module.padding_idx is None else module.padding_idx + 1
                positions = min(positions, module.num_embeddings - taken)
        return positions


def _find(given: Path | None) -> tuple[Path, Path]:
    """Return the folder of --hf.model and its configuration. Raises ValueError."""
    if given is None:
        raise ValueError("--task hf: give --hf.model FOLDER, which has a config.json")
    if not given.exists():
        raise ValueError(
            f"--hf.model {given}: there is no such folder, and nothing is downloaded: run "
            f"`hf download {given} --local-dir FOLDER` where there is a network, and give FOLDER"
        )
    file = given / CONFIG_FILE if given.is_dir() else given
    if not file.is_file():
        raise ValueError(f"--hf.model {given}: has no {CONFIG_FILE}")
    return file.parent, file
