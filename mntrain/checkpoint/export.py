"""Export of a checkpoint's model as one plain file for other programs."""

import os
import secrets
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from mntrain.checkpoint.format import create, describe_write_error, sync_folder
from mntrain.checkpoint.manifest import MODEL

ENDINGS = (".safetensors", ".pt", ".pth")


def check_target(out: Path, *, force: bool) -> None:
    """Raise ValueError unless `out` can be written; `force` allows it to replace a file."""
    if out.suffix not in ENDINGS:
        raise ValueError(f"{out}: the ending gives the format: use {' or '.join(ENDINGS)}")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: {out.parent} is not a folder: make it, or give another")
    if out.is_dir():
        raise ValueError(f"{out} is a folder: give the name of a file")
    if out.exists() and not force:
        raise ValueError(f"{out} exists: give another name, or --force to replace it")


def export(checkpoint: Path, out: Path) -> int:
    """Write parameters and buffers, named as in the model's state_dict; return the bytes.

    `out` becomes a safetensors file if its name ends so, else a state_dict for torch.load. It is
    replaced only when the new file is complete and on the disk. The model file of the checkpoint
    must have been verified. Raises OSError; `out` is unchanged then.
    """
    source = checkpoint / MODEL
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        create(partial, source.stat().st_size)
        with partial.open("r+b") as file:
            if out.suffix == ".safetensors":
                with source.open("rb") as model:
                    shutil.copyfileobj(model, file, 1 << 20)
            else:
                torch.save(load_file(source), file)  # maps the source into memory
            file.truncate()  # more may have been reserved
            file.flush()
            os.fsync(file.fileno())
        nbytes = partial.stat().st_size
        partial.replace(out)
    except (OSError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch wraps it
        if not isinstance(cause, OSError):
            raise
        partial.unlink(missing_ok=True)  # before the free space is measured
        message = describe_write_error(cause, source.stat().st_size, out.parent)
        raise OSError(cause.errno, message) from error
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(out.parent)
    return nbytes
