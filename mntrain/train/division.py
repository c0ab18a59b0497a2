"""The division of a step's samples between ranks, as the options want it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mntrain.config import Config
from mntrain.data.cadence import Cadence
from mntrain.data.shares import CALIBRATION, Shares, hinted_speeds
from mntrain.train.hardware import UNEQUAL, Speeds


class Refusal(NamedTuple):
    """A reason for equal shares, and what to do about it."""

    reason: str
    fix: str


_STREAM = Refusal(
    "the training data is an IterableDataset, whose samples are divided equally",
    "give a dataset with __len__ and __getitem__, or leave it out",
)


def refusal_of_shares(config: Config, size: int, *, stream: bool) -> Refusal | None:
    """Return why work must be divided equally on so many ranks; None if it need not."""
    batch_size = config.train.batch_size
    if stream:
        return _STREAM
    if config.balance.mode == "cadence":
        return _refusal_of_cadence(config)
    if batch_size < size:
        return Refusal(
            f"--train.batch-size {batch_size} has no sample for each of the {size} ranks",
            f"give at least {size}",
        )
    return None


def _refusal_of_cadence(config: Config) -> Refusal | None:
    """Return why ranks cannot have a cadence, but for their data; None if they can."""
    batch_size, mode = config.train.batch_size, config.sync.mode
    if mode != "every-step":
        return Refusal(
            f"--sync.mode {mode} exchanges parameters every few steps, and a cadence has one "
            "reduction of gradients in a step",
            "leave one of the two out",
        )
    if batch_size != Config().train.batch_size:
        return Refusal(
            f"--train.batch-size {batch_size} is not used, since a step has whole micro-batches, as"
            " many as the speeds of ranks say",
            "leave it out, and give --train.micro-batch-size",
        )
    return None


def check_rank_clipping(config: Config) -> None:
    """Raise ValueError if the gradients of each rank are to be clipped, and cannot be. Local."""
    limit = config.balance.max_rank_grad_norm
    if limit is not None and config.zero.stage == 2:
        raise ValueError(
            f"--balance.max-rank-grad-norm {limit:g}: at --zero.stage 2, ranks reduce the gradient "
            "of each micro-batch by itself, so none has the whole of its own; give --zero.stage 1"
        )


def most_samples(config: Config, size: int) -> int | None:
    """Return the largest share of one of so many ranks; None if there is no limit.

    At stage 2 each micro-batch is reduced by itself: there are as many as with equal shares.
    """
    if config.zero.stage != 2:
        return None
    micro = config.train.micro_batch_size
    return -(-config.train.batch_size // size // micro) * micro


def choose_shares(
    config: Config, speeds: Speeds, refusal: Refusal | None, gain: float, *, measures: bool = True
) -> Shares | None:
    """Return the shares of ranks of unequal speed; None if they are equal, as on one rank.

    Without speeds that options state they are equal at first, and measured (`measures`), or else
    follow the matrix products for good.

    Raises ValueError for speeds of ranks that do not exist, and, unless the choice is automatic, if
    there is a `refusal`. An automatic choice wants a `gain`.
    """
    balance, size = config.balance, len(speeds.flops)
    if balance.mode == "off" or (balance.mode == "cadence" and not refusal):
        return None
    if balance.mode == "auto":
        if refusal or gain < UNEQUAL:
            return None
        hints = speeds.relative()
    elif refusal:
        raise ValueError(f"--balance.mode {balance.mode}: {refusal.reason}; {refusal.fix}")
    else:
        hints = balance.speeds or ({} if measures else speeds.relative())
    with _hints_named(config):
        hinted_speeds(size, hints)
    return Shares(size, hints, most=most_samples(config, size)) if size > 1 else None


def measures_speeds(config: Config, nodes: int, done: int) -> bool:
    """Return whether ranks compare their speeds after `done` steps, often enough to plan by them.

    Nodes that do not wait for each other do so in the steps of the warm-up alone.
    """
    left = config.sync.warmup - done
    return not config.sync.max_staleness or nodes == 1 or left >= CALIBRATION


def choose_cadence(config: Config, size: int, samples: int, first: int) -> Cadence | None:
    """Return the plans of a job with a cadence, from step `first` on, 0 for the first of a run.

    None in another mode. Raises ValueError for speeds of ranks that do not exist, and for fewer
    samples than a step has.
    """
    balance = config.balance
    if balance.mode != "cadence":
        return None
    with _hints_named(config):
        hinted_speeds(size, balance.speeds)
    return Cadence(
        size,
        config.train.micro_batch_size,
        samples,
        first=first,
        target=balance.overhead_target,
        max_anchor=balance.max_anchor,
        # At stage 2 every micro-batch is reduced by itself, whatever the anchor.
        tunes=config.zero.stage != 2,
        hints=balance.speeds,
    )


@contextmanager
def _hints_named(config: Config) -> Iterator[None]:
    """Name the option of hints in the ValueError of a block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"--balance.speed {' '.join(config.balance.speed)}: {error}") from None
