"""Exports of a model: as one plain file, or as a folder of Hugging Face.

The built-in language model becomes a Llama of the transformers library. Both are the same function
of the tokens. Llama has a matrix each for what ours computes by one product: queries, keys and
values, and the gate and the input of the MLP. Both rotate the pairs (i, i + d/2) of a head's
features, so no row is moved.
"""

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mntrain.checkpoint.format import MODEL, Manifest, open_tensors, sync_folder
from mntrain.checkpoint.reader import load_model
from mntrain.corpus.tokenizer import (
    BESIDE_TOKENIZER,
    GENERIC_CLASS,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    FileTokenizer,
)
from mntrain.metrics.files import write_whole
from mntrain.options.huggingface import CONFIG_FILE, RUN_FOLDER, transformers_library

# Files of a folder that another export may have left, and `from_pretrained` would read.
_EXPORTED = {"generation_config.json", MODEL, f"{MODEL}.index.json", TOKENIZER_FILE, SETTINGS_FILE}
_EXPORTED |= set(BESIDE_TOKENIZER)

_TASK = "lm"
# What `mntrain.tasks.transformer` has built in.
_NORM_EPSILON = 1e-6
_ROPE_THETA = 10_000.0
# Tensors of the whole model, and of each layer, by their names here. Those with several names there
# are split into as many parts.
_EMBEDDING = "embedding.weight"
_OF_THE_MODEL: dict[str, tuple[str, ...]] = {
    _EMBEDDING: ("model.embed_tokens.weight",),
    "norm.weight": ("model.norm.weight",),
}
_OF_A_LAYER = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def export_file(checkpoint: Path, out: Path) -> None:
    """Write parameters and buffers, named as in the model's state_dict.

    `out` becomes a safetensors file. It is replaced only when the new file is complete and on the
    disk. If this raises OSError, `out` is unchanged.
    """
    try:
        with (checkpoint / MODEL).open("rb") as model:
            write_whole(out, iter(lambda: model.read(1 << 20), b""))
        sync_folder(out.parent)
    except OSError as error:
        raise OSError(f"{out} was not written: {error}") from error


def export_folder(checkpoint: Path, content: Manifest, out: Path, *, force: bool) -> int:
    """Write a checkpoint's model, configuration and tokenizer as a new folder; return its bytes.

    With `force`, those files of an existing folder that are of a model are replaced. The
    transformers library writes the weights of --task hf, which may differ in names from those in
    memory. Raises ValueError for a run of a task other than hf and lm, and OSError.
    """
    files = checkpoint.absolute().parents[1] / RUN_FOLDER
    of_library = (files / CONFIG_FILE).is_file()
    if not of_library and content.config.get("task") != _TASK:
        raise ValueError(
            f"{checkpoint} is of no run of --task hf, which has {RUN_FOLDER}/{CONFIG_FILE}, or of "
            f"--task {_TASK}: export it to a .safetensors file"
        )
    if out.exists() and not (force and out.is_dir()):
        raise ValueError(
            f"{out} exists: give another name, or --force to replace files in a folder"
        )
    partial = _partial(out)
    try:
        if of_library:
            _write_by_library(checkpoint / MODEL, files, partial)
        else:
            partial.mkdir()
            _write_llama(checkpoint, content.config["model"], files, partial)
        for path in sorted(files.iterdir()) if files.is_dir() else ():
            if path.name != CONFIG_FILE:
                shutil.copy2(path, partial / path.name)
        if not of_library:
            _make_as_trained(partial)
        written = sorted(partial.iterdir())
        size = sum(path.stat().st_size for path in written)
        if out.is_dir():
            for path in written:
                path.replace(out / path.name)
            for name in _EXPORTED - {path.name for path in written}:
                (out / name).unlink(missing_ok=True)
        else:
            partial.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return size


def _partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")


def _write_by_library(weights: Path, files: Path, out: Path) -> None:
    """Write the weights and the configuration by the model's class."""
    library = transformers_library()
    config = library.AutoConfig.from_pretrained(
        str(files), local_files_only=True, trust_remote_code=False
    )
    kind = getattr(library, json.loads((files / CONFIG_FILE).read_text())["architectures"][0])
    with open_tensors(weights) as tensors:
        names = list(tensors.keys())
        dtypes = {tensors.get_tensor(name).dtype for name in names}
        floating = [dtype for dtype in dtypes if dtype.is_floating_point]
        model = kind._from_config(
            config, dtype=floating[0] if len(floating) == 1 else torch.float32
        )
        load_model(tensors, model)
    model.save_pretrained(out)


def _write_llama(checkpoint: Path, shape: Mapping[str, Any], tokenizer: Path, out: Path) -> None:
    """Write config.json and model.safetensors of a checkpoint of --task lm into a folder.

    `shape` has the options of --model. `tokenizer` is a folder, which need not have one. Raises
    ValueError for a checkpoint of another model.
    """
    path = tokenizer / TOKENIZER_FILE
    # Which each document of the training data follows.
    end_of_text = FileTokenizer(path).end_of_text if path.is_file() else None
    with open_tensors(checkpoint / MODEL) as file:
        tensors = _llama_tensors(file, shape)
        embedding, head = tensors[_OF_THE_MODEL[_EMBEDDING][0]], shape["width"] // shape["heads"]
        config = {  # by names that versions 4 and 5 of transformers read
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": embedding.shape[0],
            "hidden_size": shape["width"],
            "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
            "num_hidden_layers": shape["layers"],
            "num_attention_heads": shape["heads"],
            "num_key_value_heads": (
                tensors["model.layers.0.self_attn.k_proj.weight"].shape[0] // head
            ),
            "head_dim": head,  # features
            "max_position_embeddings": shape["context"],
            "rms_norm_eps": _NORM_EPSILON,
            "rope_theta": _ROPE_THETA,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
            "torch_dtype": str(embedding.dtype).removeprefix("torch."),
        }
        (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, out / MODEL, metadata={"format": "pt"})


def _llama_tensors(file: safe_open, shape: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by their names in Llama. Raises ValueError if the names are not ours."""
    places = dict(_OF_THE_MODEL)
    for layer in range(shape["layers"]):
        for name, parts in _OF_A_LAYER.items():
            there = tuple(f"model.layers.{layer}.{part}.weight" for part in parts)
            places[f"blocks.{layer}.{name}.weight"] = there
    differing = sorted(places.keys() ^ set(file.keys()))
    if differing:
        raise ValueError(
            f"the checkpoint is not of the model of --task {_TASK} that its options describe, "
            f"which differs in {', '.join(differing[:3])}: export it to a .safetensors file"
        )
    tensors = {}
    for name, parts in places.items():
        view = file.get_slice(name)
        rows = view.get_shape()[0]
        # Queries come first and are of the model's width; the other parts are equal.
        first = shape["width"] if len(parts) == 3 else rows // len(parts)
        low, high = 0, first
        for part in parts:
            tensors[part] = view[low:high]
            low, high = high, high + (rows - first) // max(1, len(parts) - 1)
    return tensors


def _make_as_trained(folder: Path) -> None:
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
