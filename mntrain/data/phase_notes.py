"""Notes that tell of an exception in a job: its rank, its phase and the samples. Workers use it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mntrain.alike.naming import naming

# The beginning of torch's error in the BatchNorm of a single sample.
BATCH_OF_ONE = "Expected more than 1 value per channel when training"
_MOST = 32  # samples that are listed

_HINT = (
    "BatchNorm needs at least two samples in a micro-batch, and this one has one. If it is of an "
    "epoch's last batch, which may be smaller, give --data.drop-last to leave that out; else give "
    "a larger --train.batch-size or --train.micro-batch-size"
)


@contextmanager
def noted(rank: int, phase: str, samples: Callable[[], str] = str) -> Iterator[None]:
    """Add a note to an exception of the block: the rank, the phase, and its samples. Local."""
    try:
        yield
    except Exception as error:
        error.add_note(f"mntrain: rank {rank}: {phase} {samples()}".rstrip())
        if str(error).startswith(BATCH_OF_ONE):
            error.add_note(f"mntrain: rank {rank}: {_HINT}")
        raise


def name_samples(samples: Sequence[int], data: str) -> str:
    """Return "samples 3, 5 to 7 of the training data", with the first ones of many."""
    left = len(samples) - _MOST
    more = f" and {left} more" if left > 0 else ""
    return f"{naming('sample', samples[:_MOST])}{more} of the {data}"
