"""The division of a step's samples between ranks, as the options want it."""

from mntrain.balance.cadence import Cadence
from mntrain.balance.shares import CALIBRATION, Shares, hinted_speeds
from mntrain.config import Config


def refusal_of_balance(config: Config, size: int, *, stream: bool) -> str:
    """Return why so many ranks must divide work equally, and the fix; "" if they need not."""
    batch_size, mode = config.train.batch_size, config.sync.mode
    if stream:
        return (
            "the training data is an IterableDataset, whose samples are divided equally; give a "
            "dataset with __len__ and __getitem__, or leave it out"
        )
    if config.balance.mode != "cadence":
        lacking = (
            f"--train.batch-size {batch_size} has no sample for each of the {size} ranks; give at "
            f"least {size}"
        )
        return lacking if batch_size < size else ""
    if mode != "every-step":
        return (
            f"--sync.mode {mode} exchanges parameters every few steps, and a cadence has one "
            "reduction of gradients in a step; leave one of the two out"
        )
    if batch_size != Config().train.batch_size:
        return (
            f"--train.batch-size {batch_size} is not used, since a step has whole micro-batches, as"
            " many as the speeds of ranks say; leave it out, and give --train.micro-batch-size"
        )
    return ""


def most_samples(config: Config, size: int) -> int | None:
    """Return the largest share of one of so many ranks; None if there is no limit.

    At stage 2 each micro-batch is reduced by itself: there are as many as with equal shares.
    """
    if config.zero.stage != 2:
        return None
    micro = config.train.micro_batch_size
    return -(-config.train.batch_size // size // micro) * micro


def choose_shares(config: Config, size: int, *, stream: bool) -> Shares | None:
    """Return the shares of ranks of unequal speed; None if they are equal, as on one rank.

    They are equal at first, or follow the speeds that options state. Raises ValueError for options
    that cannot be followed, of a cadence too, and for speeds of ranks that do not exist.
    """
    balance, limit = config.balance, config.balance.max_rank_grad_norm
    if limit is not None and config.zero.stage == 2:
        raise ValueError(
            f"--balance.max-rank-grad-norm {limit:g}: at --zero.stage 2, ranks reduce the gradient "
            "of each micro-batch by itself, so none has the whole of its own; give --zero.stage 1"
        )
    if balance.mode == "off":
        return None
    if refusal := refusal_of_balance(config, size, stream=stream):
        raise ValueError(f"--balance.mode {balance.mode}: {refusal}")
    try:
        hinted_speeds(size, balance.speeds)
    except ValueError as error:
        raise ValueError(f"--balance.speed {' '.join(balance.speed)}: {error}") from None
    if balance.mode == "cadence" or size == 1:
        return None
    return Shares(size, balance.speeds, most=most_samples(config, size))


def measures_speeds(config: Config, nodes: int, done: int) -> bool:
    """Return whether ranks compare their speeds after `done` steps, often enough to plan by them.

    Nodes that do not wait for each other do so in the steps of the warm-up alone.
    """
    left = config.sync.warmup - done
    return not config.sync.max_staleness or nodes == 1 or left >= CALIBRATION


def choose_cadence(config: Config, size: int, samples: int, first: int) -> Cadence | None:
    """Return the plans of a job with a cadence, from step `first` on, 0 for the first of a run.

    None in another mode. Raises ValueError for fewer samples than a step has.
    """
    balance = config.balance
    if balance.mode != "cadence":
        return None
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
