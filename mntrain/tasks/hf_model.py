"""A local folder of a Hugging Face model: its configuration, and models made of it."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mntrain.alike.naming import first_names
from mntrain.corpus.tokenizer import FileTokenizer, Tokenizer
from mntrain.options.huggingface import (
    CONFIG_FILE,
    RUN_FOLDER,
    HuggingFaceConfig,
    transformers_library,
)

_AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
}
_WEIGHTS = (  # of which transformers takes the first
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
_GENERATION_FILE = "generation_config.json"
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


class ModelFolder:
    """The folder or the config.json of --hf.model. Nothing is downloaded.

    Raises ValueError if it is missing, malformed, or has weights that cannot be read.
    """

    def __init__(self, options: HuggingFaceConfig) -> None:
        given = options.model
        file = given / CONFIG_FILE if given is not None and given.is_dir() else given
        if file is None or not file.is_file():
            raise ValueError(
                f"--hf.model {given or 'none'}: there is no {CONFIG_FILE}, and nothing is "
                "downloaded: give a folder that has one, such as that of `hf download MODEL "
                "--local-dir FOLDER` where there is a network"
            )
        self._options, self._auto = options, _AUTO[options.head]
        self.path, self.config_file = file.parent, file
        library = transformers_library()
        try:
            self.config: Any = library.AutoConfig.from_pretrained(str(file), **_LOCAL)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--hf.model: {file} is not a configuration of the transformers library: {error}"
            ) from error
        self.identities = {"the model's config.json": hashlib.sha256(file.read_bytes()).hexdigest()}
        self.weights = [] if given == file else self._find_weights()
        self.vocabulary: int = self.config.get_text_config().vocab_size
        self.new_tensors: list[str] = []  # that the weights lack, after `make`
        self._class_name = ""

    def _find_weights(self) -> list[Path]:
        """Return the file or the index of the weights; nothing for random weights."""
        found = [path for name in _WEIGHTS if (path := self.path / name).is_file()]
        other = sorted(path.name for path in self.path.iterdir() if path.suffix in _OTHER_WEIGHTS)
        if other and not found:
            raise ValueError(
                f"--hf.model {self.path} has weights of another kind ({', '.join(other[:3])}): "
                f"save them as {_WEIGHTS[0]}, or give {self.config_file} for random weights"
            )
        return found[:1]

    def files(self) -> dict[str, Path]:
        """Return the files that ranks compare, by name."""
        found = sorted(self.path.glob("*.safetensors")) if self.weights else []
        named = {f"--hf.model {path.name}": path for path in [*found, *self.weights]}
        return {f"--hf.model {CONFIG_FILE}": self.config_file, **named}

    def length(self) -> int:
        """Return the most tokens of a sample. Raises ValueError if it is not known or too large."""
        wanted, most = self._options.max_length, self._positions()
        if not (wanted or most) or (most and wanted > most):
            raise ValueError(
                f"--hf.max-length {wanted}: the model of {self.path} takes at most "
                f"{most or '(config.json does not say how many)'} tokens: give another number"
            )
        return wanted or most

    def _positions(self) -> int:
        """Return how many positions the model has; 0 if it is not known."""
        config = self.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions < 1:
            return 0
        auto = getattr(transformers_library(), self._auto)
        try:
            with torch.device("meta"):
                model = auto.from_config(self.config)
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

    def make(self) -> nn.Module:
        """Return a new model in fp32, with the folder's weights, in training mode."""
        auto, options = getattr(transformers_library(), self._auto), {"dtype": torch.float32}
        try:
            if not self.weights:
                model = auto.from_config(self.config, **options)
            else:
                model, report = auto.from_pretrained(
                    str(self.path),
                    config=self.config,
                    output_loading_info=True,
                    **options,
                    **_LOCAL,
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
        random = f"; random: {first_names(self.new_tensors, 4)}" if self.new_tensors else ""
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
