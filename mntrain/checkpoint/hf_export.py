"""Export of a model as a folder of Hugging Face, which `from_pretrained` opens."""

import json
import secrets
import shutil
from pathlib import Path

import torch

from mntrain.checkpoint import llama_export
from mntrain.checkpoint.format import MODEL, Manifest, open_tensors, sync_folder
from mntrain.checkpoint.reader import load_model
from mntrain.corpus.tokenizer import (
    BESIDE_TOKENIZER,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    ByteTokenizer,
)
from mntrain.huggingface import CONFIG_FILE, RUN_FOLDER, transformers_library

# Files of a folder that another export may have left, and `from_pretrained` would read.
_EXPORTED = {"generation_config.json", MODEL, f"{MODEL}.index.json", TOKENIZER_FILE, SETTINGS_FILE}
_EXPORTED |= set(BESIDE_TOKENIZER)


def export_folder(checkpoint: Path, content: Manifest, out: Path, *, force: bool) -> int:
    """Write a checkpoint's model, configuration and tokenizer as a new folder; return its bytes.

    With `force`, those files of an existing folder that are of a model are replaced. The
    transformers library writes the weights of --task hf, which may differ in names from those in
    memory. Raises ValueError for a run of a task other than hf and lm, and OSError.
    """
    files = checkpoint.absolute().parents[1] / RUN_FOLDER
    of_library = (files / CONFIG_FILE).is_file()
    if not of_library and content.config.get("task") != llama_export.TASK:
        raise ValueError(
            f"{checkpoint} is of no run of --task hf, which has {RUN_FOLDER}/{CONFIG_FILE}, or of "
            f"--task {llama_export.TASK}: export it to a .safetensors or .pt file"
        )
    if out.exists() and not (force and out.is_dir()):
        raise ValueError(
            f"{out} exists: give another name, or --force to replace files in a folder"
        )
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        if of_library:
            _write(checkpoint / MODEL, files, partial)
        else:
            partial.mkdir()
            llama_export.write_llama(checkpoint, content.config["model"], files, partial)
        _copy_others(files, partial)
        if not of_library:
            llama_export.plain_tokenizer(partial)
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


def _write(weights: Path, files: Path, out: Path) -> None:
    """Write the weights and the configuration by the model's class."""
    with transformers_library() as library:
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


def _copy_others(files: Path, out: Path) -> None:
    """Copy the files of a run for exports but the configuration."""
    for path in sorted(files.iterdir()) if files.is_dir() else ():
        if path.name != CONFIG_FILE:
            shutil.copy2(path, out / path.name)


def missing_tokenizer(checkpoint: Path, content: Manifest) -> str:
    """Return why an exported folder has no tokenizer, in one line; an empty text if it has one."""
    if (checkpoint.absolute().parents[1] / RUN_FOLDER / TOKENIZER_FILE).is_file():
        return ""
    identity = content.data.get("values", {}).get("the tokenizer")
    if identity == ByteTokenizer.identity:
        return "tokens are bytes, so there is no tokenizer.json"
    if identity is None:
        return "the data were token ids without a tokenizer, so there is no tokenizer.json"
    return f"the run has no copy of its tokenizer ({identity}): add its {TOKENIZER_FILE}"
