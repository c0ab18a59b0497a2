"""Advice for code that needs a process group of torch.distributed, which MPI ranks do not have."""

ADVICE = (
    "mntrain's ranks exchange data over MPI, without a process group of torch.distributed: in the "
    "place of DistributedDataParallel, fully_shard, accelerate's Accelerator and Hugging Face's "
    "Trainer, use world.optimizer and world.shard in a loop of your own (docs/own-loop.md), or "
    "python -m mntrain --task hf"
)
_SIGNS = ("process group has not been initialized", "MASTER_ADDR expected", "RANK expected")


def advise(error: BaseException) -> None:
    """Add the advice, as a note, to an error that says that there is no process group. Local."""
    found = any(sign in str(error) for sign in _SIGNS)
    if found and ADVICE not in getattr(error, "__notes__", ()):
        error.add_note(ADVICE)
