"""Export of a model as a folder of Hugging Face, which `from_pretrained` opens."""

import json
import secrets
import shutil
from pathlib import Path

import torch

from mntrain.checkpoint.format import MODEL, open_tensors, sync_folder
from mntrain.checkpoint.reader import load_model
from mntrain.huggingface import CONFIG_FILE, RUN_FOLDER, transformers_library


def export_folder(checkpoint: Path, out: Path, *, force: bool) -> int:
    """Write a checkpoint's model, configuration and tokenizer as a new folder; return its bytes.

    With `force`, files of an existing folder are replaced. The transformers library writes the
    weights, which may differ in names from those in memory. Raises ValueError for a run of another
    task, and OSError.
    """
    files = checkpoint.absolute().parents[1] / RUN_FOLDER
    if not (files / CONFIG_FILE).is_file():
        raise ValueError(
            f"{checkpoint} is of no run of --task hf, which has {RUN_FOLDER}/{CONFIG_FILE}: export "
            "it to a .safetensors or .pt file"
        )
    if out.exists() and not (force and out.is_dir()):
        raise ValueError(
            f"{out} exists: give another name, or --force to replace files in a folder"
        )
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        _write(checkpoint / MODEL, files, partial)
        written = sorted(partial.iterdir())
        size = sum(path.stat().st_size for path in written)
        if out.is_dir():
            for path in written:
                path.replace(out / path.name)
        else:
            partial.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return size


def _write(weights: Path, files: Path, out: Path) -> None:
    """Write the weights by the model's class, and copy the other files of a run."""
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
    for path in sorted(files.iterdir()):
        if path.name != CONFIG_FILE:
            shutil.copy2(path, out / path.name)
