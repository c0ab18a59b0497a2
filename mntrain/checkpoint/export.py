"""A checkpoint's model as one plain file, which other programs open without this one."""

import errno
import math
import mmap
import os
import secrets
import shutil
import warnings
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mntrain.checkpoint.format import FileLayout, create
from mntrain.checkpoint.manifest import MODEL, Manifest
from mntrain.checkpoint.verified_file import VerifiedFile

ENDINGS = (".safetensors", ".pt", ".pth")


def check_target(out: Path, *, force: bool) -> None:
    """Raise ValueError unless a model can go there; with `force`, in place of a file."""
    if out.suffix not in ENDINGS:
        raise ValueError(f"{out}: its ending is to say the format: {' or '.join(ENDINGS)}")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: {out.parent} is no folder: make it, or give another")
    if out.is_dir():
        raise ValueError(f"{out} is a folder: give the name of a file")
    if out.exists() and not force:
        raise ValueError(f"{out} exists: give another name, or --force to replace it")


def export(checkpoint: Path, content: Manifest, out: Path) -> int:
    """Write parameters and buffers, by their names in the model's state_dict; gives the bytes.

    `.safetensors`: a safetensors file; else a state_dict for torch.load. What is at `out` is
    replaced when the new file is whole and on the disk. ValueError for a damaged checkpoint, and
    OSError; then `out` is as it was.
    """
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    with VerifiedFile(checkpoint / MODEL, content.runs[MODEL]) as model:
        needed = model.layout.nbytes
        try:
            create(partial, needed)
            with partial.open("r+b") as file:
                if out.suffix == ".safetensors":
                    _copy(model, file)
                else:
                    _save(model, checkpoint / MODEL, file)
                file.truncate()  # what was reserved may be more
                file.flush()
                os.fsync(file.fileno())
            nbytes = partial.stat().st_size
            partial.replace(out)
        except OSError as error:
            partial.unlink(missing_ok=True)  # before anybody asks how much is free
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room(error.errno, needed, out.parent) from error
            raise
        finally:
            partial.unlink(missing_ok=True)
    _sync_folder(out.parent)
    return nbytes


def _copy(model: VerifiedFile, file: BinaryIO) -> None:
    """The file of a checkpoint is a plain one already."""
    for piece in model.pieces(0, model.layout.nbytes):
        file.write(piece)


def _save(model: VerifiedFile, path: Path, file: BinaryIO) -> None:
    """Compare all bytes with their checksums, then have torch write them."""
    for _ in model.pieces(0, model.layout.nbytes):
        pass
    try:
        torch.save(_mapped(path, model.layout), file)
    except RuntimeError as error:  # what torch makes of an OSError of the file
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _mapped(path: Path, layout: FileLayout) -> dict[str, Tensor]:
    """A file's tensors, by name. They are read-only, and take no memory but the file's cache."""
    with path.open("rb") as file:
        # Nobody closes it: it ends with the last of the tensors.
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes
        for name, entry in layout.entries.items():
            count, dtype = math.prod(entry.shape), entry.dtype
            tensors[name] = (
                torch.frombuffer(whole, dtype=dtype, count=count, offset=entry.start)
                if count
                else torch.empty(0, dtype=dtype)
            ).view(entry.shape)
    return tensors


def _no_room(number: int, needed: int, folder: Path) -> OSError:
    free = shutil.disk_usage(folder).free
    return OSError(
        number,
        f"{os.strerror(number)}: it needs {needed / 1e6:.1f} MB, of which {free / 1e6:.1f} MB are "
        f"free in {folder} now",
    )


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
