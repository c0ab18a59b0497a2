"""The built-in language model as a Llama of the transformers library.

Both are the same function of the tokens. Llama has a matrix each for what ours computes by one
product: queries, keys and values, and the gate and the input of the MLP. Both rotate the pairs
(i, i + d/2) of a head's features, so no row is moved.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mntrain.checkpoint.format import MODEL, open_tensors
from mntrain.corpus.tokenizer import (
    GENERIC_CLASS,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    FileTokenizer,
)
from mntrain.huggingface import CONFIG_FILE

TASK = "lm"
# What `mntrain.tasks.transformer` has built in.
_NORM_EPSILON = 1e-6
_ROPE_THETA = 10_000.0

_EMBEDDING = "embedding.weight"
# Tensors of the whole model, and of each layer, by their names here. Those with several names there
# are split into as many parts.
_OF_THE_MODEL = {_EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_OF_A_LAYER = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def write_llama(checkpoint: Path, shape: Mapping[str, Any], tokenizer: Path, out: Path) -> None:
    """Write config.json and model.safetensors of a checkpoint of --task lm into a folder.

    `shape` has the options of --model. `tokenizer` is a folder, which need not have one. Raises
    ValueError for a checkpoint of another model.
    """
    path = tokenizer / TOKENIZER_FILE
    end_of_text = FileTokenizer(path).end_of_text if path.is_file() else None
    with open_tensors(checkpoint / MODEL) as file:
        tensors = _llama_tensors(file, shape)
        config = _llama_config(shape, tensors, end_of_text)
        (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, out / MODEL, metadata={"format": "pt"})


def plain_tokenizer(folder: Path) -> None:
    """Let the tokenizer of an exported folder, if any, give texts the tokens of training.

    A template that adds tokens is removed, as are truncation, padding and dropout: --task lm
    trains without.
    """
    path, settings_path = folder / TOKENIZER_FILE, folder / SETTINGS_FILE
    if not path.is_file():
        return
    content = json.loads(path.read_bytes())
    content |= {"post_processor": None, "truncation": None, "padding": None}
    if "dropout" in content["model"]:
        content["model"]["dropout"] = None
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = json.loads(settings_path.read_bytes())
    for name in ("add_bos_token", "add_eos_token", "auto_map"):
        settings.pop(name, None)
    settings["tokenizer_class"] = GENERIC_CLASS  # others put the template back
    settings_path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _llama_config(
    shape: Mapping[str, Any], tensors: Mapping[str, Tensor], end_of_text: int | None
) -> dict[str, Any]:
    """Return the content of config.json, by names that versions 4 and 5 of transformers read."""
    embedding = tensors[_OF_THE_MODEL[_EMBEDDING]]
    head = shape["width"] // shape["heads"]  # features
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": embedding.shape[0],
        "hidden_size": shape["width"],
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": tensors["model.layers.0.self_attn.k_proj.weight"].shape[0] // head,
        "head_dim": head,
        "max_position_embeddings": shape["context"],
        "rms_norm_eps": _NORM_EPSILON,
        "rope_theta": _ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,  # which each document of the training data follows
        "eos_token_id": end_of_text,
        "torch_dtype": str(embedding.dtype).removeprefix("torch."),
    }


def _llama_tensors(file: safe_open, shape: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by their names in Llama. Raises ValueError if the names are not ours."""
    places: dict[str, tuple[str, ...]] = {name: (there,) for name, there in _OF_THE_MODEL.items()}
    for layer in range(shape["layers"]):
        for name, parts in _OF_A_LAYER.items():
            places[f"blocks.{layer}.{name}.weight"] = tuple(
                f"model.layers.{layer}.{part}.weight" for part in parts
            )
    differing = sorted(places.keys() ^ set(file.keys()))
    if differing:
        raise ValueError(
            f"the checkpoint is not of the model of --task {TASK} that its options describe, which "
            f"differs in {', '.join(differing[:3])}: export it to a .safetensors or .pt file"
        )
    width = shape["width"]
    tensors = {}
    for name, parts in places.items():
        view = file.get_slice(name)
        rows = view.get_shape()[0]
        # Queries come first and are of the model's width; the other parts are equal.
        first = width if len(parts) == 3 else rows // len(parts)
        low, high = 0, first
        for part in parts:
            tensors[part] = view[low:high]
            low, high = high, high + (rows - first) // max(1, len(parts) - 1)
    return tensors
